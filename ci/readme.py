"""Write the README's measured tables from the JSON that the recipes' commands wrote; --check: fail if they differ.

Each table stands between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->`` in README.md.
"""

import importlib.util
import json
import sys
from pathlib import Path

from verl_rounding_align import report

ROOT = Path(__file__).resolve().parents[1]


def load(path: str):
    """Return a recipe's script as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def markdown(columns, rows) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def made_with(versions: dict) -> str:
    names = ("vllm", "torch", "transformers", "verl")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def gap() -> str:
    """The gap on pretrained weights, in units of 1e-4 nats per token."""
    payload = json.loads((ROOT / "recipes/smollm2_gap/results/gap.json").read_text())
    rows = []
    for mode, entries in payload["modes"].items():
        for r in entries:
            value, low, high = (1e4 * x for x in r["k3"])
            ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*r["k3_ratio"])
            unaligned = r["arm"] == "none"
            rows.append([mode, r["arm"], f"{value:.2f} [{low:.2f}, {high:.2f}]", "" if unaligned else ratio])
    counts = "; ".join(
        f"{mode}: {rows[0]['tokens']:,} response tokens in {rows[0]['sequences']} sequences"
        for mode, rows in payload["modes"].items()
    )
    note = f"{counts}; {made_with(payload['versions'])}"
    return markdown(["vLLM", "trainer", "k3, 1e-4 nats per token", "ratio to unaligned, paired"], rows) + f"\n\n{note}."


def quickstart() -> str:
    """The quickstart's table."""
    module = load("recipes/quickstart/quickstart.py")
    payload = json.loads((ROOT / "recipes/quickstart/results/summary.json").read_text())
    rows = [module.cells(module.Summary(**arm)) for arm in payload["arms"]]
    note = f"{payload['device']}; {made_with(payload['versions'])}; {payload['seconds']} s for the three arms"
    return markdown(module.COLUMNS, rows) + f"\n\n{note}."


def overhead() -> str:
    """What alignment costs."""
    return "\n".join(load("recipes/overhead/readme_table.py").costs())


def alternatives() -> str:
    """What a user would pick instead: cost against gap."""
    return "\n".join(load("recipes/overhead/readme_table.py").alternatives("smollm2-135m"))


TABLES = {"gap": gap, "quickstart": quickstart, "overhead": overhead, "alternatives": alternatives}


def filled(text: str) -> str:
    """Return README text with every table renewed.

    Raises:
        ValueError: a table has no place in the text.
    """
    for name, table in TABLES.items():
        text = report.filled(text, name, table())
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md: measured tables differ from the JSON; run ci/readme.py" if after != before else 0)
    readme.write_text(after)
