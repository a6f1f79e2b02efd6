"""Contract of the command line: each subcommand prints its rows, writes them as JSON with versions, and a value that is
not legal ends with exit code 2 and one whole sentence on stderr."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.presets import PRESETS

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
