"""Detection rate of each kind and size of fault, and false alarms on clean runs, at 2,000 tokens.

Each draw takes whole sequences at random until 2,000 tokens are there; ``triage`` sees the log-probs alone, but
where a row says so. Detected: the first cause named is the expected one. Causes that settings decide get theirs; weights and RoPE parameters are
also compared (digests, frequencies). Writes ``results/calibration.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent))
import make_inputs as inputs

from verl_rounding_align.gap.rollouts import Rollouts
from verl_rounding_align.logprobs.pairs import Pairs
from verl_rounding_align.logprobs.tally import k3_terms
from verl_rounding_align.report import rows as report
from verl_rounding_align.triage.causes import OTHER
from verl_rounding_align.triage.compare import compare_rope, compare_weights
from verl_rounding_align.triage.detect import triage
from verl_rounding_align.triage.facts import Facts
from verl_rounding_align.triage.rows import ROUNDING

TOKENS = 2000
DRAWS = 200


@dataclass(frozen=True)
class Case:
    """One fault at one size: ``cause`` is what triage should name first."""

    cause: str
    size: str
    pairs: Pairs
    also: tuple[str, ...] = ()  # names that are right too
    # (sequences,) bool, those with the fault: a draw holds two of either kind, or shows nothing
    part: np.ndarray | None = None
    facts: Facts = Facts()  # what is known beside log-probs
    fresh: bool = True  # not of the samples that thresholds were set with


Store = Mapping[str, np.ndarray]  # of make_inputs.store


def pairs_of(store: Store, run: str, trainer: np.ndarray) -> Pairs:
    """Return a run's log-probs with a trainer's; of the first sequences if the trainer scored fewer."""
    offsets = store[f"{run}/offsets"].astype(np.int64)
    n = int(np.searchsorted(offsets, len(trainer)))
    end, prompts = offsets[n], store[f"{run}/prompts"][:n].astype(np.int64)
    ids = store[f"{run}/ids"][:end].astype(np.int64)
    return Pairs.of(store[f"{run}/rollout"][:end], trainer[:end], offsets[: n + 1], ids=ids, prompts=prompts)


LAYOUTS = {"batched": "", "single": ", one sequence at a time", "padded": ", padded", "packed": ", packed"}


def of_gap(folder: Path) -> Iterator[Case]:
    """Yield the clean runs that ``verl-rounding-align gap`` left: each engine mode, each alignment, each layout."""
    for mode in ("compiled", "eager"):
        if not (folder / mode / "rollouts.safetensors").exists():
            continue
        rollouts = Rollouts.load(folder / mode)
        for file in sorted((folder / mode).glob("trainer.*.safetensors")):
            with safe_open(file, "np") as kept:
                how, scores = kept.metadata(), kept.get_tensor("log_probs")
            # trainer.<points>.<preset>.<layout>.safetensors
            arm, layout = how["points"] or "none", file.name.split(".")[-2]
            arm += f" as {how['preset']}" if how["points"] else ""
            yield Case(ROUNDING, f"{mode}, {arm}{LAYOUTS[layout]}", rollouts.pairs(scores), fresh=False)


def cases(store: Store) -> Iterator[Case]:
    """Yield runs without a fault, at temperatures that agree, and every fault at every size."""
    for name, (mode, temperature, top_p, top_k) in inputs.RUNS.items():
        if f"{name}/rollout" not in store or name == "groups":
            continue

        def at(t: float, name=name) -> Pairs:
            return pairs_of(store, name, store[f"{name}/trainer {t:g}"])

        if mode == "raw_logprobs" and temperature != 1:
            yield Case(ROUNDING, f"eager, raw at T = {temperature:g}, scored at 1", at(1))
            yield Case("processed-against-raw", f"T = {temperature:g}", at(temperature))
        elif mode == "raw_logprobs":
            yield Case(ROUNDING, f"eager, raw at top-p {top_p:g}", at(1))
        elif top_p < 1 or top_k:
            yield Case("kept-mass", f"top-p {top_p:g}" if top_p < 1 else f"top-k {top_k}", at(1))
        else:
            yield Case(ROUNDING, f"eager, both at T = {temperature:g}", at(temperature))
            if temperature != 1:
                yield Case("temperature", f"T = {temperature:g} scored at 1", at(1))
    if "random qwen3/rollout" in store:
        yield Case(
            ROUNDING,
            "eager, random Qwen3",
            pairs_of(store, "random qwen3", store["random qwen3/trainer 1"]),
            fresh=False,
        )
    for name, experts in (("qwen3_moe_8", "1 of 8"), ("qwen3_moe", "2 of 16"), ("qwen3_moe_64", "4 of 64")):
        if f"random {name}/rollout" in store:
            pairs = pairs_of(store, f"random {name}", store[f"random {name}/trainer 1"])
            yield Case("moe-routing", f"random Qwen3-MoE, {experts} experts", pairs, fresh=False)
            yield Case(
                "moe-routing", f"random Qwen3-MoE, {experts} experts, over 8 steps", with_steps(pairs), fresh=False
            )
    if "groups/rollout" in store:
        groups = pairs_of(store, "groups", store["groups/trainer 1"])
        yield Case(ROUNDING, "eager, 8 answers to each of 4 prompts", groups)
        yield Case(ROUNDING, "eager, 8 answers to each of 4 prompts, the first 125 tokens", head(groups, 125))
    if "clean/rollout" in store:
        base = pairs_of(store, "clean", store["clean/trainer 1"])
        yield from changed(base)
        yield from settings(base)
        yield Case(ROUNDING, "eager, over 8 steps", with_steps(base))
    for name in sorted(n for n in store if n.startswith("fault ")):
        _, kind, size = name.split(" ", 2)
        cause, text = FAULTS[kind]
        pairs = pairs_of(store, "clean", store[name])
        yield Case(cause, text.format(size), pairs, ("growth-with-length",) if kind == "cut" else ())
        if kind == "noise":  # as where an update, or a resume, did not reach the engine
            base, what = (
                pairs_of(store, "clean", store["clean/trainer 1"]),
                f"noise of {size} of its size on every matrix",
            )
            yield stepped(base, pairs, range(4, 8), f"{what}, from step 4 of 8 on")
            yield stepped(base, pairs, range(4), f"{what}, before step 4 of 8")
            yield stepped(base, pairs, [1], f"{what}, at step 1 of 4", 4)
        if kind == "rope":  # as where a scaling is switched on by length (LongRoPE)
            lengths = np.diff(pairs.offsets)
            long = np.repeat(lengths + pairs.prompts > LONG, lengths)
            right = pairs_of(store, "clean", store["clean/trainer 1"]).trainer[: len(long)]
            mixed = replace(pairs, trainer=np.where(long, pairs.trainer, right))
            part = lengths + pairs.prompts > LONG
            yield Case("growth-with-length", f"RoPE {size} in sequences of more than {LONG} tokens", mixed, part=part)


def stepped(before: Pairs, after: Pairs, late: Sequence[int], size: str, n: int = 8) -> Case:
    """Return sequences dealt to ``n`` training steps, those of the steps ``late`` with the scores of ``after``."""
    step = np.arange(len(before)) % n
    part = np.isin(step, late)
    trainer = np.where(np.repeat(part, np.diff(before.offsets)), after.trainer, before.trainer)
    return Case("changes-with-step", size, replace(before, trainer=trainer, steps=step), part=part)


def with_steps(base: Pairs) -> Pairs:
    """Return sequences dealt to 8 training steps."""
    return replace(base, steps=np.arange(len(base)) % 8)


def settings(base: Pairs) -> Iterator[Case]:
    """Yield what a setting makes of a clean run."""
    ratio = Facts(sequence_ratio="algorithm.rollout_correction.rollout_is=sequence")
    for length, cause in ((20, ROUNDING), (60, ROUNDING), (600, RATIO), (1000, RATIO)):
        yield Case(cause, f"responses of {length} tokens, rollout_is=sequence", pieces(base, length), facts=ratio)
    yield Case("unsupported-backend", "strategy=megatron", base, facts=Facts(strategy="megatron"))
    yield Case("missing-log-probs", "calculate_log_probs=False", base, facts=Facts(calculate_log_probs=False))
    yield Case("missing-log-probs", "bypass_mode=True", base, facts=Facts(bypass=True))


RATIO = "sequence-level-ratio"


def pieces(base: Pairs, length: int) -> Pairs:
    """Return the same tokens as responses of one length: cut from longer ones, or joined from shorter."""
    n = len(base.rollout) // length
    return Pairs.of(base.rollout[: n * length], base.trainer[: n * length], np.arange(n + 1) * length)


def head(base: Pairs, n: int) -> Pairs:
    """Return the first ``n`` tokens of every response alone."""
    keep = base.positions < n
    return replace(base, mask=base.mask & keep).valid()


LONG = 270
FAULTS = {
    "noise": (OTHER, "noise of {} of its size on every matrix"),
    "rope": (OTHER, "RoPE {}"),
    "window": ("growth-with-position", "the trainer sees {} tokens back"),
    "pad": (OTHER, "{} padding tokens in front attended"),
    "cut": (OTHER, "prompts cut to fit {} tokens"),
}


def bf16(x: np.ndarray) -> np.ndarray:
    """Return fp32 numbers rounded to bf16, to nearest even."""
    import torch

    return torch.from_numpy(x.astype(np.float32)).bfloat16().float().numpy().astype(np.float64)


def changed(base: Pairs) -> Iterator[Case]:
    """Yield faults of how log-probs are handled, made from a clean run's."""
    for k in (1, -1):
        yield Case("one-token-shift", f"every sequence, by {k:+d}", replace(base, trainer=rolled(base, k)))
    for every in (2, 4):
        part = np.arange(len(base)) % every == 0
        moved = np.repeat(part, np.diff(base.offsets))
        pairs = replace(base, trainer=np.where(moved, rolled(base, 1), base.trainer))
        yield Case("one-token-shift", f"one sequence in {every}", pairs, part=part)
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
        "padding-or-mask",
        "the mask starts one token early",
        replace(base, rollout=np.where(off, base.rollout[left], base.rollout)),
    )
    gone = np.random.default_rng(0).random(len(base.rollout)) < 0.01
    yield Case("missing-log-probs", "1 % not a number", replace(base, rollout=np.where(gone, np.nan, base.rollout)))
    yield Case("missing-log-probs", "rollout copied", replace(base, rollout=base.trainer.copy()))
    yield Case("missing-log-probs", "rollout all 0", replace(base, rollout=np.zeros(len(base.rollout))))


