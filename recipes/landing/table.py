"""Write the tables of README.md from results/; --check: fail if they differ."""

import json
from pathlib import Path

from verl_rounding_align.landing.render import COLUMNS, cells
from verl_rounding_align.landing.rows import LandingRow
from verl_rounding_align.report import rows as report

HERE = Path(__file__).resolve().parent
FILES = {64: "window-64", 512: "landing", 2048: "window-2048"}


def load(name: str) -> dict:
    """Return a result with its rows as ``LandingRow``."""
    found = json.loads((HERE / f"results/{name}.json").read_text())
    for row in found["rows"]:
        row.pop("formula")
    return {**found, "rows": [LandingRow(**row) for row in found["rows"]]}


def scores() -> str:
    """The table of all quantities."""
    found = load("landing")
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "transformers"))
    note = (
        f"{found['model']}, {found['tokens']:,} tokens of {found['text']} in windows of {found['window']}; {versions}."
    )
    return report.markdown(COLUMNS, [cells(row) for row in found["rows"]]) + f"\n\n{note}"


def windows() -> str:
    """The scores of the quantities that positions move, by window length."""
    found = {window: {row.quantity: row for row in load(name)["rows"]} for window, name in FILES.items()}
    names = [name for name in found[512] if name.startswith(("RoPE", "attention"))]
    rows = [[name, *(f"{found[window][name].score:.2g}" for window in FILES)] for name in names]
    return report.markdown(["quantity", *(f"windows of {window}" for window in FILES)], rows)


def filled(text: str) -> str:
    """Return README text with both tables renewed."""
    return report.filled(report.filled(text, "landing", scores()), "windows", windows())


if __name__ == "__main__":
    report.renew(HERE / "README.md", filled)
