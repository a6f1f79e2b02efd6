"""What a user would pick instead of alignment, measured in the same run: whole-model ``torch.compile``, an fp32 LM head, Liger."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import torch

from .. import backend as backends
from .arms import aligned, fp32_head, liger, liger_missing, unaligned, whole_model_compile
from .measure import Bench, cpu_threads, here, measure, seconds_of
from .models import build
from .rows import Alternative


def _graphs() -> int:
    """Return how many graphs Dynamo has made in this process."""
    from torch._dynamo.utils import counters  # Dynamo's own count; the name is stable since torch 2.1

    return counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def _cold() -> Iterator[None]:
    """Run the block with no compiled graph in this process and with an empty Inductor cache directory."""
    from torch._inductor import utils

    torch._dynamo.reset()
    backends.compiled.cache_clear()
    fresh_cache = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache  # its name before torch 2.8
    with fresh_cache():
        yield
    torch._dynamo.reset()
    backends.compiled.cache_clear()


def run_alternatives(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    plans: Sequence[str] = ("rope", "all"),
    engine: str = "vllm_compiled",
    layers: int | None = None,
    tokens: int = 1024,
    lengths: int = 10,
    device: str | None = None,
    threads: int | None = None,
    pairs: int = 7,
    progress: bool = True,
    seed: int = 0,
) -> list[Alternative]:
    """Measure aligned models and what a user would pick instead, each from cold caches; return the rows.

    The arguments are those of :func:`.run.run_overhead`; ``lengths`` is the number of different sequence lengths, drawn from
    tokens / 4 to tokens.
    """
    device = here(device)
    arms = [aligned(regions, engine, "compile") for regions in plans]
    arms += [whole_model_compile(), whole_model_compile(emulate=True), fp32_head(), fp32_head(arms[-1])]
    out = []
    with cpu_threads(threads):
        label, lm = build(model, shape, family, layers, device, seed)
        bench = Bench.make(lm, "model", tokens, device, seed=seed)
        draw = random.Random(seed)
        varied = [bench.inputs[0][:, : draw.randrange(tokens // 4, tokens)] for _ in range(lengths)]
        runs = Bench(lm, "model", tuple(varied), (), device)

        def over_lengths(call):
            for i in range(lengths):
                runs.run(call, "forward_backward", i)
                runs.clear()

        def wall(run):
            return seconds_of(run, device)["wall"]

        with unaligned().enter(lm, "model") as call:
            bench.run(call, "forward_backward", 0)
            steps = [wall(lambda: bench.run(call, "forward_backward", 0)) for _ in range(3)]
            bench.clear()
            base_lengths = wall(lambda: over_lengths(call))
        for arm in arms:
            with _cold():
                start = _graphs()
                with arm.enter(lm, "model") as call:
                    first = wall(lambda call=call: bench.run(call, "forward_backward", 0))
                    bench.clear()
                    after_first = _graphs()
                    varied_s = wall(lambda call=call: over_lengths(call))
                    after_lengths = _graphs()
                phases = ("forward", "forward_backward")
                rows = measure(lm, label, [arm], ("model",), phases, tokens, pairs, progress=progress, seed=seed)
            out.append(
                Alternative(
                    arm=arm.name,
                    plan=arm.plan,
                    measured="yes",
                    first_call_steps=first / sorted(steps)[1],
                    graphs_first=after_first - start,
                    graphs_lengths=after_lengths - after_first,
                    lengths=lengths,
                    lengths_ratio=varied_s / base_lengths,
                    rows=tuple(rows),
                )
            )
        missing = liger_missing(device)
        if missing:
            out.append(Alternative("Liger", "none", missing))
        else:
            rows = measure(lm, label, [liger()], ("model",), ("forward", "forward_backward"), tokens, pairs, seed=seed)
            out.append(Alternative("Liger", "none", "yes", rows=tuple(rows)))
    return out
