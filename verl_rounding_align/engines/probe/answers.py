"""What a probe's rows answer: an exit code, a preset refuted, JSON, a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ...rounding import Rounding
from ..presets import Preset
from .bitwise import EXACT, Row


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 if there are rows and each has exactly one answer, else 1."""
    return 0 if rows and all(row.verdict == EXACT for row in rows) else 1


def refute(rows: Iterable[Row], preset: Preset) -> list[str]:
    """Return one line for each row that contradicts a preset; inert points cannot.

    A row without a match contradicts nothing unless the preset's own subset is not its best one.
    """
    lines = []
    for row in rows:
        claimed = preset.at(row.kind) - row.inert
        found = row.points if row.verdict == EXACT else row.best
        agrees = claimed in {s - row.inert for s in row.matches} if row.matches else claimed == found
        if not agrees:
            lines.append(
                f"{preset.name}: {row.kind}: claims {Rounding(claimed)}, {row.engine} {row.mode} stores {Rounding(found)}"
                f" ({row.verdict}, {row.share:.4%} of {row.elements} elements)"
            )
    return lines


def to_json(rows: Iterable[Row], **header) -> str:
    """Return rows as JSON with a header (model, versions); sets of points become sorted lists."""

    def plain(value):
        return sorted(value) if isinstance(value, frozenset) else str(value)

    return json.dumps({**header, "rows": [asdict(row) for row in rows]}, default=plain, indent=2)


def render(rows: Iterable[Row]):
    """Return the rows as a ``rich`` table."""
    from rich.table import Table

    table = Table("engine", "mode", "site kind", "verdict", "stored points", "share", "runner-up", "share", "inert")
    for row in rows:
        answer = " | ".join(str(Rounding(s)) for s in sorted({m - row.inert for m in row.matches}, key=sorted))
        table.add_row(
            row.engine,
            row.mode,
            row.kind,
            row.verdict,
            answer or f"best {Rounding(row.best)}\nfirst at {row.differs}",
            f"{row.share:.4%}",
            "-" if row.runner_up is None else str(Rounding(row.runner_up)),
            f"{row.runner_up_share:.1%}",
            ", ".join(sorted(row.inert)) or "-",
        )
    return table
