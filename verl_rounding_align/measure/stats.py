"""Intervals for averages over tokens of sequences: tokens of one sequence are not independent, sequences are.

A token average is a ratio of sums over sequences, ``sum_s x_s / sum_s n_s``. The bootstrap draws whole sequences with
replacement and recomputes the ratio; a paired comparison draws the *same* sequences for both sides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

DRAWS = 2000


def per_sequence(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of ``values`` (tokens,) over each sequence; sequence s is ``offsets[s]:offsets[s + 1]``, not empty."""
    return np.add.reduceat(values.astype(np.float64), offsets[:-1])


def bootstrap(
    statistic: Callable[..., np.ndarray], *columns: np.ndarray, draws: int = DRAWS, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """Return (value, low, high): a statistic of sums over sequences, with its percentile bootstrap interval.

    Args:
        statistic: maps one sum per column (arrays of any one shape) to the value, e.g. ``lambda x, n: x / n``.
        columns: per-sequence sums, each (sequences,).
        draws: bootstrap draws.
        level: coverage of the interval.

    >>> bootstrap(lambda x, n: x / n, np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    (2.0, 2.0, 2.0)
    """
    table = np.stack(columns)
    rng, n = np.random.default_rng(seed), table.shape[1]
    sums = np.empty((len(columns), draws))
    chunk = max(1, 20_000_000 // max(n, 1))
    for start in range(0, draws, chunk):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, draws - start))
        sums[:, start : start + len(weights)] = table @ weights.T
    tail = (1 - level) / 2
    low, high = np.quantile(statistic(*sums), [tail, 1 - tail])
    return float(statistic(*table.sum(axis=1))), float(low), float(high)
