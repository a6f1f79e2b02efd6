"""Where does the time of one pass go? Self time of operators in torch's profiler, by kind, on a CPU.

Alignment can only save what eager Hugging Face spends outside matrix products and attention. This table says how much that
is. All arms are in percent of the unaligned pass, so that a column's sum is its ratio of times. That ratio is one median
with the profiler on and has no interval; :mod:`.measure` measures ratios.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from statistics import median
from unittest import mock

import torch

from .. import backend
from .arms import aligned, unaligned
from .measure import Bench, cpu_threads
from .models import build

# kind -> names of operators that belong to it; the first kind that matches counts
KINDS = {
    "matrix products": r"aten::(mm|addmm|bmm|baddbmm)$|mkldnn_linear",
    "attention": r"scaled_dot_product",
    "compiled regions": r"## Call CompiledFxGraph",
    "calling them": r"CompiledFunction|Compiled ?Fx|TorchDynamo|AOTDispatcher|Pregraph|Torch-Compiled",
    "loss": r"log_softmax|nll_loss|cross_entropy|LogSoftmax|NllLoss",
    "other operators": r"",
}


def kind_of(operator: str) -> str:
    """Return an operator's kind.

    >>> kind_of("aten::mm"), kind_of("aten::mul")
    ('matrix products', 'other operators')
    """
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, operator))


def _pass(bench: Bench, call, i: int) -> dict[str, float]:
    """Return kind -> seconds of one profiled forward and backward pass."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        bench.run(call, "forward_backward", i)
    found = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    bench.clear()
    return found


def traffic(bench: Bench, call) -> int:
    """Return the bytes that the region calls of one forward and backward pass read and write at least.

    Forward reads the inputs and writes the outputs. Backward reads the inputs again, since regions recompute, reads the
    gradients of the outputs, and writes those of the inputs. Together that is 3 times the inputs and 2 times the outputs.
    """
    found, original = 0, backend.run

    def counted(function, rows, rnd, chosen, **kwargs):
        nonlocal found
        out = original(function, rows, rnd, chosen, **kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        found += 3 * sum(x.nbytes for x in rows.values()) + 2 * sum(x.nbytes for x in outputs)
        return out

    with mock.patch.object(backend, "run", counted):
        bench.run(call, "forward_backward", 0)
    bench.clear()
    return found


def bandwidth(numel: int, repeats: int = 200) -> float:
    """Return the bytes per second of ``torch.add`` of bf16 tensors: operands and result count, median over repeats.

    Args:
        numel: elements of each tensor; a dozen of them take turns, so that they come from where a layer's activations do.
        repeats: additions.
    """
    pool = [torch.ones(numel, dtype=torch.bfloat16) for _ in range(12)]
    seconds = []
    for i in range(repeats):
        a, b, out = (pool[(3 * i + j) % len(pool)] for j in range(3))
        began = time.perf_counter()
        torch.add(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    return 3 * pool[0].nbytes / median(seconds)


def shares(
    model: str | None = None,
    shape: str | None = None,
    layers: int | None = None,
    plans: Sequence[str] = ("all",),
    engine: str = "vllm_compiled",
    tokens: int = 1024,
    threads: int | None = None,
    passes: int = 5,
) -> dict:
    """Return ``{model, layers, tokens, passes, shares, floor, bandwidth, seconds}``.

    ``shares`` is arm -> kind -> percent of the unaligned pass. ``floor`` is arm -> the percentage that the compiled regions'
    ``traffic`` takes at this machine's ``bandwidth`` (bytes per second). ``seconds`` is what the unaligned pass takes.

    The arguments are those of :func:`.run.run_overhead`; ``passes`` of each arm are profiled, interleaved, and the median is
    taken.
    """
    arms = [unaligned(), *(aligned(regions, engine, "compile") for regions in plans)]
    with cpu_threads(threads):
        label, lm = build(model, shape, None, layers, "cpu")
        bench = Bench.make(lm, "model", tokens, "cpu")
        seen: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
        moved, speed = {}, bandwidth(tokens * lm.config.intermediate_size)
        for i in range(-1, passes):  # the first of each warms up
            for arm in arms:
                with arm.enter(lm, "model") as call:
                    found = _pass(bench, call, i)
                    if i < 0 and arm is not arms[0]:
                        moved[arm.name] = traffic(bench, call)
                if i >= 0:
                    seen[arm.name].append(found)
    middle = {arm: {kind: median(one[kind] for one in each) for kind in KINDS} for arm, each in seen.items()}
    whole = sum(middle["none"].values())
    out = {arm: {kind: 100 * seconds / whole for kind, seconds in each.items()} for arm, each in middle.items()}
    floor = {arm: 100 * n / speed / whole for arm, n in moved.items()}
    about = {"model": label, "layers": lm.config.num_hidden_layers, "tokens": tokens, "passes": passes}
    return {**about, "shares": out, "floor": floor, "bandwidth": speed, "seconds": whole}
