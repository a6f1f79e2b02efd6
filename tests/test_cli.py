"""Contract of the command line: each subcommand prints its rows, writes them as JSON with versions, and a value that is
not legal ends with exit code 2 and one whole sentence on stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.engines import presets
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.regions import KINDS, REGIONS, Group, Region
from verl_rounding_align.report.rows import table

RUN = CliRunner()


@pytest.fixture
def model(tmp_path):
    config = AutoConfig.for_model(
        "qwen3", hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_presets_lists_every_engine(tmp_path):
    result = RUN.invoke(cli.app, ["presets", "--json", str(tmp_path / "p.json")])
    assert result.exit_code == 0
    payload = json.loads((tmp_path / "p.json").read_text())
    assert [row["preset"] for row in payload["presets"]] == list(PRESETS)
    assert payload["versions"]["torch"] == torch.__version__
    assert all(name in result.output for name in PRESETS)


def test_presets_have_a_column_for_each_site_kind_and_say_where_they_say_nothing(tmp_path, monkeypatch):
    def listed():
        RUN.invoke(cli.app, ["presets", "--json", str(tmp_path / "p.json")])
        return {row["preset"]: row for row in json.loads((tmp_path / "p.json").read_text())["presets"]}

    before = listed()
    for name, row in before.items():
        assert set(row) == {"preset", *KINDS, "releases", "evidence"} and "not said" not in row.values(), name
    region = Region("gain", None, {"gained": ""}, {"embedding": ""}, {"gain": Group("gain", {"gained"}, "")})
    monkeypatch.setitem(REGIONS, "gain", region)
    after = listed()
    assert {name: row["embedding"] for name, row in after.items() if row["embedding"] != "not said"} == {
        "hf_eager": "{gained}",
        "fp32": "{}",
    }
    assert [{k: v for k, v in row.items() if k != "embedding"} for row in after.values()] == list(before.values())


def test_a_name_that_is_too_long_for_its_column_is_shown_whole():
    names = ["x" * 50 + f"{i:02d}" for i in range(6)]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table("t", names, [names]))
    cells = [line.split("│") for line in shown.get().splitlines() if line.startswith("│")]
    assert ["".join(part.strip() for part in column) for column in zip(*cells, strict=True)][1:-1] == names


def test_plan_prints_sites_without_weights(model, tmp_path):
    arguments = ["plan", "--model", model, "--regions", "rope", "--vllm", "0.30.0", "--json", str(tmp_path / "p.json")]
    result = RUN.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    payload = json.loads((tmp_path / "p.json").read_text())
    assert payload["plan"] == "rope: hf_eager -> vllm_compiled_split"
    assert payload["sites"] == [
        {
            "module": f"model.layers.{i}.self_attn",
            "site kind": "attention",
            "stored before": "{cos_sin, product, qk_norm, qk_normed}",
            "stored after": "{cos_sin}",
        }
        for i in range(2)
    ]
    eager = RUN.invoke(cli.app, [*arguments[:-2], "--eager"])
    assert "vllm_cuda" in eager.output


def test_an_illegal_value_ends_with_a_sentence_and_exit_code_2(model):
    command = [sys.executable, "-c", "from verl_rounding_align.cli import main; main()"]
    result = subprocess.run([*command, "plan", "--model", model, "--regions", "ropee"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "error: rounding_align='ropee': unknown region 'ropee'; choose from none, rope, swiglu, add_rms_norm, carry, "
        "paper, all, auto (join with +)\n"
    )


@pytest.fixture
def failing_vllm(tmp_path, monkeypatch):
    """Replace Python in the processes that run vLLM by one that fails as vLLM does: the cause, then noise."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho 'ValueError: no kernel for head_size 7' >&2\necho 'nanobind: leaked 3' >&2\nexit 3\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize("command", ["gap", "sites"])
