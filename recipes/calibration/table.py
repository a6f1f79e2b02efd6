"""Write the tables of README.md from results/; --check: fail if they differ."""

import json
from pathlib import Path

from verl_rounding_align.report import rows as report

HERE = Path(__file__).resolve().parent


def load(name: str) -> dict:
    return json.loads((HERE / f"results/{name}.json").read_text())


def coverage() -> str:
    """Share of intervals that hold the true value."""
    found = load("calibration")
    rows = [
        [
            r["population"],
            r["sequences"],
            r["quantity"],
            *(f"{100 * r[k] / r['sets']:.1f}" for k in ("covered", "percentile")),
        ]
        for r in found["rows"]
    ]
    return report.markdown(["data", "sequences", "quantity", "bootstrap-t, %", "percentile bootstrap, %"], rows)


def scale() -> str:
    """Time and memory of summarising a dump."""
    rows = [
        [
            r["format"],
            r["length"],
            f"{r['tokens']:,}",
            *(f"{r[k]:.{digits}f}" for k, digits in (("dump_mib", 0), ("seconds", 1), ("peak_mib", 0))),
        ]
        for r in load("scale")["rows"]
    ]
    columns = ["dump", "tokens per row", "tokens", "dump, MiB", "CPU time, s", "peak memory, MiB"]
    return report.markdown(columns, rows)


def filled(text: str) -> str:
    """Return README text with both tables renewed."""
    return report.filled(report.filled(text, "coverage", coverage()), "scale", scale())


if __name__ == "__main__":
    report.renew(HERE / "README.md", filled)
