"""Contract of the README: its measured tables come from the JSON in the repository, its lists are the package's own, its
commands and its Python run as printed, and the error that it shows is the real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny, verified
from typer.main import get_command

from verl_rounding_align import cli, parse_plan
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.plan import choices

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_measured_tables_come_from_the_json():
    assert subprocess.run([sys.executable, "ci/readme.py", "--check"], cwd=ROOT).returncode == 0


def test_a_changed_figure_would_be_noticed():
    sys.path.insert(0, str(ROOT / "ci"))
    import readme

    changed = re.sub(r"(\| none \| )(\d)", lambda m: m[1] + str(9 - int(m[2])), TEXT, count=1)
    assert changed != TEXT and readme.filled(changed) == TEXT
    with pytest.raises(ValueError, match="0 places for the table 'gap'"):
        readme.filled(TEXT.replace("<!-- end gap -->", ""))


def test_scripts_and_files_named_exist():
    for path in re.findall(r"(?:bash |`)((?:recipes|ci|tests|verl_rounding_align)/[\w./]+)", TEXT):
        assert (ROOT / path).exists(), path


def test_subcommands_named_exist():
    known = set(get_command(cli.app).commands)
    named = set(re.findall(r"verl-rounding-align (\w+)", TEXT)) - {"beside"}
    assert named and named <= known


def test_values_families_and_presets_are_the_packages():
    for value in choices():
        assert f"`{value}`" in TEXT, value
    assert all(name in TEXT for name in FAMILIES)
    for name in PRESETS:
        assert f"`{name}`" in TEXT or name.startswith("vllm_cuda") or name in ("hf_eager", "fp32"), name


def test_the_error_shown_is_the_real_one():
    key = "actor_rollout_ref.actor.rounding_align"
    with pytest.raises(ValueError) as error:
        parse_plan("ropee", key=key)
    assert f"ValueError: {error.value}" in " ".join(TEXT.split())


def test_the_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    model = tiny("qwen3")
    exec(code, {"model": model})
    assert capsys.readouterr().out.startswith(
        "rounding_align: qwen3, 3 layers, rope 3 sites, hf_eager -> vllm_compiled"
    )
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_the_fingerprint_shown_is_a_presets():
    assert str(verified("vllm_compiled")) in " ".join(TEXT.split())
