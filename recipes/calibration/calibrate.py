"""Do the 95 % intervals cover in 95 % of data sets? Simulated, with correlation within sequences, and from real rollouts.

A population of many sequences has known values (a mean of d, a mean k3, a ratio and a difference of two trainers' k3).
Data sets of S of its sequences are drawn, and the share of intervals that hold the population's value is counted.

    simulated   d = scale_s * t_6 + shift_s; log scale_s ~ N(0, spread), shift_s ~ N(0, 0.01): the tokens of a sequence share
                both, as easy and hard prompts do; lengths 16 to 256
    real        sequences drawn with replacement from a folder of `verl-rounding-align gap` (--gap DIR/compiled)

    python recipes/calibration/calibrate.py [--gap DIR/MODE] [--sets 1000]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from rich.progress import track

from verl_rounding_align.gap import measure as gap
from verl_rounding_align.gap import rollouts as rollout
from verl_rounding_align.logprobs.intervals import intervals, per_sequence
from verl_rounding_align.logprobs.tally import k3_terms
from verl_rounding_align.report import rows as report

RESULTS = Path(__file__).parent / "results" / "calibration.json"
SEQUENCES = (12, 24, 48, 144)
QUANTITIES = ("k1", "k3", "k3 change", "k3 ratio")


def simulated(spread: float, sequences: int = 20_000, seed: int = 0) -> np.ndarray:
    """Return per-sequence sums (4, sequences): tokens, d, and k3 of an unaligned and an aligned trainer."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, 257, sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    scale = np.repeat(0.05 * np.exp(spread * rng.normal(size=sequences)), lengths)
    shift = np.repeat(0.01 * rng.normal(size=sequences), lengths)
    before, after = (scale * factor * rng.standard_t(6, lengths.sum()) + shift for factor in (1.0, 0.7))
    sums = [per_sequence(x, offsets) for x in (before, k3_terms(before), k3_terms(after))]
    return np.stack([lengths.astype(float), *sums])


def real(folder: Path) -> np.ndarray:
    """Return the same sums of a measured gap: the unaligned trainer, and the arm that moves most points."""
    rollouts = rollout.Rollouts.load(folder)
    scores = max((kept.scores for kept in gap.kept_scores(folder).values()), key=len)
    engine, offsets = rollouts.log_probs.double().numpy(), rollouts.response_offsets
    before, after = (engine - scores[points] for points in (frozenset(), max(scores, key=len)))
    sums = [per_sequence(x, offsets) for x in (before, k3_terms(before), k3_terms(after))]
    return np.stack([np.diff(offsets).astype(float), *sums])


def ratios(sums: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the ratios of ``QUANTITIES``."""
    n, k1, before, after = sums
    return [(k1, n), (before, n), (after - before, n), (after, before)]


def covered(population: np.ndarray, sequences: int, sets: int, name: str) -> dict[str, list[int]]:
    """Return, for every quantity, in how many data sets [our interval, the percentile interval] hold the true value."""
    rng, found = np.random.default_rng(1), {q: [0, 0] for q in QUANTITIES}
    true = [x.sum() / n.sum() for x, n in ratios(population)]
    for i in track(range(sets), f"{name}, {sequences} sequences"):
        sums = population[:, rng.integers(0, population.shape[1], sequences)]
        weights = rng.multinomial(sequences, np.full(sequences, 1 / sequences), size=1000).astype(float)
        for q, value, (x, n), (_, low, high) in zip(
            QUANTITIES, true, ratios(sums), intervals(ratios(sums), draws=1000, seed=i), strict=True
        ):
            found[q][0] += bool(low <= value <= high)
            a, b = np.quantile((weights @ x) / (weights @ n), [0.025, 0.975])
            found[q][1] += bool(a <= value <= b)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=Path, help="a mode's folder that `verl-rounding-align gap` made")
    parser.add_argument("--sets", type=int, default=1000, help="data sets of each kind")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    populations = {f"simulated, spread {spread}": simulated(spread) for spread in (0.0, 0.25, 0.5)}
    if args.gap:
        populations["real rollouts"] = real(args.gap)
    rows = []
    for name, population in populations.items():
        for sequences in SEQUENCES:
            for q, (ours, percentile) in covered(population, sequences, args.sets, name).items():
                rows.append(
                    dict(
                        population=name,
                        sequences=sequences,
                        quantity=q,
                        sets=args.sets,
                        covered=ours,
                        percentile=percentile,
                    )
                )
    se = 100 * math.sqrt(0.95 * 0.05 / args.sets)
    cells = [
        (
            r["population"],
            r["sequences"],
            r["quantity"],
            f"{100 * r['covered'] / r['sets']:.1f}",
            f"{100 * r['percentile'] / r['sets']:.1f}",
        )
        for r in rows
    ]
    title = f"% of 95 % intervals that hold the true value; {args.sets} data sets each (standard error {se:.1f})"
    report.show(report.table(title, ("population", "sequences", "quantity", "bootstrap-t", "percentile"), cells))
    report.write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
