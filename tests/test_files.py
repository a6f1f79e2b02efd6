"""Contract of reading what users give: whatever is wrong with a file is one sentence that names the option and the file, in
the command line too, with exit code 2; what is right is read as it is."""

from __future__ import annotations

import re
import sys

import pytest

from verl_rounding_align import cli
from verl_rounding_align.files import read_json, read_yaml, select

BROKEN = {  # text -> what is said of it
    b"a: [1\n": "not YAML: line 2, column 1: expected ',' or ']', but got '<stream end>'",
    b"a: b: c\n": "not YAML: line 1, column 5: mapping values are not allowed here",
    b"a: 1\na: 2\n": "not YAML: line 2, column 1: found duplicate key a",
    b"a: !!python/object:os.system x\n": "not YAML: line 1, column 4: could not determine a constructor for the tag "
    "'tag:yaml.org,2002:python/object:os.system'",
    b"a: ${\n": "not YAML: no viable alternative at input '${'",
    b"a: \x00\n": "not YAML: unacceptable character #x0000: special characters are not allowed",
    b"\xff\xfe\xfa": "cannot be read: not UTF-8",
    b"- 1\n": "expected a mapping at its root",
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("text", BROKEN, ids=[repr(text) for text in BROKEN])
def test_broken_yaml_is_one_sentence_that_says_where(file, text):
    file.write_bytes(text)
    with pytest.raises(ValueError) as error:
        read_yaml(file, "config")
    assert str(error.value) == f"config={str(file)!r}: {BROKEN[text]}"


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    for path, why in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError) as error:
            read_yaml(path, "rollout-config")
        assert str(error.value) == f"rollout-config={str(path)!r}: cannot be read: {why}"


def test_yaml_is_read_and_interpolations_stay(file):
    file.write_text("a: {b: 1e-6, c: '${a.d}'}\n")
    found = read_yaml(file, "config")
    assert found.a.b == 1e-6 and found._get_node("a")._get_node("c")._value() == "${a.d}"


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: [1]\n", "Index 'b' (str) is not an int"), ("a: {b: '${c}'}\n", "Interpolation key 'c' not found")],
)
def test_a_key_that_cannot_be_followed_is_one_sentence(file, text, why):
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        select(read_yaml(file, "config"), "a.b", file, "config")
    assert str(error.value) == f"config={str(file)!r}: a.b: {why}"


def test_what_a_key_holds_is_plain_and_what_is_not_there_is_none(file):
    file.write_text("a: {b: {c: '${d}'}}\nd: 2\n")
    config = read_yaml(file, "config")
    found = select(config, "a.b", file, "config")
    assert type(found) is dict and found == {"c": 2}
    assert select(config, "a.x.y", file, "config") is None


PLAN = ("plan", "--model", "m", "--rollout-config")
COMMANDS = {  # which reads what: the key and then the rollout, or the rollout alone
    "triage --config": ("config", lambda file: ["triage", "--config", file]),
    "plan --rollout-config": ("rollout-config", lambda file: [*PLAN, file]),
    "plan --regions --rollout-config": ("rollout-config", lambda file: [*PLAN, file, "--regions", "rope"]),
}


def ended(command, file, capsys, monkeypatch) -> str:
    """Return what a command says on standard error when it has ended with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["verl-rounding-align", *COMMANDS[command][1](str(file))])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("text", BROKEN, ids=[repr(text) for text in BROKEN])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_that_sentence_and_exit_code_2(file, text, command, capsys, monkeypatch):
    file.write_bytes(text)
    said = f"error: {COMMANDS[command][0]}={str(file)!r}: {BROKEN[text]}\n"
    assert ended(command, file, capsys, monkeypatch) == said


@pytest.mark.parametrize(("command", "key"), [
    ("plan --rollout-config", "actor_rollout_ref.actor.rounding_align"),
    ("plan --regions --rollout-config", "actor_rollout_ref.rollout"),
])  # fmt: skip
def test_a_list_where_a_section_should_be_is_one_sentence_of_plan(file, command, key, capsys, monkeypatch):
    file.write_text("actor_rollout_ref: [1]\n")
    wrong = key.split(".")[1]
    assert ended(command, file, capsys, monkeypatch) == (
        f"error: rollout-config={str(file)!r}: {key}: Index '{wrong}' (str) is not an int\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1', r"not JSON: .+ line 1 column \d+ \(char \d\)"),
        (b"\xff", "not JSON: .*can't decode byte 0xff in position 0.*"),
        (b"[1]", "expected a JSON object, got list"),
    ],
)
def test_broken_json_is_one_sentence(tmp_path, text, said):
    (tmp_path / "f.json").write_bytes(text)
    with pytest.raises(ValueError) as error:
        read_json(tmp_path / "f.json")
    assert re.fullmatch(f"{re.escape(str(tmp_path / 'f.json'))}: {said}", str(error.value))


def test_json_is_read_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "f.json").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "f.json") == {"a": [1, None]}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "g.json")
