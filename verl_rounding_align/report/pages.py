"""The report of a folder: what ``gap``, ``attribute``, ``landing`` and ``triage`` have written into it, as one Markdown page
and one HTML page. A section of the report is made from JSON alone; ``PARTS`` has one row for each file."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from ..files import read_json
from ..logprobs.tally import BATCHED, VERSION
from . import pictures
from . import rows as report
from .rows import Section

UNIT = "1e-4 nats per token"


def interval(x, scale: float = 1.0) -> str:
    """Return an interval as text, with as many digits as two of its width; without bounds where there are none.

    >>> interval((0.51234, 0.4, 0.6), 10), interval((0.5, None, None)), interval((1, 1, 1)), interval((1e-7, 9e-8, 2e-7))
    ('5.1 [4.0, 6.0]', '0.5', '1', '0.00000010 [0.00000009, 0.00000020]')
    """
    if x is None or x[0] is None or x[0] != x[0]:
        return ""
    value, low, high = (None if v is None or v != v else v * scale for v in x)
    if low is None or high is None or low == high:
        return f"{value:.3g}"
    digits = min(9, max(0, 1 - math.floor(math.log10(high - low))))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def gap_table(rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return (columns, cells) of gap rows."""
    columns = (
        "arm", "k1", "its change, paired", "k3", "its change, paired", "k3 ratio, paired", "mean |d|", "its change, paired",
        "max |d|", "tokens",
    )  # fmt: skip
    cells = []
    for r in rows:
        other = r["arm"] != "none"
        change = {
            n: interval(r.get(f"{n}_change"), 1e4) if other and r["kind"] == "gap" else "" for n in ("k1", "k3", "abs")
        }
        cells.append(
            (
                r["arm"],
                interval(r["k1"], 1e4),
                change["k1"],
                interval(r["k3"], 1e4),
                change["k3"],
                interval(r["k3_ratio"]) if other else "",
                interval(r["abs_mean"], 1e4),
                change["abs"],
                f"{1e4 * r['abs_max']:.3g}",
                f"{r['tokens']:,}",
            )
        )
    return columns, cells


def _laid_out(m: Mapping) -> str:
    """Return what a title says of the layout of a mode's scores: nothing if it is the one that is not asked for."""
    layout = m.get("layout", BATCHED)
    return "" if layout == BATCHED else f", trainer {layout}"


def two_by_two(modes: Mapping) -> Section | None:
    """Return engine compiled or eager against trainer unaligned or aligned, where both engines were measured."""
    if len(modes) < 2 or not all(any(r["arm"] == "all" for r in m["rows"]) and m["crossed"] for m in modes.values()):
        return None
    presets, cells = {mode: found["preset"] for mode, found in modes.items()}, []
    for mode, found in modes.items():
        rows = {NONE_ROW: found["rows"][0]}
        rows |= {r["engine"]: r for r in (*found["rows"], *found["crossed"]) if r["arm"] == "all"}
        at = [rows[NONE_ROW], *(rows[preset] for preset in presets.values())]
        cells.append((mode, *(interval(r["k3"], 1e4) for r in at)))
    return Section(
        f"Two by two: which engine, which trainer{_laid_out(next(iter(modes.values())))}",
        ("vLLM", "trainer unaligned", *(f"trainer aligned to {mode}" for mode in presets)),
        cells,
        f"k3, {UNIT}, 95 % intervals. Aligned: every group for which there is evidence. A trainer aligned to the other engine "
        "is the control.",
    )


NONE_ROW = "none"


