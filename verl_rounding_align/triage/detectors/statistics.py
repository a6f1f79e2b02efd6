"""Statistics that several detectors share."""

from __future__ import annotations

from math import exp, lgamma, log

import numpy as np

from ..sample import Sample


def binomial_tail(k: int, n: int, p: float) -> float:
    """Return P(X >= k) where X counts the hits among n draws of probability p.

    >>> round(binomial_tail(2, 2, 0.1), 6)
    0.01
    """

    def term(i):
        return exp(lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) + i * log(p) + (n - i) * log(1 - p))

    return min(1.0, sum(term(i) for i in range(k, n + 1)))


def slope(x: np.ndarray, y: np.ndarray, sequence: np.ndarray) -> tuple[float, float]:
    """Return the least-squares slope of y on x and its standard error, clustered by sequence; (tokens,) each."""
    x = x - x.mean()
    total = float((x * x).sum())
    if total == 0:
        return 0.0, float("inf")
    found = float((x * y).sum() / total)
    rest = y - y.mean() - found * x
    return found, float(np.sqrt((np.bincount(sequence, x * rest) ** 2).sum()) / total)


def apart(sample: Sample, value: np.ndarray, side: str, fewest: int) -> tuple[float, float, int] | None:
    """Return which sequences differ most from the others, as (t, their mean log |u| less that of the others, a value).

    The standard error counts the spread between sequences of one kind, but takes it for no less than 0.15 (it is 0.05 to
    0.1 on clean runs). None means that there are too few sequences or tokens.

    Args:
        value: (sequences,) integers.
        side: which values make a sequence one of them: ``from`` a value on, ``before`` a value, or ``at`` a value.
        fewest: tokens that both kinds must have; a sequence counts only if it has 8 clear tokens.
    """
    where, n = sample.sequence[sample.clear], len(sample.pairs)
    count = np.bincount(where, minlength=n)
    mean = np.bincount(where, weights=sample.log_size, minlength=n) / np.maximum(count, 1)
    usable = count >= 8
    count, mean = count[usable].astype(float), mean[usable]
    if not len(count):
        return None
    values, which = np.unique(value[usable], return_inverse=True)
    columns = (np.ones(len(count)), mean, mean * mean, count, count * mean)
    sums = np.stack([np.bincount(which, column) for column in columns])
    whole = sums.sum(1, keepdims=True)
    before = np.cumsum(sums, 1) - sums
    inside = {"at": sums, "before": before, "from": whole - before}[side]
    both = np.stack([inside, whole - inside])  # (2, 5, values)
    good = (both[:, 3] >= fewest).all(0)
    if not good.any():
        return None
    values, (size, total, square, tokens, weighted) = values[good], both[:, :, good].swapaxes(0, 1)
    between = np.maximum(0.0225, (square - total * total / size).sum(0) / max(1, len(count) - 2))
    error = np.sqrt((between / size + 1.2 / tokens).sum(0))
    difference = weighted[0] / tokens[0] - weighted[1] / tokens[1]
    best = int(np.argmax(difference / error))
    return float(difference[best] / error[best]), float(difference[best]), int(values[best])
