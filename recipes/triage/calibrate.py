"""Detection rate of each kind and size of fault, and false alarms on clean runs, at 2,000 tokens.

Each draw takes whole sequences at random until 2,000 tokens are there; ``triage`` sees the log-probs alone, without the
run's settings. Detected: the first cause named is the expected one. Writes ``results/calibration.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent))
import make_inputs as inputs

from verl_rounding_align import report
from verl_rounding_align.measure import triage as tool
from verl_rounding_align.measure.pairs import Pairs
from verl_rounding_align.measure.rollout import Rollouts

TOKENS = 2000
DRAWS = 200


@dataclass(frozen=True)
class Case:
    """One fault at one size: ``cause`` is what triage should name first."""

    cause: str
    size: str
    pairs: Pairs


def pairs_of(rollouts: Rollouts, trainer: np.ndarray, **more) -> Pairs:
    """Return the rollouts' log-probs with a trainer's; of the first sequences if the trainer scored fewer."""
    offsets = rollouts.response_offsets
    n = int(np.searchsorted(offsets, len(trainer)))
    first = rollouts.prompts.numpy()[:n]
    ids = np.concatenate([rollouts.sequence(i)[first[i] :].numpy() for i in range(n)])
    engine = rollouts.log_probs.numpy()[: len(trainer)]
    return Pairs.of(engine, trainer, offsets[: n + 1], ids=ids, prompts=first, **more)


def clean(gap: Path | None) -> Iterator[Case]:
    """Yield runs without a fault: every engine mode and alignment that ``gap`` left, temperatures that agree."""
    for mode in ("compiled", "eager"):
        if gap and (gap / mode / "rollouts.safetensors").exists():
            rollouts = Rollouts.load(gap / mode)
            for file in sorted((gap / mode).glob("trainer.*.safetensors")):
                name = file.name.removeprefix("trainer.").removesuffix(".safetensors").split(".")
                arm = name[0] + (", one sequence at a time" if name[2] == "1" else "")
                yield Case(tool.ROUNDING, f"{mode}, {arm}", pairs_of(rollouts, load_file(file)["log_probs"]))
    for name, (mode, temperature, top_p, top_k) in inputs.RUNS.items():
        agrees = mode == "processed_logprobs" and top_p == 1 and not top_k
        if agrees and (inputs.OUT / name / "trainer.safetensors").exists():
            scores = load_file(inputs.OUT / name / "trainer.safetensors")[f"{temperature:g}"]
            size = f"eager, both at temperature {temperature:g}"
            yield Case(tool.ROUNDING, size, pairs_of(Rollouts.load(inputs.OUT / name), scores))


def faults() -> Iterator[Case]:
    """Yield every fault at every size."""
    for name, (mode, temperature, top_p, top_k) in inputs.RUNS.items():
        if not (inputs.OUT / name / "trainer.safetensors").exists():
            continue
        rollouts, scores = Rollouts.load(inputs.OUT / name), load_file(inputs.OUT / name / "trainer.safetensors")
        if mode == "raw_logprobs" and temperature != 1:
            yield Case("processed-against-raw", f"T = {temperature:g}", pairs_of(rollouts, scores[f"{temperature:g}"]))
        elif mode == "processed_logprobs" and temperature != 1:
            yield Case("temperature", f"T = {temperature:g} scored at 1", pairs_of(rollouts, scores["1"]))
        elif mode == "processed_logprobs" and (top_p < 1 or top_k):
            yield Case("kept-mass", f"top-p {top_p:g}" if top_p < 1 else f"top-k {top_k}", pairs_of(rollouts, scores["1"]))
    if not (inputs.OUT / "clean" / "trainer.safetensors").exists():
        return
    rollouts = Rollouts.load(inputs.OUT / "clean")
    base = pairs_of(rollouts, load_file(inputs.OUT / "clean" / "trainer.safetensors")["1"])
    yield from changed(base)
    for file in sorted((inputs.OUT / "faults").glob("*.safetensors")):
        kind, _, size = file.stem.partition(" ")
        cause, name = {
            "noise": ("weights", f"every matrix with noise of {size} of its size"),
            "rope": ("growth-with-position", f"RoPE {size}"),
            "window": ("growth-with-position", f"the trainer sees {size} tokens back"),
            "pad": ("padding-or-mask", f"{size} padding tokens in front attended"),
            "cut": ("growth-with-length", f"prompts cut to fit {size} tokens"),
        }[kind]
        yield Case(cause, name, pairs_of(rollouts, load_file(file)["1"]))


def bf16(x: np.ndarray) -> np.ndarray:
    """Return fp32 numbers rounded to bf16, to nearest even."""
    import torch

    return torch.from_numpy(x.astype(np.float32)).bfloat16().float().numpy().astype(np.float64)


def changed(base: Pairs) -> Iterator[Case]:
    """Yield faults of how log-probs are handled, made from a clean run's."""
    from dataclasses import replace

    for k in (1, -1):
        yield Case("one-token-shift", f"every sequence, by {k:+d}", replace(base, trainer=rolled(base, k)))
    for every in (3, 8):
        moved = (np.repeat(np.arange(len(base)), np.diff(base.offsets)) % every) == 0
        pairs = replace(base, trainer=np.where(moved, rolled(base, 1), base.trainer))
        yield Case("one-token-shift", f"one sequence in {every}", pairs)
    yield Case("low-precision-log-probs", "rollout in bf16", replace(base, rollout=bf16(base.rollout)))
    yield Case("low-precision-log-probs", "trainer in bf16", replace(base, trainer=bf16(base.trainer)))
    half = base.rollout.astype(np.float16).astype(np.float64)
    yield Case("low-precision-log-probs", "rollout in fp16", replace(base, rollout=half))
    for n in (1, 4, 16):
        spans = (base.positions >= 20) & (base.positions < 20 + n)
        pairs = replace(base, rollout=np.where(spans, 0.0, base.rollout))
        yield Case("padding-or-mask", f"{n} tool tokens in a response count", pairs)
    left = np.concatenate([np.arange(a - 1, b - 1) for a, b in zip(base.offsets, base.offsets[1:], strict=False)])
    off = (base.positions == 0) & (np.arange(len(base.rollout)) > 0)
    yield Case(
        "padding-or-mask", "the mask starts one token early", replace(base, rollout=np.where(off, base.rollout[left], base.rollout))
    )
    gone = np.random.default_rng(0).random(len(base.rollout)) < 0.01
    yield Case("missing-log-probs", "1 % not a number", replace(base, rollout=np.where(gone, np.nan, base.rollout)))
    yield Case("missing-log-probs", "rollout copied", replace(base, rollout=base.trainer.copy()))
    yield Case("missing-log-probs", "rollout all 0", replace(base, rollout=np.zeros(len(base.rollout))))


