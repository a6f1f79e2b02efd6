"""What a run came to, as README.md defines it, and how sure shares, differences and rates over runs are."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from scipy import stats

ORDER = ("none", "rope", "paper", "all", "same", "tis", "bit")
DROP, SHORT, LONG = 0.10, 50, 100  # of reward; steps of a window and of the final mean


def load(path: Path) -> list[dict]:
    """Return the runs of a grid's file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def windows(rows: list[dict], name: str, size: int) -> list[tuple[int, float]]:
    """Return (last step, mean) of consecutive windows of ``size`` steps."""
    per = size // (rows[0]["step"] or 1)
    chunks = [rows[i : i + per] for i in range(0, len(rows) - per + 1, per)] if per else [[r] for r in rows]
    return [(chunk[-1]["step"], mean(r[name] for r in chunk)) for chunk in chunks or [rows]]


def outcome(run: dict, drop: float = DROP) -> dict:
    """Return what README.md defines, with ``drop`` for its 0.10: start, peak, final, drop, the steps of first fall and collapse or None, mismatches.

    A run that ended before its ``steps`` has diverged, which is a fall and a collapse at its last step.

    >>> rows = [dict(step=25 * i, reward=r, k3=0.1) for i, r in enumerate([0.5, 0.5, 0.8, 0.8, 0.6, 0.6, 0.6, 0.6], 1)]
    >>> found = outcome({"rows": rows})
    >>> found["peak"], round(found["drop"], 2), found["fall"], found["collapse"]
    (0.8, 0.2, 150, 150)
    """
    rows = run["rows"]
    rewards = windows(rows, "reward", SHORT)
    peak = max(r for _, r in rewards)
    last = [r for r in rows if r["step"] > rows[-1]["step"] - LONG]
    final, collapse = mean(r["reward"] for r in last), None
    if final <= peak - drop:
        above = [i for i, (_, r) in enumerate(rewards) if r > peak - drop]
        collapse = rewards[above[-1] + 1][0] if above[-1] + 1 < len(rewards) else rows[-1]["step"]
    highest, fall = accumulate((r for _, r in rewards), max), None
    for (step, reward), best in zip(rewards, highest, strict=True):
        if fall is None and reward <= best - drop:
            fall = step
    if rows[-1]["step"] < run.get("steps", 0):
        collapse, fall = collapse or rows[-1]["step"], fall or rows[-1]["step"]
    end = rows[-1]["step"] if collapse is None else max(LONG, collapse - SHORT)
    before = [r["k3"] for r in rows if end - LONG < r["step"] <= end]
    found = dict(start=rewards[0][1], peak=peak, final=final, drop=peak - final, fall=fall, collapse=collapse)
    mismatch = dict(k3=mean(before), k3_start=windows(rows, "k3", SHORT)[0][1], k3_end=mean(r["k3"] for r in last))
    return {**found, **mismatch, "steps": rows[-1]["step"]}


