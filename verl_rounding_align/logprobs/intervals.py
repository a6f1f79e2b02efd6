"""Intervals for averages over tokens of sequences: tokens of one sequence are not independent, sequences are.

Everything reported is a ratio of two sums over sequences, ``sum_s x_s / sum_s n_s`` (a mean per token, a ratio of two
gaps, a Shapley value). So one interval serves them all: the bootstrap-t over whole sequences. With m_s = x_s - value * n_s,
draw b (sequences with replacement) has the ratio e_b and its own cluster-robust standard error se_b, and

    t_b = (e_b - value) / se_b,     interval = [value - q(97.5 %) se, value - q(2.5 %) se],  q the quantiles of t_b.

The simpler percentile interval is too short for k3, whose sums are skewed: only 0.90 to 0.93 of 95 % intervals cover
(``recipes/calibration``). A comparison is paired by construction: both sides' sums come from the same drawn sequences.

A limit is a quantile of the draws, so it is only as steady as the number of draws beyond it. 2,000 draws leave 50 beyond each
limit at 95 %, but one at 99.9 %, where 20,000 are drawn (:func:`draws_for`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 2000  # at least so many
BEYOND = 20  # draws that lie outside an interval at least, half of them beyond each limit
CLUSTERS = 4096  # more sequences than these are summed in groups, which are independent too
FEWEST = 12  # sequences; with fewer no interval is given, as it would be too short (recipes/calibration)
LEAN = 0.1  # a draw whose standard error is less than this share of the data's says nothing
LEAN_DRAWS = 0.01  # with a larger share of such draws, a few sequences are all there is: no interval is given

Interval = tuple[float, float, float]


def per_sequence(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of ``values`` (tokens,) over each sequence; sequence s is ``offsets[s]:offsets[s + 1]``, not empty."""
    return np.add.reduceat(values.astype(np.float64), offsets[:-1])


def draws_for(level: float) -> int:
    """Return how many bootstrap draws an interval of a level needs: ``BEYOND`` outside of it, and ``DRAWS`` at least.

    >>> draws_for(0.95), draws_for(0.99), draws_for(0.999)
    (2000, 2000, 20000)
    """
    return max(DRAWS, round(BEYOND / (1 - level)))


def intervals(
    ratios: Sequence[tuple[np.ndarray, np.ndarray]], draws: int | None = None, seed: int = 0, level: float = 0.95
) -> list[Interval]:
    """Return (value, low, high) of each ratio of sums; low and high are NaN where too few sequences make the difference.

    Too few are fewer than ``FEWEST``, or so few with a part in the spread that a draw often misses them all (``LEAN``).

    Args:
        ratios: (x, n) per-sequence sums, each (sequences,) fp64, all of the same sequences. A ratio to a sum of zero is NaN.
        draws: bootstrap draws, the same for every ratio; None for :func:`draws_for` the level.
        seed: of the draws.
        level: coverage of the interval.

    >>> intervals([(np.full(12, 6.0), np.full(12, 3.0))])
    [(2.0, 2.0, 2.0)]
    """
    draws = draws_for(level) if draws is None else draws
    table = np.array([column for pair in ratios for column in pair], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(table[1::2].sum(1) != 0, table[::2].sum(1) / table[1::2].sum(1), np.nan)
    if table.shape[1] < FEWEST:
        return [(float(v), float("nan"), float("nan")) for v in values]
    n = min(table.shape[1], CLUSTERS)
    table = np.array([np.bincount(np.arange(table.shape[1]) % n, weights=column) for column in table])
    size = table[1::2]
    m = table[::2] - values[:, None] * size
    scale = np.abs(table[::2]).sum(1)
    still = np.abs(m).sum(1) <= 1e-12 * scale  # the two columns are proportional: there is nothing to vary
    moments = np.concatenate([m, size, m * m, m * size, size * size])
    with np.errstate(divide="ignore", invalid="ignore"):
        se = np.sqrt((m * m).sum(1)) / size.sum(1)
    rng, chunk, t, lean = np.random.default_rng(seed), max(1, 4_000_000 // n), [], np.zeros(len(values))
    with np.errstate(divide="ignore", invalid="ignore"):
        for start in range(0, draws, chunk):
            weights = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, draws - start)).astype(np.float64)
            sums = moments @ weights.T
            sm, sn, smm, smn, snn = sums.reshape(5, len(values), -1)
            shift = sm / sn
            spread = np.sqrt(np.maximum(smm - 2 * shift * smn + shift**2 * snn, 0)) / sn
            t.append(shift / spread)
            lean += ((spread < LEAN * se[:, None]) | (sn == 0)).sum(1)
        t = np.concatenate(t, axis=1)
        t[np.isnan(t)] = 0.0  # a draw that neither moves nor spreads
        tail = (1 - level) / 2
        low, high = np.quantile(t, [tail, 1 - tail], axis=1)
        found = np.stack([values - high * se, values - low * se], axis=1)
    found[lean > LEAN_DRAWS * draws] = np.nan
    found[still] = values[still, None]
    return [(float(v), float(a), float(b)) for v, (a, b) in zip(values, found, strict=True)]