def test_an_engine_that_fails_ends_with_its_reason_and_where_its_log_is(
    command, model, failing_vllm, tmp_path, capsys, monkeypatch
):
    options = ["--out", str(tmp_path / "gap"), "--engine", "vllm_cpu", "--mode", "eager"] if command == "gap" else []
    monkeypatch.setattr(sys, "argv", ["verl-rounding-align", command, "--model", model, *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (said,) = re.findall(
        r"^error: vLLM ended with status 3: ValueError: no kernel for head_size 7; see (.*)$",
        capsys.readouterr().err,
        re.M,
    )
    assert "nanobind: leaked 3" in Path(said).read_text()


def ended(capsys, monkeypatch, *arguments) -> str:
    """Return what stands on stderr when the command has ended with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["verl-rounding-align", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "nope.txt"], "nope.txt: No such file or directory"),
        (["--tokens", "0"], "tokens=0: expected 1 or more"),
        (
            ["--model", "/nonexist"],
            "model='/nonexist': expected a folder of a Transformers checkpoint, with config.json",
        ),
    ],
)
def test_gap_refuses_what_is_not_there_before_an_engine_starts(model, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr("verl_rounding_align.gap.rollouts.make", lambda *_: pytest.fail("vLLM was started"))
    said = ended(capsys, monkeypatch, "gap", "--model", model, "--out", tmp_path / "gap", *options)
    assert said == f"error: {message}\n" and not (tmp_path / "gap").exists()


def test_a_file_that_cannot_be_read_or_written_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    said = ended(capsys, monkeypatch, "presets", "--json", tmp_path / "file" / "p.json")
    assert said in [f"error: {tmp_path / 'file'}: {why}\n" for why in ("File exists", "Not a directory")]
    monkeypatch.setattr(cli, "app", Mock(side_effect=OSError("no file config.json in /x.\n\nSee the hub.")))
    assert ended(capsys, monkeypatch) == "error: no file config.json in /x.\n"


@pytest.mark.parametrize("option", ["model", "trainer-model"])
def test_triage_refuses_a_checkpoint_that_is_not_there(model, capsys, monkeypatch, option):
    options = {"model": model, option: "/nonexist"}
    said = ended(
        capsys, monkeypatch, "triage", *(x for k, v in options.items() for x in (f"--{k}", v)), "--config", "x"
    )
    assert said == f"error: {option}='/nonexist': expected a folder of a Transformers checkpoint, with config.json\n"


def test_a_note_of_triage_does_not_count(monkeypatch):
    """Exit code 0 for rounding-sized with any note, 1 for a cause."""
    from verl_rounding_align.triage import rows as triage
    from verl_rounding_align.triage import run as run_triage

    for cause, code in [(triage.NOT_COMPARED, 0), (triage.NOTE, 0), ("weights", 1)]:
        found = [triage.Finding(name, triage.POSSIBLE, "", "") for name in (triage.ROUNDING, cause)]
        monkeypatch.setattr(run_triage, "run_triage", lambda *_, found=found: found)
        assert RUN.invoke(cli.app, ["triage"]).exit_code == code
    help = " ".join(RUN.invoke(cli.app, ["triage", "--help"], env={"COLUMNS": "300"}).output.split())
    assert f"notes ({triage.NOTE}, {triage.NOT_COMPARED}) do not count" in help


# ---- plan: which engine, which regions


@pytest.fixture
def asked(monkeypatch):
    """Replace the probe; return the list of (model, Rollout) that it was asked for."""
    calls = []

    def probe(model, rollout, key):
        calls.append((model, rollout))
        return dataclasses.replace(presets.get("vllm_cpu"), name="probed-1234"), "probed now, FILE"

    monkeypatch.setattr("verl_rounding_align.engines.auto.probe", probe)
    return calls


@pytest.fixture
def config(tmp_path):
    """Return a function: text -> a YAML file."""

    def write(text):
        (tmp_path / "verl.yaml").write_text(text)
        return str(tmp_path / "verl.yaml")

    return write


WHOLE = """
trainer: {device: cpu}
actor_rollout_ref:
  actor: {rounding_align: swiglu}
  rollout: {name: vllm, enforce_eager: true}
"""


def planned(model, *options):
    done = CliRunner().invoke(cli.app, ["plan", "--model", model, *options])
    return str(done.exception) if isinstance(done.exception, ValueError) else " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "options", "shown"),
    [
        (WHOLE, [], "swiglu 2 sites, hf_eager -> vllm_cpu"),  # the config's own key and engine
        (WHOLE, ["--regions", "rope"], "rope 2 sites, hf_eager -> vllm_cpu"),
        ("name: vllm\nenforce_eager: true\n", ["--device", "cpu"], "rope 2 sites, hf_eager -> vllm_cpu"),
        (
            "rollout: {name: vllm}\n",
            ["--device", "cpu", "--regions", "rope"],
            "rope 2 sites, hf_eager -> vllm_compiled",
        ),
        (WHOLE.replace("swiglu", "{regions: rope, engine: fp32}"), [], "rope 2 sites, hf_eager -> fp32"),
    ],
)
def test_plan_reads_verls_config(model, config, asked, text, options, shown):
    pytest.importorskip("vllm")
    assert shown in planned(model, "--rollout-config", config(text), *options)
    assert asked == []


@pytest.mark.parametrize(
    ("text", "options", "regions"),
    [
        (WHOLE, ["--auto"], "swiglu 2 sites"),
        (WHOLE.replace("swiglu", "auto"), [], "add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites"),
        (None, ["--auto", "--vllm", "0.30.0"], "add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites"),
        (None, ["--regions", "auto", "--vllm", "0.30.0"], "add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites"),
    ],
)
def test_plan_asks_the_engine_where_it_is_told_to(model, config, asked, text, options, regions):
    pytest.importorskip("vllm")
    where = ["--rollout-config", config(text)] if text else ["--device", "cpu", "--eager"]
    assert f"{regions}, hf_eager -> probed-1234" in planned(model, *where, *options)
    ((_, rollout),) = asked
    assert (rollout.device, rollout.mode) == ("cpu", "eager")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--auto", "--engine", "vllm_cpu"], "engine='vllm_cpu': --auto probes the engine; leave out one of the two"),
        (["--rollout-config", "/no/file"], "rollout-config='/no/file': cannot be read: No such file or directory"),
        (
            ["--regions", "auto", "--engine", "vllm_cpu"],
            "rounding_align='auto': 'auto' takes the plan from a probe of the engine, and vllm_cpu is a preset; give the file "
            "that `verl-rounding-align probe --json` wrote as the engine, or choose from none, rope, swiglu, add_rms_norm, "
            "carry, paper, all",
        ),
    ],
)
def test_plan_refuses_what_does_not_fit(model, asked, options, message):
    assert planned(model, *options) == message
    assert asked == []


def test_plan_refuses_a_file_without_a_rollout(model, config):
    file = config("trainer: {device: cpu}\n")
    assert planned(model, "--rollout-config", file) == (
        f"rollout-config={file!r}: expected verl's config with actor_rollout_ref.rollout, or that section alone, with a field "
        "'name'"
    )
