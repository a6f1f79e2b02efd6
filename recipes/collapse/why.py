"""What each region's rounding does to log-probs and to the policy gradient, at fixed weights: outputs/collapse/why.json.

Sampler S rounds as the engine; trainer T_g as the engine too, except in the groups g, where it rounds as Hugging Face: one
group, all four, or all but one, which is what aligning that one leaves. Same kernels, no cache: d = log S - log T_g comes
from the roundings of g alone. With A the group advantage, for batches b of sequences drawn from S,

    gradient   G_b = mean A grad log S                     what an exactly aligned trainer computes
    error      E_b = mean A grad log T_g - G_b             same weights, same sequences
    bias^2     = mean over b != c of <E_b, E_c>,           squared error = mean |E_b|^2 = bias^2 + variance
    projection = mean <E_b, G_c> / mean <G_b, G_c>         over b != c: no noise in common

and the same (``is_``) with E_b = mean A (1 - w) grad log T_g and G_b = mean A w grad log T_g, w the importance weight of the
whole answer: what leaving out the exact correction adds, which is noisier. ``_se``: jackknife over batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import experiment as e  # noqa: E402

from verl_rounding_align import align  # noqa: E402
from verl_rounding_align.landing.score import score_of  # noqa: E402
from verl_rounding_align.regions import GROUPS  # noqa: E402
from verl_rounding_align.report import rows as report  # noqa: E402
from verl_rounding_align.rounding import Rounding  # noqa: E402

CASES = {  # the groups that T rounds as Hugging Face: those in which it is aligned, that is the others
    **{group: [other for other in GROUPS if other != group] for group in GROUPS},
    "all four": "none",
    **{f"all but {group}": [group] for group in GROUPS},
}
PER_BATCH = 8  # prompts; GROUP answers each


def checkpoints(settings: e.Settings, steps: list[int]):
    """Yield (steps, policy): after pre-training and so many steps of a run, weights stored in its format."""
    policy, done = e.pretrained(settings.seed, settings.pretrain), 0
    fresh, pair = copy.deepcopy(policy), e.Pair(policy, settings)
    g = torch.Generator().manual_seed(1000 + settings.seed)
    for wanted in sorted(steps):
        for _ in range(wanted - done):
            e.update(pair, g)
        done = wanted
        fresh.load_state_dict(pair.trainer.state_dict())
        yield wanted, copy.deepcopy(fresh)


def rounded(policy, regions, format):
    """Return a copy of a policy that rounds as Hugging Face but in ``regions``, where it rounds as the engine."""
    policy = copy.deepcopy(policy)
    align(policy, regions, engine=e.ENGINE, format=format)
    return policy


def scores(policy, bits: int, ids: torch.Tensor) -> dict[str, float]:
    """Return the landing score (recipes/landing) of what each point stores, at ``bits``: {"group point": median over calls}.

    A residual sum counts where it is made, for both of its readers; where a norm or an add reads one that is stored already, or
    the embedding, it does not count again.
    """
    found, original = defaultdict(list), Rounding.__call__
    group_of = {point: group for group, its in GROUPS.items() for point in its.points}
    drop = 24 - bits

    def watched(self, point, x, dtype):
        again = point in ("sum", "carry") and torch.equal(self.format.round(x), x)
        if self.stores(point) and point != "cos_sin" and not again:
            positions = (x.detach().contiguous().view(torch.int32) & ((1 << drop) - 1)) >> max(0, drop - 16)
            histogram = np.bincount(positions.flatten().numpy(), minlength=1 << min(drop, 16))
            found[f"{group_of[point]} {point}"].append(score_of(histogram))
        return original(self, point, x, dtype)

    Rounding.__call__ = watched
    try:
        with torch.no_grad():
            e.log_probs(policy, ids)
    finally:
        Rounding.__call__ = original
    found["carry carry"] = found["add_rms_norm sum"]  # two readers of one value
    return {point: median(values) for point, values in found.items()}


class Products:
    """<a_b, b_c> of the vectors of all batches, b != c, and what is left of their mean without any one batch."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        m = a.double() @ b.double().T
        n, diagonal = len(m), m.diagonal()
        total = m.sum() - diagonal.sum()
        self.mean = float(total / (n * (n - 1)))
        self.without = (total - m.sum(0) - m.sum(1) + 2 * diagonal) / ((n - 1) * (n - 2))


