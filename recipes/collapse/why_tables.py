"""The tables of WHY.md, from results/why.json."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import mean

from outcomes import center, said

from verl_rounding_align.report import rows as report

DIFFERENCES = (
    "steps", "rounding of", "k3", "mean abs d", "mean d / mean abs d", "the same on given right answers",
    "var of d between tokens, by seed", "corr(d, log T)", "corr(d, log S)", "corr(d, A)",
)  # fmt: skip
GRADIENTS = (
    "steps", "rounding of", "bias^2 / gradient^2", "projection of the bias on the gradient", "cosine",
    "projection by seed, where the gradient is resolved", "squared error / squared gradient, one batch",
    "bias^2, share of the squared error", "bias^2 / gradient^2, against importance weights",
)  # fmt: skip
Rows = list[dict]
CLEAR = 3  # standard errors: a denominator that is known to a third or better (the jackknife errs to the safe side)
LAST = 1 - 5e-5  # largest correlation that four stored digits tell from 1


def by_case(found: dict) -> list[tuple[tuple[int, str], Rows]]:
    """Return [((steps, case), a row per seed)], steps ascending."""
    cases = defaultdict(list)
    for row in found["rows"]:
        cases[row["steps"], row["region"]].append(row)
    return sorted(cases.items(), key=lambda item: item[0][0])


def bounded(values: list[float]) -> str:
    """Return the mean of figures between -1 and 1 with its 95 % t interval, both by Fisher's z, as text.

    >>> bounded([0.9, 0.95, 0.99])
    '+0.96 [+0.45, +1.00]'
    """
    z = [math.atanh(max(-LAST, min(LAST, v))) for v in values]
    return said(*map(math.tanh, center(z) or z))


def differences(found: dict) -> str:
    """Return the table of what rounding does to log-probs; means over seeds, t intervals."""
    lines = []
    for (steps, region), rows in by_case(found):
        shares = [100 * r["by_token"] for r in rows]
        lines.append([
            str(steps), region, f"{mean(r['k3'] for r in rows):.2g}", f"{mean(r['size'] for r in rows):.3f}",
            bounded([r["mean"] / r["size"] for r in rows]), bounded([r["given"] for r in rows]),
            f"{min(shares):.1f} to {max(shares):.1f} %",
            *(bounded([r[name] for r in rows]) for name in ("corr_own", "corr_sampler", "corr_advantage")),
        ])  # fmt: skip
    return report.markdown(DIFFERENCES, lines)


def tokens(found: dict) -> str:
    """Return the table of how far the mean signed difference of single digits is from that of all."""
    lines = []
    for (steps, region), rows in by_case(found):
        digits = [pair for row in rows for pair in row["of_token"] if pair is not None]
        clear = sum(abs(value) > 1.96 * error for value, error in digits)
        ends = [[f"{end(v for v, _ in filter(None, row['of_token'])):+.3f}" for row in rows] for end in (min, max)]
        means = [f"{row['mean']:+.3f}" for row in rows]
        lines.append([str(steps), region, *map(", ".join, (means, *ends)), f"{clear} of {len(digits)}"])
    columns = (
        "mean d, by seed",
        "lowest digit less that, by seed",
        "highest digit less that, by seed",
        "digits clear of it",
    )
    return report.markdown(("steps", "rounding of", *columns), lines)


def landing(found: dict) -> str:
    """Return the table of landing scores of what each point stores, mean over seeds, beside its group's harm."""
    scores, groups = defaultdict(dict), {}
    for (steps, region), rows in by_case(found):
        groups[steps, region] = rows
        for point in rows[0].get("landing", ()):
            scores[point][steps] = mean(r["landing"][point] for r in rows)
    every = sorted({steps for by_steps in scores.values() for steps in by_steps})
    lines = []
    for point, by_steps in sorted(scores.items(), key=lambda item: -item[1][every[0]]):
        group, name = point.split()
        k3 = [f"{mean(r['k3'] for r in groups[steps, group]):.2g}" for steps in every]
        lines.append([group, name, *(f"{by_steps[steps]:.2f}" for steps in every), *k3])
    columns = [f"score, {steps} steps" for steps in every] + [f"k3 of the group, {steps} steps" for steps in every]
    return report.markdown(("group", "point", *columns), lines)


# ---- gradients


def resolved(row: dict, prefix: str = "") -> bool:
    """Return whether a seed's mean gradient stands clear of noise: its square by ``CLEAR`` standard errors over batches."""
    return row[f"{prefix}signal2"] > CLEAR * row[f"{prefix}signal2_se"]


def over_seeds(rows: Rows, ratio: Callable[[Rows], float]) -> tuple[float, float | None, float | None]:
    """Return a ratio of means over seeds and the jackknife's 95 % t interval; of one or two seeds no interval.

    >>> over_seeds([dict(a=1.0, b=2.0)] * 3, of("a", "b")), over_seeds([dict(a=1.0, b=2.0)], of("a", "b"))
    ((0.5, 0.5, 0.5), (0.5, None, None))
    """
    n = len(rows)
    if n < 3:
        return ratio(rows), None, None
    _, low, high = center([n * ratio(rows) - (n - 1) * ratio(rows[:i] + rows[i + 1 :]) for i in range(n)])
    half = (high - low) / 2
    return ratio(rows), ratio(rows) - half, ratio(rows) + half


def of(top: str, bottom: str) -> Callable[[Rows], float]:
    """Return the function that gives a ratio of two means."""
    return lambda rows: mean(r[top] for r in rows) / mean(r[bottom] for r in rows)


def cosine(rows: Rows) -> str:
    """Return the cosine between the mean bias and gradient, as text; nothing where the bias is not clear of zero: over three
    seeds or more by the interval of its square, of fewer by two standard errors in each.

    >>> exact = dict(bias2=0.25, bias2_se=0.01, signal2=1.0, cross=-0.5)
    >>> cosine([exact] * 3), cosine([exact]), cosine([exact, {**exact, "bias2_se": 0.2}])
    ('-1.00', '-1.00', '')
    >>> cosine([exact, exact, {**exact, "bias2": -0.25}])
    ''
    """
    _, low, _ = over_seeds(rows, of("bias2", "signal2"))
    if low is None and any(r["bias2"] <= 2 * r["bias2_se"] for r in rows) or low is not None and low <= 0:
        return ""
    bias, signal, cross = (mean(r[name] for r in rows) for name in ("bias2", "signal2", "cross"))
    return f"{cross / math.sqrt(bias * signal):+.2f}"


def gradients(found: dict) -> str:
    """Return the table of what rounding does to the policy gradient; ratios of means over seeds with a gradient."""
    lines = []
    for (steps, region), every in by_case(found):
        rows, weighted = ([r for r in every if resolved(r, prefix)] for prefix in ("", "is_"))
        by_seed = [f"{r['seed']}: {r['cross'] / r['signal2']:+.2f} ± {1.96 * r['projection_se']:.2f}" for r in rows]
        first, last = [("bias2", "signal2"), ("cross", "signal2")], [("error2", "gradient2"), ("bias2", "error2")]
        cells = [said(*over_seeds(rows, of(*pair))) if rows else "" for pair in first + last]
        lines.append([
            str(steps), region, *cells[:2], cosine(rows) if rows else "", ", ".join(by_seed), *cells[2:],
            said(*over_seeds(weighted, of("is_bias2", "is_signal2"))) if weighted else "",
        ])  # fmt: skip
    return report.markdown(GRADIENTS, lines)
