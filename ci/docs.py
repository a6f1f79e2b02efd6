"""Write the tables of README.md and docs/pages, and the README's picture: `python ci/docs.py`; --check: fail if they differ.

A table stands between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->``. Measured tables come from the JSON that the
recipes' commands wrote, reference tables from the package's own tables (``docs_tables.py``), examples from a test.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import docs_tables

from verl_rounding_align.report import pages as gap_report
from verl_rounding_align.report import rows as report
from verl_rounding_align.report.pages import interval

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/pages"
PICTURE = PAGES / "img/gap.svg"
PLACE = re.compile(r"^<!-- ([\w ]+): ", re.MULTILINE)


def load(path: str):
    """Return a recipe's script as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def results(path: str) -> dict:
    """Return what a recipe has kept: ``RECIPE/NAME``."""
    recipe, _, name = path.partition("/")
    return json.loads((ROOT / "recipes" / recipe / "results" / f"{name}.json").read_text())


def made_with(versions: Mapping) -> str:
    """Return the versions that a result depends on, in words."""
    names = ("vllm", "torch", "transformers", "verl")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


# ---- tables of measured results

ARMS = ("none", "rope", "swiglu", "add_rms_norm", "carry", "paper", "all")


def measured() -> str:
    """The README's table: four results, each with its command."""
    gap, collapse = results("smollm2_gap/gap"), load("recipes/collapse/table.py")
    rows = []
    for mode in ("compiled", "eager"):
        arms = {r["arm"]: r for r in gap["modes"][mode]["rows"]}
        none, every = arms["none"], arms["all"]
        rows.append([
            f"gap to {mode} vLLM, SmolLM2-135M: k3, 1e-4 nats per token", interval(none["k3"], 1e4),
            interval(every["k3"], 1e4), f"ratio {interval(every['k3_ratio'])}", "`bash recipes/smollm2_gap/run.sh`",
        ])  # fmt: skip
    (cost,) = [r for r in results("overhead/targets-smollm2-135m")["rows"] if r["arm"] == "all"]
    rows.append([
        "forward and backward, SmolLM2-135M, one CPU thread", "1",
        f"time {cost['timing']['low']:.3f} to {cost['timing']['high']:.3f}, memory kept {cost['saved_ratio']:.2f}",
        "no difference in time was seen", "`bash recipes/overhead/run.sh`",
    ])  # fmt: skip
    arms = dict(line.split(" | ", 1) for line in collapse.summary().replace("| ", "", 1).splitlines()[2:])
    found = {arm.removeprefix("| "): rest.split(" | ")[4].partition(" [") for arm, rest in arms.items()}
    rows.append([
        "collapsed runs, tiny Qwen3 stored with 3 significant bits, 2,000 steps", found["none"][0], found["all"][0],
        f"95 %: [{found['none'][2]}, [{found['all'][2]}", "`bash recipes/collapse/run.sh`",
    ])  # fmt: skip
    columns = ["measured on a CPU, 95 % intervals", "unaligned", "`all`", "comparison", "command"]
    return report.markdown(columns, rows) + f"\n\n{made_with(gap['versions'])}."


def gap() -> str:
    """The gap on pretrained weights, in units of 1e-4 nats per token, each mode's floors below."""
    return gaps("gap")


def packed() -> str:
    """The same with packed sequences."""
    return gaps("packed")


def gaps(name: str) -> str:
    """The table of one report of the SmolLM2 recipe."""
    payload = results(f"smollm2_gap/{name}")
    rows = []
    for mode, found in payload["modes"].items():
        for r in found["rows"]:
            if r["arm"] in ARMS or (r["kind"] == "floor" and name == "gap"):
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
    section = gap_report.two_by_two(results("smollm2_gap/gap")["modes"])
    return report.markdown(section.columns, section.rows)


def attribution() -> str:
    """Which group closes how much."""
    payload = results("smollm2_gap/attribution")
    section = gap_report.attribution({"modes": {"compiled": payload["modes"]["compiled"]}})[0]
    return report.markdown(section.columns, section.rows) + f"\n\n{section.note}"


def exact() -> str:
    """The divergence over the whole vocabulary, compiled engine."""
    rows = [r for r in results("smollm2_gap/gap")["modes"]["compiled"]["exact"] if r["arm"] in ARMS]
    section = gap_report.exact_section("compiled", rows)
    return report.markdown(section.columns, section.rows) + f"\n\n{section.note}"


def quickstart() -> str:
    """The quickstart's table."""
    module, payload = load("recipes/quickstart/quickstart.py"), results("quickstart/summary")
    rows = [module.cells(module.Summary(**arm)) for arm in payload["arms"]]
    note = f"{payload['device']}; {made_with(payload['versions'])}; {payload['seconds']} s for the three arms"
    return report.markdown(module.COLUMNS, rows) + f"\n\n{note}."


def collapse() -> str:
    """Training with coarse storage, every arm."""
    return load("recipes/collapse/table.py").summary()


def overhead() -> str:
    """What alignment costs."""
    return "\n".join(load("recipes/overhead/readme_table.py").costs())


def shares() -> str:
    """Where the time of a pass goes."""
    return "\n".join(load("recipes/overhead/readme_table.py").shares())


def alternatives() -> str:
    """What a user would pick instead: cost against gap."""
    return "\n".join(load("recipes/overhead/readme_table.py").alternatives("smollm2-135m"))


