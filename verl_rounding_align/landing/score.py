"""Landing score: how unevenly values fall between the two bf16 numbers that they are rounded to.

The position of an fp32 value says how far it lies from the adjacent bf16 number toward zero to the one away from zero,

    u = (|x| - lo) / (hi - lo),    lo <= |x| < hi adjacent bf16 numbers, 0 <= u < 1.

bf16 is the upper half of fp32, and bit patterns are ordered as magnitudes are. So u is *exactly* the lower 16 bits of the
pattern divided by 65536. This holds for either sign, across powers of two (the step is the one above the value) and for
subnormals, which both formats have with the same exponent. There are three conventions. A value that bf16 represents, zeros
included, is counted and lands at 0. Between the largest finite bf16 number and infinity, hi is 2^128, as it is for rounding.
Infinities and NaN are left out and counted.

The score of N values is the root mean square of the first 16 Fourier magnitudes of their distribution,

    c_k = 1/N sum exp(-2 pi i k u),    score = sqrt(1/16 sum over k = 1..16 of |c_k|^2).

It is 0 if positions are spread evenly, and 1 if all are the same. N independent, uniform positions have E |c_k|^2 = 1/N. They
score 1/sqrt(N), the *floor*, within about 12 % (the root of a mean of 16 exponential variables). A model's values are
correlated, so that their own floor is higher: a score of a few floors is no evidence of clustering.

Positions are kept as a histogram of all 65536 of them (512 KiB per quantity and layer, whatever the number of tokens), so
that streaming changes no bit of the result. Source: "Where Rounding Happens Matters", section on the choice of locations.
"""

from __future__ import annotations

import math

import numpy as np
import torch

POSITIONS = 1 << 16
HARMONICS = 16
BINS = 64


def landed(x: torch.Tensor) -> torch.Tensor:
    """Return the positions of the finite values of ``x``, in 65536ths: int32, flat.

    Args:
        x: fp32, any shape.

    Raises:
        ValueError: another dtype.

    >>> landed(torch.tensor([1.0, -1.0 - 2**-9, 0.0, float("inf")])).tolist()
    [0, 16384, 0]
    """
    if x.dtype != torch.float32:
        raise ValueError(f"landed: positions are those of torch.float32 values, got {x.dtype}")
    bits = x.detach().contiguous().view(torch.int32).flatten()
    finite = (bits & 0x7F800000) != 0x7F800000
    return (bits if bool(finite.all()) else bits[finite]) & 0xFFFF


def score_of(counts: np.ndarray) -> float:
    """Return the landing score of a histogram of positions; NaN of nothing.

    Args:
        counts: (positions,), of any number of equal parts of a step.

    >>> score_of(np.array([5, 0, 0, 0] * 16)), score_of(np.ones(64)), score_of(np.array([3] + [0] * 63))
    (0.25, 0.0, 1.0)
    """
    n = counts.sum()
    if n == 0:
        return math.nan
    c = np.fft.rfft(counts.astype(np.float64))[1 : HARMONICS + 1] / n
    return float(np.sqrt(np.mean(np.abs(c) ** 2)))


class Counts:
    """How many values landed at each position, so far.

    Attributes:
        counts: int64 (65536,), of the finite values.
        nonfinite: how many infinities and NaN were left out.
    """

    def __init__(self):
        self.counts = np.zeros(POSITIONS, dtype=np.int64)
        self.nonfinite = 0

    def add(self, x: torch.Tensor) -> None:
        """Count the values of ``x``: fp32, any shape."""
        positions = landed(x)
        self.nonfinite += x.numel() - positions.numel()
        self.counts += torch.bincount(positions, minlength=POSITIONS).cpu().numpy()

    @property
    def values(self) -> int:
        """How many values were counted: the N of score and floor."""
        return int(self.counts.sum())

    def score(self) -> float:
        """Return the landing score; NaN of nothing."""
        return score_of(self.counts)

    def histogram(self, bins: int = BINS) -> list[int]:
        """Return how many values landed in each of ``bins`` equal parts of [0, 1); ``bins`` divides 65536."""
        return self.counts.reshape(bins, POSITIONS // bins).sum(1).tolist()


def floor(n: int) -> float:
    """Return the root mean square score of ``n`` independent, uniform positions: 1/sqrt(n)."""
    return 1 / math.sqrt(n) if n else math.nan
