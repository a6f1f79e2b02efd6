"""What triage returns, the names that its findings share, and how evidence writes figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

ROUNDING = "rounding-sized"
NOTE = "sampled-elsewhere"  # says something about sampling; it causes no mismatch
NOT_COMPARED = "weights-not-compared"  # says that some weights were not compared; it causes no mismatch
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"


@dataclass(frozen=True)
class Finding:
    """One cause: its name, how sure it is (certain, likely or possible), what shows it, and what to do next."""

    cause: str
    confidence: str
    evidence: str
    next_step: str


@dataclass(frozen=True)
class Sign:
    """What a detector saw: how sure it is, and the evidence in words."""

    confidence: str
    evidence: str


@dataclass(frozen=True)
class Explained(Sign):
    """A sign that explains some tokens completely. Later detectors look at the other tokens only.

    Args:
        tokens: (tokens,) bool, which of the sample's tokens are explained.
    """

    tokens: np.ndarray


def as_json(findings: Sequence[Finding]) -> list[dict]:
    """Return the findings as plain data."""
    return [asdict(finding) for finding in findings]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if the mismatch is rounding-sized, with or without notes, else 1."""
    return 0 if {finding.cause for finding in findings} <= {ROUNDING, NOTE, NOT_COMPARED} else 1


def percent(share: float) -> str:
    """Return a share as evidence writes it.

    >>> percent(0.0125)
    '1.25 %'
    """
    return f"{100 * share:.3g} %"


def interval(value: tuple[float, float, float]) -> str:
    """Return (value, low, high) as evidence writes it; an interval that is NaN is left out.

    >>> interval((0.0021, 0.0019, 0.0023)), interval((0.0021, float("nan"), float("nan")))
    ('0.0021 [0.0019, 0.0023]', '0.0021')
    """
    number = f"{value[0]:.2g}"
    return number if np.isnan(value[1]) else f"{number} [{value[1]:.2g}, {value[2]:.2g}]"
