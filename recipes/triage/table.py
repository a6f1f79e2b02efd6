"""Write the table in README.md from results/calibration.json; --check: fail if it differs."""

from __future__ import annotations

import json
from pathlib import Path

from verl_rounding_align.report import rows as report
from verl_rounding_align.triage.rows import ROUNDING

HERE = Path(__file__).parent
COLUMNS = (
    "cause",
    "size",
    "k3, nats per token",
    "named first, of draws",
    "95 % interval",
    "met",
    "fresh",
    "else named",
)


def table(results: dict) -> str:
    """Return the Markdown table and one line on false alarms."""
    rows = results["rows"]
    clean = [row for row in rows if row["cause"] == ROUNDING]
    alarms = []
    for fresh in (True, False):
        some = [row for row in clean if row["fresh"] == fresh]
        false, total = sum(row["draws"] - row["hits"] for row in some), sum(row["draws"] for row in some)
        alarms.append(f"{false} of {total} draws ({false / total:.2%})")
    lines = []
    for row in sorted(rows, key=lambda row: row["cause"] != ROUNDING):
        low, high = row["interval"]
        wanted = 0.98 if row["cause"] == ROUNDING else 0.95
        lines.append([
            " or ".join([row["cause"], *row["also"]]), row["size"], f"{row['k3']:.2g}", f"{row['hits']} of {row['draws']}", f"{low:.3f} to {high:.3f}",
            "yes" if row["hits"] >= wanted * row["draws"] else "no", "yes" if row["fresh"] else "no",
            ", ".join(f"{cause} {n}" for cause, n in row["others"].items()),
        ])  # fmt: skip
    text = report.markdown(COLUMNS, lines)
    return (
        f"{text}\n\nFalse alarms on clean runs: {alarms[0]} of fresh samples, {alarms[1]} of samples that thresholds were set with; "
        f"{results['tokens']:,} tokens a draw."
    )


def compared(results: dict) -> str:
    """Return the Markdown table of what comparing both sides finds."""
    lines = []
    for row in results["compared"]:
        named = ", ".join(f"{cause} {n}" for cause, n in row["named"].items())
        lines.append([row["cause"], row["size"], f"{named} of {row['comparisons']}"])
    return report.markdown(["what there is", "size", "named, of comparisons"], lines)


def filled(text: str) -> str:
    """Return README text with both tables renewed."""
    results = json.loads((HERE / "results/calibration.json").read_text())
    return report.filled(report.filled(text, "triage", table(results)), "compared", compared(results))


if __name__ == "__main__":
    report.renew(HERE / "README.md", filled)
