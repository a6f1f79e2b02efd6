"""Contract of the pages: whatever a table or a note holds is shown as text in both pages, pictures are part of the HTML page,
and a file that no tool has written is one sentence that names it and the command to run."""

from __future__ import annotations

import html
import json
import re

import pytest

from verl_rounding_align.report import pages
from verl_rounding_align.report.rows import Figure, Section

NASTY = '<b>&amp; {{ 1 + 1 }} {% raw %} "it\'s"'


def written(tmp_path, *sections):
    paths = pages.write_pages(tmp_path, "page", NASTY, sections, {"torch": "2", "a": "1"})
    assert [path.name for path in paths] == ["page.md", "page.html"]
    return [path.read_text() for path in paths]


def test_what_a_section_holds_is_text_in_both_pages(tmp_path):
    text, page = written(tmp_path, Section(NASTY, ("a", NASTY), [(1, NASTY), (2, "x")], NASTY))
    assert page.count(html.escape(NASTY).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")) == 6  # title twice
    assert NASTY not in page and "<b>" not in page and text.count(NASTY) == 5
    assert re.findall(r"<td>(\d|x)</td>", page) == ["1", "2", "x"]
    assert text.endswith("\n\nMade with a 1, torch 2.\n") and "<p>Made with a 1, torch 2.</p>" in page


def test_a_section_without_rows_or_note_has_no_empty_table_or_paragraph(tmp_path):
    text, page = written(tmp_path, Section("bare"))
    assert text == f"# {NASTY}\n\n## bare\n\nMade with a 1, torch 2.\n"
    assert "<table" not in page and page.count("<p>") == 1


def test_a_picture_is_a_file_beside_the_markdown_and_inside_the_html(tmp_path):
    text, page = written(tmp_path, Section("s", figures=[Figure("f", NASTY, "<svg>é</svg>")]))
    assert (tmp_path / "page.f.svg").read_text() == "<svg>é</svg>"
    assert f"![{NASTY}](page.f.svg)" in text
    assert 'src="data:image/svg+xml;base64,PHN2Zz7DqTwvc3ZnPg=="' in page and "<svg>" not in page


FINDING = {"cause": "c", "confidence": "likely", "evidence": "e", "next_step": "n"}
WHOLE = {"schema_version": 1, "findings": [FINDING], "versions": {}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "expected a JSON object, got list"),
        ('{"schema_version": 0}', "schema version 0, this release reads 1; make it anew"),
        (
            json.dumps({"schema_version": 1}),
            "not as `verl-rounding-align triage` writes it (KeyError: 'findings'); make it anew",
        ),
        (
            json.dumps({**WHOLE, "findings": [[]]}),
            "not as `verl-rounding-align triage` writes it (TypeError: list indices must be integers or slices, not str); "
            "make it anew",
        ),
    ],
)
def test_a_file_that_no_tool_has_written_is_one_sentence(tmp_path, text, said):
    (tmp_path / "triage.json").write_text(text)
    with pytest.raises(ValueError) as error:
        pages.sections(tmp_path)
    assert str(error.value) == f"{tmp_path / 'triage.json'}: {said}"
    (tmp_path / "triage.json").write_text(json.dumps(WHOLE))
    assert [section.rows for section in pages.sections(tmp_path)] == [[("c", "likely", "e", "n")]]