def once() -> str:
    """What is paid once in a run or once in a step: the first compilation, the metrics."""
    compiled, metric = results("overhead/first_compile"), results("overhead/metric_cost")
    rows = [
        [
            f"first compilation of every region, {r['workers']} worker{'s' * (r['workers'] > 1)}, cache {r['cache']}",
            f"{r['seconds']} s",
            "`python recipes/overhead/first_compile.py`",
        ]
        for r in compiled["rows"]
    ]
    seconds = sorted(metric["seconds"])
    rows.append([
        f"mismatch metrics of {metric['tokens']:,} tokens, {metric['threads']} thread",
        f"{1e3 * seconds[len(seconds) // 2]:.0f} ms ({1e3 * seconds[0]:.0f} to {1e3 * seconds[-1]:.0f})",
        "`python recipes/overhead/metric_cost.py`",
    ])  # fmt: skip
    note = f"CPU, {compiled['cores']} cores; median, lowest and highest of {len(seconds)}; {made_with(compiled['versions'])}."
    return report.markdown(["paid once", "time", "command"], rows) + f"\n\n{note}"


MEASURED: dict[str, Callable[[], str]] = {
    "measured": measured,
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
    "once": once,
}


def example(what: str) -> str:
    """Return the source of a function of tests/test_rooms.py, which a test runs: how to add something from outside."""
    source = (ROOT / "tests/test_rooms.py").read_text()
    (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == f"add_{what}"]
    return f"```python\n{ast.get_source_segment(source, found)}\n```"


EXAMPLES: dict[str, Callable[[], str]] = {
    f"example {what}": functools.partial(example, what) for what in ("region", "family", "engine", "framework")
}


# ---- the picture


def picture() -> str:
    """Return the SVG of the gap before and after alignment, with intervals, for a compiled and an eager engine."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    payload = results("smollm2_gap/gap")
    arms = {"none": "unaligned", "rope": "rope", "paper": "paper", "all": "all"}
    floor = "trainer against itself, one sequence at a time"
    colours = {"none": "#d97742", floor: "#b5b5b5"}
    figure = Figure(figsize=(8.6, 2.9), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, sharex=True)
    for ax, (mode, found) in zip(axes, payload["modes"].items(), strict=True):
        rows = {r["arm"]: r for r in found["rows"]}
        for y, arm in enumerate([*arms, floor]):
            value, low, high = (1e4 * x for x in rows[arm]["k3"])
            ax.barh(y, value, color=colours.get(arm, "#2f8f83"), height=0.66)
            ax.plot([low, high], [y, y], color="#222222", linewidth=1.4)
            ratio = "" if arm in colours else f" ({rows[arm]['k3_ratio'][0]:.2f})"
            ax.annotate(f"{value:.1f}{ratio}", (max(high, value) + 0.6, y), va="center", fontsize=9)
        ax.set_title(f"against {mode} vLLM", loc="left", fontsize=10.5, fontweight="bold")
        ax.set_xlim(0, 26)
        ax.set_xticks(range(0, 21, 5))
        ax.set_yticks(range(5), [*arms.values(), "trainer's own noise"], fontsize=9.5)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.tick_params(axis="x", labelsize=8.5)
    axes[1].set_yticklabels([])
    figure.supxlabel(
        "k3, 1e-4 nats per token (line: 95 % interval; in brackets: ratio to unaligned). SmolLM2-135M on a CPU",
        fontsize=9,
    )
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "verl-rounding-align", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def words(svg: str) -> list[str]:
    """Return the texts of a picture; the rest of an SVG differs with the release of matplotlib that draws it."""
    return re.findall(r">([^<>]+)</text>", svg)


# ---- pages


def pages() -> list[Path]:
    """Return the files that hold tables."""
    return [ROOT / "README.md", *sorted(PAGES.rglob("*.md"))]


def named(text: str) -> list[str]:
    """Return the names of the places that a page has.

    >>> named("<!-- gap: from x -->\\n<!-- end gap -->")
    ['gap']
    """
    return PLACE.findall(text)


def filled(text: str, made: Callable[[str], str]) -> str:
    """Return a page with every table renewed.

    Args:
        text: the page.
        made: name -> table.

    Raises:
        ValueError: a place that does not end, or a name that is no table's.
    """
    for name in named(text):
        text = report.filled(text, name, made(name))
    return text


def files() -> Iterator[tuple[Path, str]]:
    """Yield every page with its tables renewed.

    Raises:
        ValueError: a place names no table, or a table has no place.
    """
    reference = {name: functools.partial(str, text) for name, text in docs_tables.tables().items()}
    every, known = {**reference, **MEASURED, **EXAMPLES}, {}

    def made(name: str) -> str:
        if name not in every:
            raise ValueError(f"no table {name!r}; choose from {', '.join(every)}")
        if name not in known:
            known[name] = every[name]()
        return known[name]

    for page in pages():
        try:
            yield page, filled(page.read_text(), made)
        except ValueError as error:
            raise ValueError(f"{page.relative_to(ROOT)}: {error}") from error
    unused = [name for name in every if name not in known]
    if unused:
        raise ValueError(f"tables without a place in README.md or docs/pages: {', '.join(unused)}")


def stale() -> list[str]:
    """Return the files that differ from what the results and the package's tables give."""
    found = [str(page.relative_to(ROOT)) for page, text in files() if page.read_text() != text]
    if not PICTURE.exists() or words(PICTURE.read_text()) != words(picture()):
        found.append(str(PICTURE.relative_to(ROOT)))
    return found


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        found = stale()
        sys.exit(f"{', '.join(found)}: differ from results or tables; run python ci/docs.py" if found else 0)
    for page, text in files():
        page.write_text(text)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
