"""What each region's rounding does to log-probs and to the policy gradient, at fixed weights: outputs/collapse/why.json.

Sampler S rounds as the engine; trainer T_g as the engine too, except in group g, where it rounds as Hugging Face. Same
kernels, no cache: d = log S - log T_g comes from the roundings of g alone. With A the group advantage, for batches b of
sequences drawn from S,

    gradient   G_b = mean A grad log S                     what an exactly aligned trainer computes
    error      E_b = mean A grad log T_g - G_b             same weights, same sequences
    bias^2     = mean over b != c of <E_b, E_c>,           squared error = mean |E_b|^2 = bias^2 + variance
    projection = mean <E_b, G_c> / mean <G_b, G_c>         over b != c: no noise in common

and the same (``is_``) with E_b = mean A (1 - w) grad log T_g and G_b = mean A w grad log T_g, w the importance weight of the
whole answer: what leaving out the exact correction adds, which is noisier.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import experiment as e  # noqa: E402

from verl_rounding_align import align, report  # noqa: E402
from verl_rounding_align.regions import GROUPS  # noqa: E402
from verl_rounding_align.rounding import Rounding  # noqa: E402

CASES = {**{g: [h for h in GROUPS if h != g] for g in GROUPS}, "all four": "none"}
BATCHES, PER_BATCH = 48, 8  # of prompts; GROUP answers each


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
    """Return the landing score of what each group's points store (see recipes/landing), at ``bits``, over all layers."""
    counts, original = defaultdict(lambda: np.zeros(1 << 16)), Rounding.__call__
    group_of = {point: group for group, (_, points) in GROUPS.items() for point in points}
    drop = 24 - bits

    def watched(self, point, x, dtype):
        if self.stores(point) and point != "cos_sin" and bool(x.detach().ne(0).any()):
            positions = (x.detach().contiguous().view(torch.int32) & ((1 << drop) - 1)) >> max(0, drop - 16)
            counts[group_of[point]] += np.bincount(positions.flatten().numpy(), minlength=1 << 16)
        return original(self, point, x, dtype)

    Rounding.__call__ = watched
    try:
        with torch.no_grad():
            e.log_probs(policy, ids)
    finally:
        Rounding.__call__ = original
    found = {}
    for group, histogram in counts.items():
        c = np.fft.rfft(histogram)[1:17] / histogram.sum()
        found[group] = float(np.sqrt(np.mean(np.abs(c) ** 2)))
    return found


def off_diagonal(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the mean of <a_b, b_c> over b != c."""
    n = len(a)
    return float((a.sum(0) @ b.sum(0) - (a * b).sum()) / (n * (n - 1)))


def measure(policy, regions, format, seed: int) -> dict[str, float]:
    """Return the figures of one region: sizes and correlations of d, bias and variance of the gradient's error."""
    sampler, trainer, g = (
        rounded(policy, "all", format),
        rounded(policy, regions, format),
        torch.Generator().manual_seed(seed),
    )
    kept, differences, own, advantage, tokens = defaultdict(list), [], [], [], []

    def gradient(policy, loss) -> torch.Tensor:
        policy.zero_grad()
        loss.backward(retain_graph=True)
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    for _ in range(BATCHES):
        ids, rollout = e.sample(sampler, e.prompts(PER_BATCH, g), e.GROUP, False, g)
        advantages = e.group_advantages(e.rewards(ids))
        new, exact = e.log_probs(trainer, ids), e.log_probs(sampler, ids)
        weight = (new.detach() - rollout).sum(1, keepdim=True).exp()
        uncorrected, aligned = (
            gradient(trainer, (advantages * new).mean()),
            gradient(sampler, (advantages * exact).mean()),
        )
        corrected = gradient(trainer, (advantages * weight * new).mean())
        for name, x in (
            ("G", aligned),
            ("E", uncorrected - aligned),
            ("isG", corrected),
            ("isE", uncorrected - corrected),
        ):
            kept[name].append(x)
        differences.append(rollout - new.detach())
        own.append(new.detach())
        advantage.append(advantages.expand_as(new))
        tokens.append(ids[:, -e.LENGTH :])
    kept = {name: torch.stack(x) for name, x in kept.items()}
    d, own, advantage, tokens = (torch.cat(x).double() for x in (differences, own, advantage, tokens))
    with torch.no_grad():  # given tokens: no selection by the sampler
        ids = e.prompts(512, g)
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
        "mean_se": float(d.mean(1).std() / len(d) ** 0.5),
        "given": float(given.mean() / given.abs().mean()),
        "by_token": float((share * (means - d.mean()) ** 2).sum() / d.var()),
        "corr_own": correlation(d, own),
        "corr_advantage": correlation(d, advantage),
        **{
            f"{prefix}{name}": value
            for prefix, E, G in (("", kept["E"], kept["G"]), ("is_", kept["isE"], kept["isG"]))
            for name, value in (
                ("bias2", off_diagonal(E, E)),
                ("error2", float(E.pow(2).sum(1).mean())),
                ("signal2", off_diagonal(G, G)),
                ("gradient2", float(G.pow(2).sum(1).mean())),
                ("cross", off_diagonal(E, G)),
            )
        },
    }


def of_seed(settings: e.Settings, steps: list[int]) -> list[dict]:
    """Return a seed's rows: one per checkpoint and case."""
    torch.set_num_threads(1)
    rows, format = [], settings.format
    for done, policy in checkpoints(settings, steps):
        ids = e.sample(
            rounded(policy, "all", format), e.prompts(32, torch.Generator().manual_seed(7)), 4, False,
            torch.Generator().manual_seed(8),
        )[0]  # fmt: skip
        landing = scores(rounded(policy, "none", format), settings.bits, ids)
        for case, regions in CASES.items():
            row = dict(steps=done, seed=settings.seed, region=case, landing=landing.get(case))
            rows.append({**row, **measure(policy, regions, format, settings.seed)})
            print({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arm", default="none")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 300, 900])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "outputs/collapse/why.json")
    options = parser.parse_args()
    runs = [e.Settings(options.arm, options.bits, options.lr, s, max(options.steps)) for s in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        found = pool.starmap(of_seed, [(run, options.steps) for run in runs], chunksize=1)
    rows = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        for step in options.steps for of in found for row in of if row["steps"] == step
    ]  # fmt: skip
    keep = {k: v for k, v in vars(runs[0]).items() if k not in ("seed", "steps")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(options.out, {**keep, "batches": BATCHES, "sequences": PER_BATCH * e.GROUP, "rows": rows})
    print(json.dumps(dict(rows=len(rows), path=str(options.out))))