def binomial(k: int, n: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) 95 % interval of a share of ``k`` in ``n``.

    >>> [round(x, 3) for x in binomial(0, 5)], [round(x, 3) for x in binomial(3, 5)]
    ([0.0, 0.522], [0.147, 0.947])
    """
    found = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def fisher(a: list[dict], b: list[dict], name: str) -> float:
    """Return Fisher's exact p, two-sided, that as many runs of ``a`` as of ``b`` have an event.

    >>> round(fisher([dict(fall=100)] * 5, [dict(fall=100)] + [dict(fall=None)] * 4, "fall"), 3)
    0.048
    """
    counts = [[sum((o[name] is not None) == had for o in of) for had in (True, False)] for of in (a, b)]
    return float(stats.fisher_exact(counts).pvalue)


def t975(freedom: int) -> float:
    """Return Student's two-sided 95 % quantile.

    >>> [round(t975(n), 3) for n in (1, 4, 9, 30)]
    [12.706, 2.776, 2.262, 2.042]
    """
    return float(stats.t.ppf(0.975, freedom))


def center(values: list[float]) -> tuple[float, float, float] | None:
    """Return mean and 95 % t interval, None of fewer than two values."""
    if len(values) < 2:
        return None
    half = t975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values), mean(values) - half, mean(values) + half


def said(value: float, low: float | None = None, high: float | None = None) -> str:
    """Return a figure, with its interval if there is one.

    >>> said(0.5, -0.1, 1.1), said(0.5)
    ('+0.50 [-0.10, +1.10]', '+0.50')
    """
    return f"{value:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float, float] | None:
    """Return mean and 95 % t interval of a - b over common seeds, None of fewer than two."""
    return center([a[s] - b[s] for s in sorted(a.keys() & b.keys())])


def grouped(runs: list[dict]) -> dict[tuple[int, float], dict[str, dict[int, dict]]]:
    """Return {(bits, lr): {arm: {seed: outcome}}} in the order of ``ORDER``."""
    found = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda r: (r["bits"], r["lr"], ORDER.index(r["arm"]), r["seed"])):
        seeds = found[run["bits"], run["lr"]][run["arm"]]
        if run["seed"] in seeds:
            raise ValueError(
                f"two runs of {run['arm']}, {run['bits']} bits, lr {run['lr']}, seed {run['seed']} in one table"
            )
        seeds[run["seed"]] = outcome(run)
    return found


def until(runs: list[dict], steps: int) -> list[dict]:
    """Return the runs as they were after so many steps."""
    return [{**r, "steps": min(r["steps"], steps), "rows": [x for x in r["rows"] if x["step"] <= steps]} for r in runs]


def garwood(k: int, exposure: float) -> tuple[float, float]:
    """Return the exact 95 % interval of a Poisson rate after ``k`` events in ``exposure``.

    >>> [round(x, 2) for x in garwood(0, 1)], [round(x, 2) for x in garwood(4, 2)]
    ([0.0, 3.69], [0.54, 5.12])
    """
    low, high = stats.chi2.ppf(0.025, 2 * k) / 2 if k else 0.0, stats.chi2.ppf(0.975, 2 * k + 2) / 2
    return float(low / exposure), float(high / exposure)


def rate_model(counts: dict[int, tuple[int, float]], at=range(3, 9)) -> tuple[tuple, dict[int, tuple]]:
    """Return (fit, low, high) of the slope b, and of the rate exp(a + b x) at each x of ``at``.

    Events are Poisson with mean exposure * exp(a + b x). Intervals are the likelihood's, for one figure at a time: what
    any (a, b) gives whose log-likelihood is within 3.84 / 2 of the highest, on a grid of steps of 0.02.
    What would lie at the grid's edge or beyond is None: the counts do not determine it.

    Args:
        counts: {x: (events, exposure)}.

    >>> slope, rates = rate_model({3: (80, 1.0), 4: (40, 1.0), 5: (20, 1.0)})
    >>> [round(v, 2) for v in slope], [round(v, 1) for v in rates[8]]  # log of a half, s.e. 0.12; 80 / 2^5
    ([-0.7, -0.92, -0.48], [2.4, 0.9, 6.6])
    >>> rate_model({3: (4, 1.0)}, at=(3, 8))[0]  # one x says nothing of a slope
    (None, None, None)
    """
    if len(counts) < 2:
        return (None,) * 3, dict.fromkeys(at, (None,) * 3)
    slopes = np.arange(-400, 151)[:, None] / 50  # -8 to 3
    logs = np.arange(-1000, 301)[None] / 50  # log rate at x0, -20 to 6

    def likelihood(x0: int) -> np.ndarray:
        rows = ((k, t, logs + slopes * (x - x0)) for x, (k, t) in counts.items())
        return sum(k * y - t * np.exp(np.minimum(y, 50)) for k, t, y in rows)

    def interval(profile: np.ndarray, axis: np.ndarray) -> tuple[float, float, float]:
        near = axis[profile > profile.max() - 1.92]
        found = axis[profile.argmax()], near.min(), near.max()
        return tuple(None if x in (axis[0], axis[-1]) else float(x) for x in found)

    rates = {x: interval(likelihood(x).max(0), logs[0]) for x in at}
    slope = interval(likelihood(min(counts)).max(1), slopes[:, 0])
    return slope, {x: tuple(None if y is None else math.exp(y) for y in found) for x, found in rates.items()}
