"""Findings as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import rows as report
from .rows import Finding

COLUMNS = ("cause", "confidence", "evidence", "next step")


def render(findings: Sequence[Finding], title: str):
    """Return a rich table with one line per finding."""
    return report.table(title, COLUMNS, [(f.cause, f.confidence, f.evidence, f.next_step) for f in findings])
