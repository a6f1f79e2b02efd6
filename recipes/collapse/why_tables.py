"""The tables of WHY.md, from results/why.json."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import mean, stdev

from outcomes import paired, t975

from verl_rounding_align import report

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


def by_case(found: dict) -> list[tuple[tuple[int, str], Rows]]:
    """Return [((steps, case), a row per seed)], steps ascending."""
    cases = defaultdict(list)
    for row in found["rows"]:
        cases[row["steps"], row["region"]].append(row)
    return sorted(cases.items(), key=lambda item: item[0][0])


def bounded(values: list[float]) -> str:
    """Return mean and 95 % t interval of figures between -1 and 1, by Fisher's z, as text.

    >>> bounded([0.9, 0.95, 0.99])
    '+0.96 [+0.45, +1.00]'
    """
    z = [math.atanh(max(-1 + 1e-9, min(1 - 1e-9, v))) for v in values]
    found = paired(dict(enumerate(z)), dict.fromkeys(range(len(z)), 0.0))
    if found is None:
        return f"{values[0]:+.2f}"
    m, low, high = map(math.tanh, found)
    return f"{m:+.2f} [{low:+.2f}, {high:+.2f}]"


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
    """Return the table of the mean signed difference of each digit; means over seeds, bold where clear of zero."""
    lines = []
    for (steps, region), rows in by_case(found):
        cells = []
        for values in zip(*(row["of_token"] for row in rows), strict=True):
            seen = [v for v in values if v is not None]
            text = f"{mean(seen):+.3f}" if seen else ""
            center = paired(dict(enumerate(seen)), dict.fromkeys(range(len(seen)), 0.0))
            cells.append(f"**{text}**" if center and center[1] * center[2] > 0 else text)
        lines.append([str(steps), region, *cells])
    return report.markdown(("steps", "rounding of", *(f"digit {i}" for i in range(len(lines[0]) - 2))), lines)


def landing(found: dict) -> str:
    """Return the table of landing scores of what each point stores, mean over seeds, beside its group's harm."""
    scores, groups = defaultdict(dict), {}
    for (steps, region), rows in by_case(found):
        groups[steps, region] = rows
        for point in rows[0].get("landing", ()):
            scores[point][steps] = mean(r["landing"][point] for r in rows)
    every = sorted({steps for of in scores.values() for steps in of})
    lines = []
    for point, of in sorted(scores.items(), key=lambda item: -item[1][every[0]]):
        group, name = point.split()
        k3 = [f"{mean(r['k3'] for r in groups[steps, group]):.2g}" for steps in every]
        lines.append([group, name, *(f"{of[steps]:.2f}" for steps in every), *k3])
    columns = [f"score, {steps} steps" for steps in every] + [f"k3 of the group, {steps} steps" for steps in every]
    return report.markdown(("group", "point", *columns), lines)


# ---- gradients


def resolved(row: dict) -> bool:
    """Return whether a seed's mean gradient stands clear of noise: its square by two standard errors over batches."""
    return row["signal2"] > 2 * row["signal2_se"]


def over_seeds(rows: Rows, ratio: Callable[[Rows], float]) -> str:
    """Return a ratio of means over seeds with the jackknife's 95 % t interval, as text; of one or two seeds no interval."""
    n = len(rows)
    if n < 3:
        return f"{ratio(rows):+.2f}" if n else ""
    pseudo = [n * ratio(rows) - (n - 1) * ratio(rows[:i] + rows[i + 1 :]) for i in range(n)]
    half = t975(n - 1) * stdev(pseudo) / math.sqrt(n)
    return f"{ratio(rows):+.2f} [{ratio(rows) - half:+.2f}, {ratio(rows) + half:+.2f}]"


def of(top: str, bottom: str) -> Callable[[Rows], float]:
    """Return the function that gives a ratio of two means."""
    return lambda rows: mean(r[top] for r in rows) / mean(r[bottom] for r in rows)


def cosine(rows: Rows) -> float:
    """Return the cosine between bias and gradient, of means over seeds; NaN where the bias has no positive square.

    >>> exact = dict(bias2=0.25, signal2=1.0, cross=-0.5)
    >>> cosine([exact, exact]), cosine([exact, {**exact, "bias2": -0.25}])
    (-1.0, nan)
    """
    bias, signal, cross = (mean(r[name] for r in rows) for name in ("bias2", "signal2", "cross"))
    return cross / math.sqrt(bias * signal) if bias > 0 < signal else math.nan


def gradients(found: dict) -> str:
    """Return the table of what rounding does to the policy gradient; ratios of means over seeds with a gradient."""
    lines = []
    for (steps, region), every in by_case(found):
        rows = [r for r in every if resolved(r)]
        size, sign = (over_seeds(rows, of(name, "signal2")) for name in ("bias2", "cross"))
        angle = over_seeds(rows, cosine) if rows and "[-" not in size else ""
        by_seed = [f"{r['seed']}: {r['cross'] / r['signal2']:+.2f} ± {1.96 * r['projection_se']:.2f}" for r in rows]
        lines.append([
            str(steps), region, size, sign, "" if "nan" in angle else angle, ", ".join(by_seed),
            *(over_seeds(rows, of(*pair)) for pair in (("error2", "gradient2"), ("bias2", "error2"), ("is_bias2", "is_signal2"))),
        ])  # fmt: skip
    return report.markdown(GRADIENTS, lines)
