"""Statistics of a timing: the median of paired ratios with a bootstrap interval, and a refusal where it shows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MINIMUM_PAIRS = 5  # fewer pairs have no interval worth the name


@dataclass(frozen=True)
class Comparison:
    """Paired samples of a baseline A and a variant B, and what they support.

    Args:
        baseline_s, variant_s: medians, in seconds.
        baseline_iqr, variant_iqr: interquartile range over median.
        ratio: median of B_i / A_i; None where the effect |ratio - 1| is no larger than the spread.
        low, high: 95 % percentile-bootstrap interval of that median; pairs are resampled.
        spread: the longer of the interval's two sides, from the median.
        verdict: the ratio with its interval, or why there is none.
        baseline_samples, variant_samples: in seconds, pair by pair.
    """

    baseline_s: float
    variant_s: float
    baseline_iqr: float
    variant_iqr: float
    ratio: float | None
    low: float
    high: float
    spread: float
    verdict: str
    baseline_samples: tuple[float, ...]
    variant_samples: tuple[float, ...]


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    return torch.quantile(values, q, dim=-1)


def compare(baseline: Sequence[float], variant: Sequence[float], resamples: int = 2000, seed: int = 0) -> Comparison:
    """Return the Comparison of paired samples.

    Args:
        baseline, variant: in seconds; ``baseline[i]`` and ``variant[i]`` were measured next to each other.
        resamples, seed: number of resamples of the bootstrap, and its seed.

    Raises:
        ValueError: fewer than ``MINIMUM_PAIRS`` pairs, or unequal numbers.

    >>> compare([1.0] * 5, [0.9] * 5).verdict
    '0.900x (95 %: 0.900-0.900)'
    >>> compare([1.0, 1.2, 1.0, 1.2, 1.0], [1.1, 1.1, 1.1, 1.1, 1.1]).verdict
    'no ratio: effect 10.0 % is within the spread 18.3 % (95 %: 0.917-1.100)'
    """
    if len(baseline) != len(variant) or len(baseline) < MINIMUM_PAIRS:
        raise ValueError(
            f"pairs={min(len(baseline), len(variant))}: at least {MINIMUM_PAIRS} complete pairs are needed for an interval"
        )
    a, b = (torch.tensor(list(x), dtype=torch.float64) for x in (baseline, variant))
    ratios = b / a
    point = _quantile(ratios, 0.5).item()
    draws = torch.randint(len(ratios), (resamples, len(ratios)), generator=torch.Generator().manual_seed(seed))
    medians = _quantile(ratios[draws], 0.5)
    low, high = _quantile(medians, 0.025).item(), _quantile(medians, 0.975).item()
    effect, spread = abs(point - 1), max(point - low, high - point)
    interval = f"(95 %: {low:.3f}-{high:.3f})"
    seen = effect > spread
    verdict = (
        f"{point:.3f}x {interval}"
        if seen
        else f"no ratio: effect {100 * effect:.1f} % is within the spread {100 * spread:.1f} % {interval}"
    )
    medians_s = [_quantile(x, 0.5).item() for x in (a, b)]
    iqrs = [(_quantile(x, 0.75) - _quantile(x, 0.25)).item() / m for x, m in zip((a, b), medians_s, strict=True)]
    return Comparison(
        *medians_s, *iqrs, point if seen else None, low, high, spread, verdict, tuple(baseline), tuple(variant)
    )