def _gap_sections(found: Mapping) -> list[Section]:
    out = []
    table = two_by_two(found["modes"])
    if table:
        out.append(table)
    for mode, m in found["modes"].items():
        gaps = [r for r in m["rows"] if r["kind"] == "gap"]
        floors = [r for r in m["rows"] if r["kind"] == "floor"]
        title = f"vLLM {mode}, aligned to {m['preset']}{_laid_out(m)}"
        count = f"{gaps[0]['tokens']:,} tokens in {gaps[0]['sequences']} sequences"
        columns, cells = gap_table(gaps)
        order = [r["arm"] for r in m["rows"]]
        drawn = dict(sorted(m["pictures"].items(), key=lambda item: order.index(item[0])))
        curves = {arm: p["positions"] for arm, p in drawn.items() if p["positions"]}
        figures = [pictures.gap_by_arm([*gaps, *floors], title)]
        figures += [pictures.by_position(curves, title)] if curves else []
        figures += [pictures.by_size({arm: p["sizes"] for arm, p in drawn.items()}, title)]
        renamed = [report.Figure(f"{f.name}_{mode}", f.alt, f.svg) for f in figures]
        note = (
            f"{UNIT} ({count}); 95 % intervals, bootstrap-t over sequences. d = engine minus trainer log-prob; "
            "k1 = mean d, k3 = mean(exp(-d) + d - 1); change and ratio are to the unaligned trainer on the same tokens. "
            "The largest |d| has no interval: a drawn sample's is never larger."
        )
        hot = m["rollouts"].get("temperature", 1.0)
        if hot != 1.0:
            note += (
                f" Sampled at temperature {hot}, log-probs of the unscaled logits: k1 and k3 weigh tokens as they were "
                "sampled, and are no estimates of a KL divergence."
            )
        out.append(Section(f"Gap: {title}", columns, cells, note, renamed))
        if floors:
            columns, cells = gap_table(floors)
            keep = [i for i, c in enumerate(columns) if c != "its change, paired"]
            out.append(
                Section(
                    f"Noise floor: vLLM {mode}{_laid_out(m)}",
                    [columns[i] if columns[i] != "k3 ratio, paired" else "k3, of the unaligned gap" for i in keep],
                    [[row[i] for i in keep] for row in cells],
                    "One side against itself, nothing changed but how sequences are batched. Alignment cannot be expected to go "
                    "below. Sampled anew, the engine's variants are compared up to the first token that differs.",
                )
            )
        if m["exact"]:
            out.append(exact_section(f"{mode}{_laid_out(m)}", m["exact"]))
        who = f"{_laid_out(m)}, " if _laid_out(m) else ", trainer "
        out.append(triage(f"Triage: vLLM {mode}{who}unaligned", m["triage"]))
    return out


def exact_section(mode: str, rows) -> Section:
    """Return the section of exact divergences."""

    def width(x) -> float | None:
        return None if x[1] is None else x[2] - x[1]

    cells = []
    for r in rows:
        widths = [width(r[name]) for name in ("kl", "k3", "k1")]
        times = ["" if None in (w, widths[0]) or not widths[0] else f"{w / widths[0]:.1f}x" for w in widths[1:]]
        cells.append(
            (
                r["arm"],
                interval(r["kl"], 1e4),
                interval(r["kl_ratio"]) if r["arm"] != "none" else "",
                interval(r["kl_reverse"], 1e4),
                interval(r["total_variation"], 1e4),
                interval(r["k3"], 1e4),
                interval(r["k1"], 1e4),
                *times,
            )
        )
    columns = ("arm", "exact KL", "ratio, paired", "reverse KL", "total variation, 1e-4", "k3 there", "k1 there")
    return Section(
        f"Exact KL: vLLM {mode}",
        (*columns, "k3's interval", "k1's interval"),
        cells,
        f"Whole next-token distributions at {rows[0]['positions']} positions spread over all responses; {UNIT}. The last two "
        "columns: how many times wider the sampled estimates' intervals are at the same positions. The engine's "
        "distributions are computed with the tokens before given as a prompt.",
    )


def triage(title: str, findings) -> Section:
    """Return the section of triage findings."""
    columns = ("cause", "confidence", "evidence", "next step")
    return Section(title, columns, [tuple(f[name.replace(" ", "_")] for name in columns) for f in findings])


