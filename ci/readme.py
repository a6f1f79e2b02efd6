"""Write the README's measured tables from the JSON that the recipes' commands wrote; --check: fail if they differ.

Each table stands between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->`` in README.md.
"""

import importlib.util
import json
import sys
from pathlib import Path

from verl_rounding_align.report import pages as gap_report
from verl_rounding_align.report import rows as report
from verl_rounding_align.report.pages import interval

ROOT = Path(__file__).resolve().parents[1]


def load(path: str):
    """Return a recipe's script as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made_with(versions: dict) -> str:
    names = ("vllm", "torch", "transformers", "verl")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def gap() -> str:
    """The gap on pretrained weights, in units of 1e-4 nats per token, each mode's floors below."""
    return gaps("gap.json")


def packed() -> str:
    """The same with packed sequences."""
    return gaps("packed.json")


def gaps(name: str) -> str:
    """The table of one report of the SmolLM2 recipe."""
    payload = json.loads((ROOT / "recipes/smollm2_gap/results" / name).read_text())
    rows = []
    for mode, found in payload["modes"].items():
        for r in found["rows"]:
            if r["arm"] in ARMS or (r["kind"] == "floor" and name == "gap.json"):
                ratio = "" if r["arm"] == "none" else interval(r["k3_ratio"])
                rows.append([mode, r["arm"], interval(r["k3"], 1e4), ratio])
    counts = "; ".join(
        f"{mode}: {found['rows'][0]['tokens']:,} response tokens in {found['rows'][0]['sequences']} sequences"
        for mode, found in payload["modes"].items()
    )
    note = f"{counts}; {made_with(payload['versions'])}"
    columns = ["vLLM", "trainer", "k3, 1e-4 nats per token", "ratio to unaligned, paired"]
    return report.markdown(columns, rows) + f"\n\n{note}."


def crossed() -> str:
    """Two by two: engine compiled or eager, trainer unaligned or aligned."""
    payload = json.loads((ROOT / "recipes/smollm2_gap/results/gap.json").read_text())
    section = gap_report.two_by_two(payload["modes"])
    return report.markdown(section.columns, section.rows)


def attribution() -> str:
    """Which group closes how much."""
    payload = json.loads((ROOT / "recipes/smollm2_gap/results/attribution.json").read_text())
    section = gap_report.attribution({"modes": {"compiled": payload["modes"]["compiled"]}})[0]
    return report.markdown(section.columns, section.rows) + f"\n\n{section.note}"


def exact() -> str:
    """The divergence over the whole vocabulary, compiled engine."""
    payload = json.loads((ROOT / "recipes/smollm2_gap/results/gap.json").read_text())
    rows = [r for r in payload["modes"]["compiled"]["exact"] if r["arm"] in ARMS]
    section = gap_report.exact_section("compiled", rows)
    return report.markdown(section.columns, section.rows) + f"\n\n{section.note}"


def quickstart() -> str:
    """The quickstart's table."""
    module = load("recipes/quickstart/quickstart.py")
    payload = json.loads((ROOT / "recipes/quickstart/results/summary.json").read_text())
    rows = [module.cells(module.Summary(**arm)) for arm in payload["arms"]]
    note = f"{payload['device']}; {made_with(payload['versions'])}; {payload['seconds']} s for the three arms"
    return report.markdown(module.COLUMNS, rows) + f"\n\n{note}."


def overhead() -> str:
    """What alignment costs."""
    return "\n".join(load("recipes/overhead/readme_table.py").costs())


def shares() -> str:
    """Where the time of a pass goes."""
    return "\n".join(load("recipes/overhead/readme_table.py").shares())


def alternatives() -> str:
    """What a user would pick instead: cost against gap."""
    return "\n".join(load("recipes/overhead/readme_table.py").alternatives("smollm2-135m"))


def collapse() -> str:
    """Training with coarse storage, every arm."""
    return load("recipes/collapse/table.py").summary()


ARMS = ("none", "rope", "swiglu", "add_rms_norm", "carry", "paper", "all")
TABLES = {
    "gap": gap,
    "packed": packed,
    "crossed": crossed,
    "attribution": attribution,
    "exact": exact,
    "collapse": collapse,
    "quickstart": quickstart,
    "overhead": overhead,
    "shares": shares,
    "alternatives": alternatives,
}


def filled(text: str) -> str:
    """Return README text with every table renewed.

    Raises:
        ValueError: a table has no place in the text.
    """
    for name, table in TABLES.items():
        text = report.filled(text, name, table())
    return text


if __name__ == "__main__":
    report.renew(ROOT / "README.md", filled)
