"""Differences of log-probs, summed as they come: the estimators of a gap from any number of tokens, in bounded memory.

d = rollout log-prob - trainer log-prob of a response token; k1 = mean d, k3 = mean(exp(-d) + d - 1). What is kept grows with
the number of sequences, not of tokens. This file does without torch, so that a dump is summarised in the time that reading it
takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .intervals import Interval, intervals, per_sequence

VERSION = 1  # of the schema of what is written from these rows
GAP, FLOOR = "gap", "floor"
BATCHED = "batched"  # the layout (:mod:`score`) of rows that name none
OCTAVES = np.arange(-24, 5.01, 0.25)  # bins of log2 |d|
POSITIONS = np.unique(np.concatenate([[0, 1, 2, 3], np.round(2 ** np.arange(2, 20.01, 0.5))]).astype(np.int64))
COLUMNS = ("n", "k1", "k3", "abs")


@dataclass(frozen=True)
class GapRow:
    """One set of log-probs against another; intervals are 95 %, in nats per token.

    ``k3_change`` is this row's k3 minus that of the unaligned trainer, and ``k3_ratio`` is their ratio; ``k1_change`` and
    ``abs_change`` are made likewise. All of them are paired, on this row's tokens, and None where there is nothing to compare
    with. The largest difference has no interval, because that of a drawn sample is never larger. ``kind`` is ``gap``, or
    ``floor`` for one side against itself.
    """

    arm: str
    engine: str
    tokens: int
    sequences: int
    k1: Interval
    k3: Interval
    abs_mean: Interval
    abs_max: float
    k3_change: Interval | None = None
    k3_ratio: Interval | None = None
    k1_change: Interval | None = None
    abs_change: Interval | None = None
    kind: str = GAP


def k3_terms(difference: np.ndarray) -> np.ndarray:
    """Return exp(-d) + d - 1 per token, d = rollout - trainer, without cancellation for small d."""
    return np.expm1(-difference) + difference


class Tally:
    """What is kept of any number of differences: sums per sequence, counts by size, and sums by position."""

    def __init__(self):
        self._sums: list[np.ndarray] = []
        self.tokens = self.zeros = 0
        self.abs_max = 0.0
        self.sizes = np.zeros((2, len(OCTAVES) + 1), dtype=np.int64)  # d < 0, d > 0
        self._positions = np.zeros((6, len(POSITIONS)))  # x, n, xx, xn, nn, sequences

    def add(self, d: np.ndarray, offsets: np.ndarray, positions: np.ndarray | None = None) -> Tally:
        """Add whole sequences.

        Args:
            d: (tokens,) differences, finite.
            offsets: (sequences + 1,) where each starts; none is empty.
            positions: (tokens,) of each token in its response; None where no token is left out.
        """
        if not len(d):
            return self
        size, sequences = np.abs(d), len(offsets) - 1
        columns = (np.ones_like(d), d, k3_terms(d), size)
        self._sums.append(np.array([per_sequence(x, offsets) for x in columns]))
        self.tokens += len(d)
        self.zeros += int((d == 0).sum())
        self.abs_max = max(self.abs_max, float(size.max()))
        with np.errstate(divide="ignore"):
            octave = np.searchsorted(OCTAVES, np.log2(size), side="right")
        for row, of in enumerate((d < 0, d > 0)):
            self.sizes[row] += np.bincount(octave[of], minlength=self.sizes.shape[1])
        lengths = np.diff(offsets)
        position = np.arange(len(d)) - np.repeat(offsets[:-1], lengths) if positions is None else positions
        bins = len(POSITIONS)
        key = np.repeat(np.arange(sequences), lengths) * bins + np.searchsorted(POSITIONS, position, side="right") - 1
        x = np.bincount(key, weights=size, minlength=sequences * bins).reshape(sequences, bins)
        n = np.bincount(key, minlength=sequences * bins).reshape(sequences, bins)
        self._positions += [part.sum(0) for part in (x, n, x * x, x * n, n * n, n > 0)]
        return self

    def column(self, name: str) -> np.ndarray:
        """Return the sum over each sequence of ``n`` (tokens), ``k1``, ``k3`` or ``abs``; (sequences,)."""
        return np.concatenate([part[COLUMNS.index(name)] for part in self._sums])

    def by_position(self) -> list[dict]:
        """Return mean |d| in bins of the position in the response, with its standard error clustered by sequence."""
        found = []
        for start, (x, n, xx, xn, nn, g) in zip(POSITIONS, self._positions.T, strict=True):
            if g > 1:
                mean = x / n
                variance = g / (g - 1) * max(xx - 2 * mean * xn + mean**2 * nn, 0) / n**2
                found.append(dict(position=int(start), tokens=int(n), abs_mean=mean, se=float(np.sqrt(variance))))
        return found

    def by_size(self) -> dict:
        """Return how many differences lie in each quarter octave of |d|: ``edges`` (log2), ``negative``, ``positive``."""
        return dict(
            edges=OCTAVES.tolist(), negative=self.sizes[0].tolist(), positive=self.sizes[1].tolist(), zeros=self.zeros
        )


def tally_row(arm: str, engine: str, tally: Tally, base: Tally | None = None, kind: str = GAP) -> GapRow:
    """Return the row of a tally; with ``base``, a tally of the same tokens, the two are compared."""
    n, k3 = tally.column("n"), tally.column("k3")
    ratios = [(tally.column("k1"), n), (k3, n), (tally.column("abs"), n)]
    if base is not None:
        ratios += [(k3 - base.column("k3"), n), (k3, base.column("k3"))]
        ratios += [(tally.column(name) - base.column(name), n) for name in ("k1", "abs")]
    k1, k3, abs_mean, *compared = intervals(ratios)
    return GapRow(arm, engine, tally.tokens, len(n), k1, k3, abs_mean, tally.abs_max, *compared, kind=kind)


def gap_row(arm: str, engine: str, d: np.ndarray, d0: np.ndarray, offsets: np.ndarray, kind: str = GAP) -> GapRow:
    """Return the row of one trainer variant.

    Args:
        d, d0: (response tokens,) rollout minus trainer log-prob of this variant, and of the unaligned trainer.
        offsets: (sequences + 1,) where each sequence's responses start.
    """
    return tally_row(arm, engine, Tally().add(d, offsets), Tally().add(d0, offsets), kind)