def attribution(found: Mapping) -> list[Section]:
    """Return a section per mode of ``attribution.json``."""
    out = []
    for mode, m in found["modes"].items():
        title = f"Attribution: {mode}, {m['preset']}{_laid_out(m)}"

        def cells(name: str, row: Mapping) -> tuple[str, str, str]:
            share = "" if row["share"] is None else f"{row['share']:.0f} %"
            return name, interval(row["value"], 1e4), share

        lines = [cells(row["players"][0], row) for row in m["players"]]
        lines.append(cells("all of them", m["whole"]))
        lines += [cells(" with ".join(row["players"]), row) for row in m["interactions"]]
        clear = m["players"][0]["share"] is not None
        note = f"{m['tokens']:,} tokens in {m['sequences']} sequences; Shapley values, exact; they sum to the whole."
        note += "" if clear else " No shares: the interval of the whole includes zero."
        figure = pictures.shapley(m, title)
        out.append(
            Section(
                title,
                ("player, or two players' interaction", f"reduction of k3, {UNIT}", "share"),
                lines,
                note,
                [report.Figure(f"shapley_{mode}", figure.alt, figure.svg)],
            )
        )
    return out


def dump(payload: Mapping) -> list[Section]:
    """Return the section of a dump's summary, ``score.json``."""
    row, title = payload["row"], "Mismatch of the dump"
    columns, cells = gap_table([row])
    keep = [i for i, c in enumerate(columns) if "paired" not in c]
    note = f"{row['tokens']:,} tokens in {row['sequences']} sequences; {UNIT}, 95 % intervals; "
    note += f"{payload['masked']:,} tokens masked, {payload['nonfinite']:,} without two finite log-probs"
    name = payload["source"]
    figures = [pictures.by_size({name: payload["sizes"]}, title)]
    figures += [pictures.by_position({name: payload["positions"]}, title)] if payload["positions"] else []
    return [Section(title, [columns[i] for i in keep], [[c[i] for i in keep] for c in cells], note, figures)]


def landing(found: Mapping) -> list[Section]:
    """Return the section of ``landing.json``."""
    cells = []
    for r in found["rows"]:
        low, high = min(r["scores"]), max(r["scores"])
        stored = r["point"]
        cells.append((r["quantity"], stored, f"{r['score']:.2g}", f"{low:.2g} to {high:.2g}", f"{r['floor']:.2g}"))
    kinds = {}
    for r in found["rows"]:  # one quantity of each kind, the widest spread of them
        kinds[r["kind"]] = max(r, kinds.get(r["kind"], r), key=lambda x: x["score"])
    histograms = {f"{r['quantity']}, layer {r['pictured']}": r["histogram"] for r in kinds.values()}
    note = (
        f"{found['tokens']:,} tokens of {found['text']} in windows of {found['window']}. 0: values land evenly between two "
        "neighbouring bf16 numbers, 1: all on one spot. The floor is what as many independent, even values would score."
    )
    title = "Landing score: how unevenly values land before they are rounded"
    columns = ("quantity", "stored by", "score, median layer", "lowest to highest layer", "floor")
    return [Section(title, columns, cells, note, [pictures.landing(histograms, "Where values land")])]


# file in the folder -> (the command that writes it, what makes its sections)
PARTS = {
    "gap.json": ("gap", _gap_sections),
    "attribution.json": ("attribute", attribution),
    "score.json": ("gap score", dump),
    "landing.json": ("landing", landing),
    "triage.json": ("triage", lambda found: [triage("Triage", found["findings"])]),
}