def jackknife(without: torch.Tensor) -> float:
    """Return the standard error of an estimate from what it is without each batch."""
    n = len(without)
    return float(((n - 1) / n * (without - without.mean()).square().sum()).sqrt())


def gradient(policy, loss: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss by all parameters, flat; the graph is kept."""
    policy.zero_grad()
    loss.backward(retain_graph=True)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@dataclass(frozen=True)
class Batch:
    """Sequences drawn from S, their log-probs under S, advantages, and the gradient of an exactly aligned trainer."""

    ids: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    exact: torch.Tensor


def drawn(sampler, seed: int, batches: int) -> list[Batch]:
    """Draw batches of ``PER_BATCH`` prompts with ``GROUP`` answers each."""
    g, found = torch.Generator().manual_seed(seed), []
    for _ in range(batches):
        ids, rollout = e.sample(sampler, e.prompts(PER_BATCH, g), e.GROUP, False, g)
        advantages = e.group_advantages(e.rewards(ids))
        found.append(
            Batch(ids, rollout, advantages, gradient(sampler, (advantages * e.log_probs(sampler, ids)).mean()))
        )
    return found


def directions(errors: torch.Tensor, gradients: torch.Tensor) -> dict[str, float]:
    """Return bias, gradient and their product between batches, the squared length in a batch, and the ratios' errors.

    Args:
        errors, gradients: (batches, parameters).
    """
    bias, signal, cross = Products(errors, errors), Products(gradients, gradients), Products(errors, gradients)
    return {
        "bias2": bias.mean,
        "bias2_se": jackknife(bias.without),
        "error2": float(errors.pow(2).sum(1).mean()),
        "signal2": signal.mean,
        "gradient2": float(gradients.pow(2).sum(1).mean()),
        "cross": cross.mean,
        "signal2_se": jackknife(signal.without),
        "projection_se": jackknife(cross.without / signal.without),
    }


def departure(d: torch.Tensor, chosen: torch.Tensor, batches: int) -> list[float] | None:
    """Return the mean of the chosen values less that of all, and its standard error over batches.

    Args:
        d, chosen: (batches * sequences, tokens), batches one after the other.
    """
    values, mask = d.view(batches, -1), chosen.view(batches, -1)
    sums, counts = (values * mask).sum(1), mask.sum(1)
    if counts.count_nonzero() < 2:
        return None
    every = values.sum(1)

    def without(x: torch.Tensor) -> torch.Tensor:
        return x.sum() - x

    value = sums.sum() / counts.sum() - values.mean()
    left = without(sums) / without(counts) - without(every) / (values.numel() - values.shape[1])
    return [float(f"{value:.3g}"), float(f"{jackknife(left):.2g}")]


def measure(policy, regions, sampler, batches: list[Batch], format) -> dict[str, float]:
    """Return the figures of one case: sizes and correlations of d, bias and variance of the gradient's error.

    ``of_token`` is the mean signed d of each of the ``e.DIGITS`` digits, less that of all tokens, with its standard error
    over batches; None of one that is in fewer than two batches.
    """
    trainer, kept, differences, own = rounded(policy, regions, format), defaultdict(list), [], []
    for batch in batches:
        new = e.log_probs(trainer, batch.ids)
        weight = (new.detach() - batch.rollout).sum(1, keepdim=True).exp()
        uncorrected = gradient(trainer, (batch.advantages * new).mean())
        corrected = gradient(trainer, (batch.advantages * weight * new).mean())
        kept["E"].append(uncorrected - batch.exact)
        kept["isE"].append(uncorrected - corrected)
        kept["isG"].append(corrected)
        differences.append(batch.rollout - new.detach())
        own.append(new.detach())
    kept = {name: torch.stack(x) for name, x in kept.items()} | {"G": torch.stack([b.exact for b in batches])}
    d, own = torch.cat(differences).double(), torch.cat(own).double()
    rollout = torch.cat([b.rollout for b in batches]).double()
    advantage = torch.cat([b.advantages.expand_as(b.rollout) for b in batches]).double()
    tokens = torch.cat([b.ids[:, -e.LENGTH :] for b in batches])
    with torch.no_grad():  # given tokens: no selection by the sampler
        ids = e.prompts(512, torch.Generator().manual_seed(30_000))
        ids = torch.cat([ids, e.answers(ids)], 1)
        given = (e.log_probs(sampler, ids) - e.log_probs(trainer, ids)).double()
    means = torch.stack([d[tokens == t].mean() for t in tokens.unique()])
    share = torch.stack([(tokens == t).double().mean() for t in tokens.unique()])

    def correlation(a, b):
        return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])

    return {
        "k3": float((d.neg().exp() + d - 1).mean()),
        "size": float(d.abs().mean()),
        "mean": float(d.mean()),
        "given": float(given.mean() / given.abs().mean()),
        "of_token": [departure(d, tokens == t, len(batches)) for t in range(e.DIGITS)],
        "by_token": float((share * (means - d.mean()) ** 2).sum() / d.var()),
        "corr_own": correlation(d, own),
        "corr_sampler": correlation(d, rollout),
        "corr_advantage": correlation(d, advantage),
        **directions(kept["E"], kept["G"]),
        **{f"is_{name}": value for name, value in directions(kept["isE"], kept["isG"]).items()},
    }


def of_seed(settings: e.Settings, batches: dict[int, int]) -> list[dict]:
    """Return a seed's rows: one per checkpoint and case; ``batches``: how many after so many steps."""
    torch.set_num_threads(1)
    rows, format = [], settings.format
    for done, policy in checkpoints(settings, list(batches)):
        ids = e.sample(
            rounded(policy, "all", format), e.prompts(32, torch.Generator().manual_seed(7)), 4, False,
            torch.Generator().manual_seed(8),
        )[0]  # fmt: skip
        landing = scores(rounded(policy, "none", format), settings.bits, ids)
        sampler = rounded(policy, "all", format)
        shared = drawn(sampler, 20_000 + settings.seed, batches[done])
        for case, regions in CASES.items():
            row = dict(steps=done, seed=settings.seed, region=case, batches=batches[done])
            if case == "all four":
                row["landing"] = {point: float(f"{score:.3g}") for point, score in landing.items()}
            rows.append({**row, **measure(policy, regions, sampler, shared, format)})
            print({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arm", default="none")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 300, 900])
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[96, 96, 384],
        help=f"of {PER_BATCH} prompts, for each case; one number, or one for each of --steps",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "outputs/collapse/why.json")
    options = parser.parse_args()
    counts = options.batches * len(options.steps) if len(options.batches) == 1 else options.batches
    batches = dict(zip(options.steps, counts, strict=True))
    runs = [e.Settings(options.arm, options.bits, options.lr, s, max(options.steps)) for s in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        found = pool.starmap(of_seed, [(run, batches) for run in runs], chunksize=1)
    rows = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        for step in options.steps for of in found for row in of if row["steps"] == step
    ]  # fmt: skip
    keep = {k: v for k, v in vars(runs[0]).items() if k not in ("seed", "steps")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(options.out, {**keep, "sequences": PER_BATCH * e.GROUP, "rows": rows})
    print(json.dumps(dict(rows=len(rows), path=str(options.out))))
