"""``verl-rounding-align gap score DUMP``: the mismatch of log-probs that somebody else has dumped, streamed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..logprobs import pairs
from ..logprobs.tally import VERSION, GapRow, Tally, tally_row
from ..report import pages as gap_report
from ..report import progress as bars
from ..report import rows as report


def score_dump(source: Path, out: Path | None = None, json: Path | None = None) -> GapRow:
    """Summarise log-probs that somebody else has dumped, streamed; see :mod:`pairs` for the schema.

    Args:
        out: folder for ``score.json`` and the report's pages with pictures.
        json: file for the same JSON.

    Raises:
        ValueError: no dump, or nothing in it to compare.
    """
    tally, left_out, masked = Tally(), 0, 0
    with bars.progress() as display:
        task = display.add_task(f"reads {source}", total=1)
        for part in pairs.read(source, progress=lambda share: display.update(task, completed=share)):
            valid = part.valid()
            tally.add(valid.rollout - valid.trainer, valid.offsets, valid.positions)
            left_out += part.missing
            masked += int((~part.mask).sum())
            display.update(task, description=f"reads {source}: {tally.tokens:,} tokens")
    if not tally.tokens:
        raise ValueError(
            f"{source}: not one token that counts has two finite log-probs ({left_out} have not, {masked} masked)"
        )
    row = tally_row(source.name, "none", tally)
    payload = {"schema": "verl-rounding-align/score", "schema_version": VERSION, "source": source.name}
    payload |= {"row": asdict(row), "nonfinite": left_out, "masked": masked}
    payload |= {"positions": tally.by_position(), "sizes": tally.by_size()}
    report.show(gap_report.dump(payload)[0].table())
    for file in filter(None, (json, out and out / "score.json")):
        report.write_json(file, payload)
    if out:
        report.show(*(f"wrote {path}" for path in gap_report.write(out)))
    return row
