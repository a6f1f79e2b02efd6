"""``verl-rounding-align gap score DUMP``: the mismatch of log-probs that somebody else has dumped, streamed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from .. import report
from . import gap_report, pairs
from .tally import VERSION, GapRow, Tally, tally_row


def score_dump(source: Path, json: Path | None = None) -> GapRow:
    """Summarise log-probs that somebody else has dumped, streamed; see :mod:`pairs` for the schema.

    Raises:
        ValueError: no dump, or nothing in it to compare.
    """
    tally, left_out, masked = Tally(), 0, 0
    with report.progress() as progress:
        task = progress.add_task(f"reads {source}", total=None)
        for part in pairs.read(source):
            valid = part.valid()
            tally.add(valid.rollout - valid.trainer, valid.offsets)
            left_out += part.missing
            masked += int((~part.mask).sum())
            progress.update(task, description=f"reads {source}: {tally.tokens:,} tokens")
        progress.update(task, total=1, completed=1)
    if not tally.tokens:
        raise ValueError(
            f"{source}: not one token that counts has two finite log-probs ({left_out} have not, {masked} masked)"
        )
    row = tally_row(source.name, "none", tally)
    payload = {"schema": "verl-rounding-align/score", "schema_version": VERSION, "source": source.name}
    payload |= {"row": asdict(row), "nonfinite": left_out, "masked": masked}
    payload |= {"positions": tally.by_position(), "sizes": tally.by_size()}
    report.show(gap_report.dump_section(payload).table())
    if json:
        report.write_json(json, payload)
    return row
