"""Landing scores as a table."""

from __future__ import annotations

from ..report import rows as report
from .rows import Landing, LandingRow

COLUMNS = (
    "quantity",
    "stored by",
    "score, median layer",
    "lowest to highest layer",
    "floor",
    "score / floor",
    "values per layer",
    "layers",
)


def cells(row: LandingRow) -> list[str]:
    """Return a row of the table; columns are ``COLUMNS``."""
    return [
        row.quantity,
        row.point,
        f"{row.score:.2g}",
        f"{min(row.scores):.2g} to {max(row.scores):.2g}",
        f"{row.floor:.2g}",
        f"{row.score / row.floor:.1f}",
        f"{row.values:,}" + (f" ({row.nonfinite:,} not finite left out)" if row.nonfinite else ""),
        str(len(row.layers)),
    ]


def render(found: Landing, title: str):
    """Return a rich table."""
    return report.table(f"Landing score: {title}", COLUMNS, [cells(row) for row in found.rows])