def rolled(base: Pairs, k: int) -> np.ndarray:
    """Return the trainer's log-probs moved by k tokens within each sequence, the ends repeated."""
    starts, ends = np.repeat(base.offsets[:-1], np.diff(base.offsets)), np.repeat(base.offsets[1:], np.diff(base.offsets))
    return base.trainer[np.clip(np.arange(len(base.trainer)) - k, starts, ends - 1)]


def draws(pairs: Pairs, tokens: int, n: int, seed: int) -> Iterator[Pairs]:
    """Yield n random choices of whole sequences with at least so many tokens."""
    rng, lengths = np.random.default_rng(seed), np.diff(pairs.offsets)
    for _ in range(n):
        order = rng.permutation(len(pairs))
        yield pairs.select(order[: int(np.searchsorted(lengths[order].cumsum(), tokens)) + 1])


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate (Wilson 1927)."""
    z, rate = 1.96, hits / n
    middle, half = rate + z * z / (2 * n), z * ((rate * (1 - rate) + z * z / (4 * n)) / n) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def rate(case: Case, tokens: int, n: int) -> dict:
    """Return how often triage names what is there."""
    named = Counter(tool.triage(sample)[0].cause for sample in draws(case.pairs, tokens, n, seed=1))
    hits = named[case.cause]
    return dict(
        cause=case.cause, size=case.size, hits=hits, draws=n, interval=wilson(hits, n),
        k3=float(np.nanmean(tool.k3_terms(case.pairs.rollout - case.pairs.trainer))),
        others={cause: count for cause, count in named.most_common() if cause != case.cause},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gap", type=Path, help="folder that `verl-rounding-align gap` left, for more clean runs")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/calibration.json")
    options = parser.parse_args()
    rows = []
    for case in [*clean(options.gap), *faults()]:
        rows.append(rate(case, options.tokens, options.draws))
        r = rows[-1]
        print(f"{r['cause']:24s} {r['size']:44s} {r['hits']:4d} of {r['draws']}  k3 {r['k3']:.2g}  {json.dumps(r['others'])}", flush=True)
    report.write_json(options.json, {"tokens": options.tokens, "rows": rows})


if __name__ == "__main__":
    main()
