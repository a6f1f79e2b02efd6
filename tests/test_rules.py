"""Contract of the tests themselves, read from their sources: each asserts something that can fail, tolerances are what they
say, and none sleeps. Where a module's test lies is in tests/README.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "verl_rounding_align"
FILES = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("*.py"))}
NEVER_FALSE = (ast.Tuple, ast.GeneratorExp, ast.Lambda)  # as a condition


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Whether ``node`` holds an assertion, an expected error, ranks that assert, or a call of one of ``helpers``."""
    for n in ast.walk(node):
        if isinstance(n, ast.Assert) or isinstance(n, ast.Call) and name_of(n) in {"raises", "spawn", *helpers}:
            return True
    return False


def asserting(functions: list[ast.FunctionDef]) -> set[str]:
    """Return the names of the functions that assert, also through one another."""
    found: set[str] = set()
    while more := {f.name for f in functions if asserts(f, found)} - found:
        found |= more
    return found


def faults(source: str) -> list[str]:
    """Return one line for each place in a test file's source that breaks a rule."""
    found, tree = [], ast.parse(source)
    helpers = asserting([n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)])
    for n in ast.walk(tree):
        at = f"line {getattr(n, 'lineno', 0)}: "
        if isinstance(n, ast.FunctionDef) and n.name.startswith("test_") and n.name not in helpers:
            found.append(f"{at}{n.name} asserts nothing")
        if isinstance(n, ast.Assert):
            terms = n.test.values if isinstance(n.test, ast.BoolOp) else [n.test]
            if any(isinstance(term, NEVER_FALSE) for term in terms):
                found.append(f"{at}a condition that is always true: {ast.unparse(n)}")
        if not isinstance(n, ast.Call):
            continue
        given = {k.arg: k.value for k in n.keywords}  # None: what ``**`` gives
        if name_of(n) == "approx" and "abs" not in given and "rel" in given:
            rel = given["rel"]
            if isinstance(rel, ast.Constant) and rel.value < 1e-6:
                found.append(f"{at}approx adds abs=1e-12, more than rel={rel.value} of small numbers; give abs")
        if name_of(n) in ("allclose", "isclose") and not ({"rtol", "atol"} <= given.keys() or None in given):
            found.append(f"{at}{name_of(n)} adds a tolerance of its own; give rtol and atol")
        if name_of(n) == "sleep":
            found.append(f"{at}sleeps")
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_test_file_keeps_the_rules(name):
    assert faults(FILES[name].read_text()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def test_a():\n    f()", "line 1: test_a asserts nothing"),
        ("def f():\n    pass\ndef test_a():\n    f()", "line 3: test_a asserts nothing"),
        ("assert (x == 1, 'x')", "line 1: a condition that is always true: assert (x == 1, 'x')"),
        ("assert y and (x for x in y)", "line 1: a condition that is always true: assert y and (x for x in y)"),
        ("approx(y, rel=1e-9)", "line 1: approx adds abs=1e-12, more than rel=1e-09 of small numbers; give abs"),
        ("torch.allclose(x, y, rtol=1e-6)", "line 1: allclose adds a tolerance of its own; give rtol and atol"),
        ("time.sleep(1)", "line 1: sleeps"),
    ],
)
def test_each_rule_sees_what_breaks_it(source, fault):
    assert faults(source) == [fault]


def test_a_source_without_faults_has_none():
    assert faults("def test_a():\n    assert f() == approx(1e-6, rel=1e-9, abs=0) and all(x for x in f())") == []
    assert faults("def f():\n    g()\ndef g():\n    assert x\ndef test_a():\n    f()") == []


# ---- where a test lies


README = (TESTS / "README.md").read_text()
ROOMS = sorted(p.stem for p in PACKAGE.iterdir() if p.name[0] != "_" and (p.suffix == ".py" or p.is_dir()))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_tests_under_its_name_or_the_readme_says_where(room):
    found = [*TESTS.glob(f"test_{room}.py"), *TESTS.glob(f"{room}/test_*.py")]
    assert found or f"| `verl_rounding_align/{room}" in README


def test_a_folder_of_tests_is_a_room_of_the_package():
    folders = {Path(name).parts[0] for name in FILES if "/" in name}
    assert folders - {"recipes"} <= set(ROOMS)


def test_every_recipe_that_has_tests_under_its_name_exists():
    recipes = {path.name for path in (TESTS.parent / "recipes").iterdir()}
    assert {path.stem.removeprefix("test_") for path in (TESTS / "recipes").glob("test_*.py")} <= recipes


def test_names_of_test_files_are_unique():
    names = [Path(name).name for name in FILES if Path(name).name != "conftest.py"]
    assert len(names) == len(set(names))


def test_what_the_readme_names_exists():
    named = set(re.findall(r"`((?:tests|verl_rounding_align|ci)/[\w./]*)`", README))
    assert len(named) > 30 and [name for name in sorted(named) if not (TESTS.parent / name).exists()] == []