def rolled(base: Pairs, k: int) -> np.ndarray:
    """Return the trainer's log-probs moved by k tokens within each sequence, the ends repeated."""
    starts, ends = (
        np.repeat(base.offsets[:-1], np.diff(base.offsets)),
        np.repeat(base.offsets[1:], np.diff(base.offsets)),
    )
    return base.trainer[np.clip(np.arange(len(base.trainer)) - k, starts, ends - 1)]


def draws(case: Case, tokens: int, n: int, seed: int) -> Iterator[Pairs]:
    """Yield n random choices of whole sequences with at least so many tokens."""
    rng, lengths, given = np.random.default_rng(seed), np.diff(case.pairs.offsets), 0
    while given < n:
        order = rng.permutation(len(lengths))
        order = order[: int(np.searchsorted(lengths[order].cumsum(), tokens)) + 1]
        faulty = None if case.part is None else int(case.part[order].sum())
        if faulty is None or 2 <= faulty <= len(order) - 2:
            given += 1
            yield case.pairs.select(order)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate (Wilson 1927)."""
    z, rate = 1.96, hits / n
    middle, half = rate + z * z / (2 * n), z * ((rate * (1 - rate) + z * z / (4 * n)) / n) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def rate(case: Case, tokens: int, n: int) -> dict:
    """Return how often triage names what is there."""
    named = Counter(triage(sample, case.facts)[0].cause for sample in draws(case, tokens, n, seed=1))
    hits = sum(named[cause] for cause in (case.cause, *case.also))
    return dict(
        cause=case.cause, also=case.also, size=case.size, fresh=case.fresh, hits=hits, draws=n, interval=wilson(hits, n),
        k3=float(np.nanmean(k3_terms(case.pairs.rollout - case.pairs.trainer))),
        others={cause: count for cause, count in named.most_common() if cause not in (case.cause, *case.also)},
    )  # fmt: skip


def compared(model: str, n: int) -> Iterator[dict]:
    """Yield how often comparing two sides finds what differs: weights by digests, RoPE by frequencies, and nothing by neither."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_rounding_align.engines import rope, weights

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    mine, matrices = weights.digest_hf(trainer), dict(trainer.named_parameters())
    names = [name for name, weight in matrices.items() if weight.ndim == 2]

    def noise(size):
        def change(weight, draw):
            return weight + size * weight.pow(2).mean().sqrt() * torch.randn(weight.shape, generator=draw)

        return change

    def nudged(weight, draw):  # one number, to the next that bf16 has
        place = int(torch.randint(weight.numel(), (1,), generator=draw))
        bits = weight.bfloat16().flatten().view(torch.int16)
        bits[place] += 1
        return bits.view(torch.bfloat16).view(weight.shape).float()

    def bits(weight, draw):  # what a cast to fp32 masters and back does
        return weight.clone()

    for size, change in (
        ("noise of 0.003 of its size on one matrix", noise(3e-3)), ("noise of 0.001 of its size on one matrix", noise(1e-3)),
        ("one number of one matrix by one bf16 step", nudged), ("one matrix through fp32 and back", bits),
    ):  # fmt: skip
        named = Counter()
        for seed in range(n):
            draw = torch.Generator().manual_seed(seed)
            name = names[int(torch.randint(len(names), (1,), generator=draw))]
            other = {**mine, name: weights.digest(change(matrices[name].detach().float(), draw))}
            found = compare_weights(mine, other)
            named[found.cause if found else ROUNDING] += 1
        yield dict(cause=ROUNDING if change is bits else "weights", size=size, named=dict(named), comparisons=n)
    config = AutoConfig.from_pretrained(model)
    for size, parameters in (
        ("theta x1.001", dict(rope_theta=config.rope_parameters["rope_theta"] * 1.001)),
        ("theta x2", dict(rope_theta=config.rope_parameters["rope_theta"] * 2)),
        ("linear x1.001", dict(rope_type="linear", factor=1.001)), ("the same parameters", {}),
    ):  # fmt: skip
        other = AutoConfig.from_pretrained(model)
        other.rope_parameters = {**other.rope_parameters, **parameters}
        found = compare_rope(rope.of_config(config), rope.of_config(other))
        cause = "rope-parameters" if parameters else ROUNDING
        yield dict(cause=cause, size=size, named={found.cause if found else ROUNDING: 1}, comparisons=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gap", type=Path, help="folder that `verl-rounding-align gap` left, for more clean runs")
    parser.add_argument("--model", default=str(inputs.ROOT / ".cache/smollm2-135m"), help="folder of the checkpoint")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/calibration.json")
    options = parser.parse_args()
    rows = []
    for case in [*(of_gap(options.gap) if options.gap else []), *cases(inputs.store())]:
        rows.append(rate(case, options.tokens, options.draws))
        r = rows[-1]
        print(
            f"{r['cause']:24s} {r['size']:44s} {r['hits']:4d} of {r['draws']}  k3 {r['k3']:.2g}  {json.dumps(r['others'])}",
            flush=True,
        )
    comparisons = list(compared(options.model, 20))
    for r in comparisons:
        print(f"{r['cause']:24s} {r['size']:44s} {json.dumps(r['named'])} of {r['comparisons']}", flush=True)
    seed = inputs.seed()
    report.write_json(options.json, {"seed": seed, "tokens": options.tokens, "rows": rows, "compared": comparisons})


if __name__ == "__main__":
    main()
