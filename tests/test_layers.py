"""Contract of the tree: rooms import downward only, frameworks are imported in their own rooms only, no module but a table is
longer than 600 lines, and the package's docstring names every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import verl_rounding_align

PACKAGE = Path(verl_rounding_align.__file__).parent
NAME = PACKAGE.name
# from the ground up; rooms of one line may import each other
LAYERS = (
    {"rounding", "formats", "backend", "regions", "families", "postimport", "releases", "files"},
    {"engines"},
    {"plan"},
    {"trainers"},
    {"monitor", "logprobs", "report"},
    {"gap", "triage", "overhead", "landing"},
    {"integrations"},
    {"cli"},
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
# framework -> rooms that may import it, anywhere in a file
FRAMEWORKS = {
    "vllm": ("engines/vllm",),
    "verl": ("integrations/verl",),
    "ray": ("integrations/verl",),
    "sglang": (),
    "openrlhf": (),
    "trl": (),
    "deepspeed": (),
    "megatron": (),
}
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if "hydra_plugins" not in file.parts]
TABLES = {"engines/presets.py", "triage/causes.py"}  # may be long


def imports(file: Path) -> list[tuple[int, str]]:
    """Return (line, absolute dotted name) of everything that a file imports, at its top or in a function."""
    package = list(file.relative_to(PACKAGE.parent).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def room(name: str) -> str | None:
    """Return the room that a dotted name of the package lies in, None for the package itself and what is not its own."""
    parts = name.split(".")
    return parts[1] if parts[0] == NAME and len(parts) > 1 and parts[1] in RANK else None


def test_every_module_has_a_layer():
    rooms = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert rooms - {"__init__", "__main__"} == set(RANK)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_rooms_import_downward_only_and_frameworks_stay_in_their_rooms(file):
    path = file.relative_to(PACKAGE)
    own = path.parts[0].removesuffix(".py")
    for line, name in imports(file):
        if own in RANK and room(name) is not None:
            assert RANK[room(name)] <= RANK[own], f"{path}:{line} imports {name}, which lies above it"
        framework = name.split(".")[0]
        if framework in FRAMEWORKS:
            assert path.as_posix().startswith(FRAMEWORKS[framework] or "-"), f"{path}:{line} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_is_longer_than_600_lines(file):
    lines = len(file.read_text().splitlines())
    assert lines <= 600 or file.relative_to(PACKAGE).as_posix() in TABLES, f"{lines} lines"


def test_the_packages_docstring_names_every_room():
    named = verl_rounding_align.__doc__
    missing = [name for name in RANK if f"{name}.py" not in named and f"{name}/" not in named]
    assert missing == []


def test_a_room_that_imports_upward_would_be_found():
    """Negative control of the reader of imports."""
    found = {name for _, name in imports(PACKAGE / "trainers" / "huggingface.py")}
    assert {f"{NAME}.plan.parse_plan", f"{NAME}.trainers.checks", "transformers"} <= found
    assert room(f"{NAME}.plan.parse_plan") == "plan" and RANK["cli"] > RANK["regions"]
