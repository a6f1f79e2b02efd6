"""Contract of the README: it is short, its lists are the package's own, its Python runs as printed, the error that it shows is the
real one, and its links lead somewhere. Its tables and commands are checked with those of the other pages, in test_docs.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify
from tiny import tiny

from verl_rounding_align import parse_plan
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.plan import choices

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_it_has_at_most_1000_words_and_150_lines():
    counted = subprocess.run(["wc", "-w", ROOT / "README.md"], capture_output=True, text=True, check=True).stdout
    assert 500 < int(counted.split()[0]) <= 1000
    assert len(TEXT.splitlines()) <= 150


def test_it_has_one_picture_and_one_measured_table_of_four_rows():
    assert len(re.findall(r"!\[", TEXT)) == 1
    table = re.search(r"<!-- measured: .*? -->(.*?)<!-- end measured -->", TEXT, re.DOTALL)[1]
    assert len(re.findall(r"^\|", table, re.MULTILINE)) == 2 + 4
    assert len(re.findall(r"`bash recipes/", table)) == 4, "no figure without its command"


def test_values_and_families_are_the_packages():
    for value in choices():
        assert f"`{value}`" in TEXT, value
    assert ", ".join(FAMILIES) in TEXT


def test_the_error_shown_is_the_real_one():
    key = "actor_rollout_ref.actor.rounding_align"
    with pytest.raises(ValueError) as error:
        parse_plan("ropee", key=key)
    for page in (TEXT, (ROOT / "docs/pages/config.md").read_text()):
        assert f"ValueError: {error.value}" in " ".join(page.split())


def test_the_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    model = tiny("qwen3")
    exec(code, {"model": model})
    assert capsys.readouterr().out.startswith(
        "rounding_align: qwen3, 3 layers, rope 3 sites, hf_eager -> vllm_compiled"
    )
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def broken(text: str) -> list[str]:
    """Return the relative links of the README's text that lead to no file, or to no heading of it."""
    found = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        file = ROOT / (path or "README.md")
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if file.is_file() else []
        if not file.is_file() or (anchor and anchor not in {slugify(heading, "-") for heading in headings}):
            found.append(link)
    return found


def test_links_lead_to_files_and_headings():
    assert len(re.findall(r"\]\(docs/pages/", TEXT)) > 10
    assert broken(TEXT) == []
    wrong = "[a](docs/pages/faq.md#no-such-question) [b](docs/none.md) [c](docs/pages/faq.md)"
    assert broken(wrong) == ["docs/pages/faq.md#no-such-question", "docs/none.md"]
