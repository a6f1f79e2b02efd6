"""Write the table in README.md from the results and the presets; --check: fail if it differs.

Releases that were run come from ``results/*.json``; the CUDA rows are the presets' own, read from source and not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from verl_rounding_align.engines.presets import PRESETS, Preset, resolve
from verl_rounding_align.engines.probe import EXACT, Row, refute
from verl_rounding_align.engines.probe.result import row_from_json
from verl_rounding_align.report import rows as report
from verl_rounding_align.report.rows import points as braces

HERE = Path(__file__).parent
COLUMNS = ("vLLM", "torch", "device, mode", "attention", "MLP", "experts", "adds", "verdict")
ADDS = ("attn_add", "mlp_add", "final")
MODES = ("compiled", "eager")


def load(folder: Path = HERE / "results") -> list[dict]:
    """Return the results, oldest release first."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(records, key=lambda record: Version(record["release"]))


def rows_of(record: Mapping, mode: str) -> dict[str, list[Row]]:
    """Return family -> the probe's rows in one mode."""

    return {
        family: [row_from_json(plain) for plain in answer["rows"] if plain["mode"] == mode]
        for family, answer in record.get("probe", {}).items()
    }


def preset_of(release: str, mode: str) -> Preset | None:
    """Return the preset for a release on a CPU, None if none covers it."""
    try:
        return resolve("vllm", release, "cpu", eager=mode == "eager")
    except ValueError:
        return None


def cell(rows: Iterable[tuple[str, Row]]) -> str:
    """Return what (name, row) pairs store: one set, that of the row with fewest inert points, if the others agree."""
    rows = sorted(rows, key=lambda pair: len(pair[1].inert))
    if not rows:
        return ""
    shown = rows[0][1].best
    if all(row.best == shown - row.inert for _, row in rows):
        return braces(shown)
    return ", ".join(f"{name} {braces(row.best)}" for name, row in rows)


def site_points(record: Mapping, mode: str) -> Iterator[tuple[str, Mapping]]:
    """Yield (family, point) for every rounding point that a release's site maps decide or leave open in one mode."""
    for family, answer in record.get("sites", {}).items():
        for found in answer["maps"]:
            if found["mode"] == mode:
                yield from ((family, point) for point in found["points"])


def contradictions(record: Mapping, mode: str) -> list[str]:
    """Return ``family kind point`` for every point of which the site map says another thing than the probe."""
    probed = {(family, row.kind): row for family, rows in rows_of(record, mode).items() for row in rows}
    lines = []
    for family, point in site_points(record, mode):
        row = probed.get((family, point["kind"]))
        if row is None or point["stored"] is None or point["point"] in row.inert:
            continue
        if point["stored"] != (point["point"] in row.best):
            lines.append(f"{family} {point['kind']} {point['point']}")
    return lines


def site_verdict(record: Mapping, mode: str) -> list[str]:
    """Return in words what the site maps add to the probe, nothing if there are none."""
    points = [point for _, point in site_points(record, mode)]
    if not points:
        return []
    decided = sum(point["stored"] is not None for point in points)
    others = contradictions(record, mode)
    says = f"contradicts the probe at {', '.join(others)}" if others else "agrees with the probe"
    return [f"site map decides {decided} of {len(points)} points, {says}"]


def verdict(families: Mapping[str, list[Row]], preset: Preset | None, *more: str) -> str:
    """Return how many sites have exactly one answer, which do not, and whether the preset says the same; and ``more``."""
    pairs = [(family, row) for family, found in families.items() for row in found]
    others = [(family, row) for family, row in pairs if row.verdict != EXACT]
    parts = [f"{len(pairs) - len(others)} of {len(pairs)} sites exact"]
    parts += [f"{family} {row.kind} {row.verdict} ({row.share:.3%})" for family, row in others]
    if preset is None:
        parts.append("no preset")
    else:
        parts.append(f"{'refutes' if refute([row for _, row in pairs], preset) else 'agrees with'} `{preset.name}`")
    return "; ".join([*parts, *more])


