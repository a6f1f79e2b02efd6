"""Contract of the command: it reads dumps, configs and checkpoints, prints and writes findings, and its exit code says whether
there is more than rounding."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest
from tiny import tiny
from triage_cases import CLEAN, case
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.engines import weights
from verl_rounding_align.logprobs.pairs import write
from verl_rounding_align.triage.rows import ROUNDING


def run(*arguments):
    return CliRunner().invoke(cli.app, ["triage", *map(str, arguments)])


def test_the_command_ends_with_0_on_a_clean_dump_and_with_1_on_a_fault(tmp_path):
    write(tmp_path / "clean.jsonl", CLEAN)
    done = run(tmp_path / "clean.jsonl", "--json", tmp_path / "t.json")
    assert done.exit_code == 0, done.output
    payload = json.loads((tmp_path / "t.json").read_text())
    schema = json.loads((resources.files("verl_rounding_align.triage") / "triage.schema.json").read_text())
    jsonschema.validate(payload, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**payload, "findings": []}, schema)
    assert [f["cause"] for f in payload["findings"]] == [ROUNDING] and payload["versions"]
    (tmp_path / "page").mkdir()
    (tmp_path / "t.json").rename(tmp_path / "page" / "triage.json")
    done = CliRunner().invoke(cli.app, ["gap", "report", str(tmp_path / "page")])
    assert done.exit_code == 0 and "rounding-sized" in (tmp_path / "page" / "report.html").read_text()
    write(tmp_path / "t.jsonl", case("temperature", "T = 0.8 scored at 1").pairs)
    done = run(tmp_path / "t.jsonl")
    assert done.exit_code == 1 and "temperature" in done.output


def test_the_command_reads_verls_config(tmp_path):
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {top_p: 0.9}}\n")
    done = run("--config", tmp_path / "verl.yaml")
    assert done.exit_code == 1 and "kept-mass" in done.output and "top_p=0.9" in done.output


def test_the_command_compares_two_checkpoints(tmp_path):
    for name, theta in (("a", 1e4), ("b", 1e6)):
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}).save_pretrained(tmp_path / name)
    same = run("--model", tmp_path / "a", "--trainer-model", tmp_path / "a", "--json", tmp_path / "t.json")
    assert same.exit_code == 0
    (finding,) = json.loads((tmp_path / "t.json").read_text())["findings"]
    n = len(weights.digest_hf(tmp_path / "a"))
    assert finding["evidence"].endswith(f"; {n} of {n} tensors compared, equal in every bit") and n > 10
    done = run("--model", tmp_path / "a", "--trainer-model", tmp_path / "b", "--json", tmp_path / "t.json")
    assert done.exit_code == 1
    (finding,) = json.loads((tmp_path / "t.json").read_text())["findings"]
    assert finding["evidence"].startswith("theta is 1e+06 in the trainer, 10000 in the engine")


def test_the_command_needs_something_to_look_at():
    assert str(run().exception) == "nothing to look at: give a DUMP, --config, or --model with --trainer-model"
    assert str(run("--config", "c.yaml", "--trainer-model", "m").exception) == (
        "trainer-model='m': give the engine's checkpoint as --model too"
    )