def _found(folder: Path) -> dict[str, dict]:
    """Return file's name -> what it holds.

    Raises:
        ValueError: none of ``PARTS`` is in the folder, or one is not JSON, or of another schema version.
    """
    found = {name: read_json(folder / name) for name in PARTS if (folder / name).exists()}
    if not found:
        raise ValueError(f"{folder}: no {', '.join(PARTS)}; run `verl-rounding-align gap --out {folder} ...`")
    for name, payload in found.items():
        if payload.get("schema_version") != VERSION:
            raise ValueError(
                f"{folder / name}: schema version {payload.get('schema_version')}, this release reads {VERSION}; make it anew"
            )
    return found


def sections(folder: Path) -> list[Section]:
    """Return the sections of everything that the tools have written into a folder.

    Raises:
        ValueError: there is nothing in it, or a file is broken, or of another schema version.
    """
    return [section for name, payload in _found(folder).items() for section in _sections(folder / name, payload)]


def _sections(file: Path, payload: Mapping) -> list[Section]:
    """Return the sections of one file."""
    command, make = PARTS[file.name]
    try:
        return make(payload)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{file}: not as `verl-rounding-align {command}` writes it ({type(error).__name__}: {error}); make it anew"
        ) from error


def _made(found: Mapping[str, dict]) -> dict[str, str]:
    """Return package -> version; where the files of a folder differ, each version with the files that it made.

    >>> _made({"a.json": {"versions": {"torch": "1", "vllm": "2"}}, "b.json": {"versions": {"torch": "3", "vllm": "2"}}})
    {'torch': '1 (a.json) and 3 (b.json)', 'vllm': '2'}
    """
    of: dict[str, dict[str, list[str]]] = {}
    for file, payload in found.items():
        for package, version in payload.get("versions", {}).items():
            of.setdefault(package, {}).setdefault(version, []).append(file)
    return {
        package: " and ".join(v if len(made) == len(found) else f"{v} ({', '.join(made)})" for v, made in by.items())
        for package, by in of.items()
    }


def write(folder: Path) -> list[Path]:
    """Write ``report.md`` with its pictures, and ``report.html``, into the folder; return the paths of both pages.

    The title names the model or the dump, and the folder where no file says which.

    Raises:
        ValueError: see :func:`sections`.
    """
    found = _found(folder)
    names = [payload.get("model") or payload.get("source") for payload in found.values()]
    name = next(filter(None, names), folder.resolve().name)
    title = f"{name}: where the trainer's log-probs differ from the engine's"
    return write_pages(folder, "report", title, sections(folder), _made(found))


def write_pages(
    folder: Path, name: str, title: str, sections: Sequence[Section], made: Mapping[str, str]
) -> list[Path]:
    """Write ``NAME.md`` with its pictures beside it, and ``NAME.html``, which needs no other file; return both paths.

    Args:
        made: package -> version that the figures were made with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_with = ", ".join(f"{k} {v}" for k, v in sorted(made.items()))
    for figure in (figure for section in sections for figure in section.figures):
        (folder / f"{name}.{figure.name}.svg").write_text(figure.svg)
    paths = [folder / f"{name}.md", folder / f"{name}.html"]
    paths[0].write_text(_markdown_page(name, title, sections, made_with))
    paths[1].write_text(_html_page(title, sections, made_with))
    return paths


def _markdown_page(name: str, title: str, sections: Sequence[Section], made_with: str) -> str:
    text = [f"# {title}"]
    for section in sections:
        text.append(f"## {section.title}")
        text += [report.markdown(section.columns, section.rows)] if section.rows else []
        text += [section.note] if section.note else []
        text += [f"![{figure.alt}]({name}.{figure.name}.svg)" for figure in section.figures]
    return "\n\n".join([*text, f"Made with {made_with}."]) + "\n"


def _html_page(title: str, sections: Sequence[Section], made_with: str) -> str:
    """Return ``page.html`` filled in; everything that is put into it is escaped, pictures are part of the page."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["base64"] = lambda text: base64.b64encode(text.encode()).decode()
    template = environment.from_string((resources.files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.render(title=title, sections=sections, made_with=made_with)