def run_cells(record: Mapping) -> list[list[str]]:
    """Return a release's rows of the table, one per mode; one row if it did not run."""
    torch = record.get("versions", {}).get("torch", "")
    cells = []
    for mode in MODES:
        families = rows_of(record, mode)
        if not any(families.values()):
            continue

        def of(*kinds: str, families=families) -> str:
            return cell(
                (f"{family} {row.kind}" if len(kinds) > 1 else family, row)
                for family, found in families.items()
                for row in found
                if row.kind in kinds
            )

        checked = verdict(families, preset_of(record["release"], mode), *site_verdict(record, mode))
        cells.append(
            [record["release"], torch, f"CPU, {mode}", of("attention"), of("mlp"), of("experts"), of(*ADDS), checked]
        )
    if record["status"] != "run":
        cells.append([record["release"], torch, "CPU", "", "", "", "", record["status"].replace("|", "/")])
    return cells


def read_cells(preset: Preset) -> list[str]:
    """Return the row of a preset that was read from source."""
    adds = {kind: braces(preset.points[kind]) for kind in ("attn_add", "mlp_add")}  # after the final add nothing reads
    same = len(set(adds.values())) == 1
    doubts = [f"{group} {evidence}" for group, evidence in preset.evidence.items() if evidence != "source"]
    return [
        "-".join(dict.fromkeys(preset.versions)),
        "",
        f"CUDA, {'eager' if preset.eager else 'compiled'}",
        braces(preset.points["attention"]),
        braces(preset.points["mlp"]),
        braces(preset.points["experts"]),
        adds["attn_add"] if same else ", ".join(f"{kind} {text}" for kind, text in adds.items()),
        "; ".join([f"read, not run (`{preset.name}`)", *doubts]),
    ]


def dispatch(record: Mapping, mode: str) -> str:
    """Return in words what the release itself chose in one mode, "" if its result does not say."""
    found = {
        json.dumps(answer["fingerprints"][mode], sort_keys=True): answer["fingerprints"][mode]
        for answer in record.get("probe", {}).values()
        if "fingerprints" in answer
    }
    parts = [
        [f"backend {f['backend'] or 'none'}", f"custom_ops {', '.join(f['custom_ops'])}", *f["ir_op_priority"],
         f"passes {', '.join(f['passes']) or 'none'}"]
        for f in found.values()
    ]  # fmt: skip
    return " / ".join(sorted(", ".join(part) for part in parts))


def dispatch_notes(records: list[dict]) -> list[str]:
    """Return one line for each way in which releases dispatch."""
    said: dict[str, list[str]] = {}
    for mode in MODES:
        for record in records:
            if text := dispatch(record, mode):
                said.setdefault(f"{mode}: {text}", []).append(record["release"])
    return [f"As vLLM's own config has it, {text} ({', '.join(releases)})." for text, releases in said.items()]


def table(records: list[dict]) -> str:
    """Return the Markdown table and lines on how and where the CPU rows were run."""
    cells = [row for record in records for row in run_cells(record)]
    cells += [read_cells(preset) for preset in PRESETS.values() if preset.device == "cuda"]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    where = {}
    for record in records:
        if "cpu" in record and "versions" in record:
            flags = [name for name, there in record["cpu"].items() if there is True]
            machine = f"Python {record['versions']['python']}, {record['versions']['machine']} with {', '.join(flags)}"
            where.setdefault(machine, []).append(
                f"{record['release']} (Transformers {record['versions']['transformers']})"
            )
    notes = [f"{', '.join(releases)}: {machine}." for machine, releases in where.items()]
    return "\n\n".join([text, *dispatch_notes(records), *notes])


def filled(text: str, records: list[dict]) -> str:
    """Return README text with the table renewed.

    Raises:
        ValueError: the text has no place for it.
    """
    return report.filled(text, "engine map", table(records))


if __name__ == "__main__":
    report.renew(HERE / "README.md", lambda text: filled(text, load()))
