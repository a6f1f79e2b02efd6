"""Contract of ``auto``: the plan is what a probe of the engine at hand found, made once per engine and model and kept;
what has no exact answer is left out and said; a result of another model, mode or device is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_probe import CASES, SPEC, Toy
from tiny import tiny, tokens, verified

from verl_rounding_align import align, presets
from verl_rounding_align.engine import auto, probe, result
from verl_rounding_align.engine.result import Result
from verl_rounding_align.engine.spec import ModelSpec
from verl_rounding_align.plan import parse_plan
from verl_rounding_align.presets import BITWISE, UNPROVEN

EAGER = verified("vllm_cpu")
COMPILED = verified("vllm_compiled")
STORED = {"attention": {"cos_sin"}, "mlp": {"act"}, "experts": {"act"}, "attn_add": {"carry"}, "mlp_add": {"normed"}}


@pytest.fixture(scope="module")
def toy():
    """A result with the Toy's rows as an engine's eager mode, one site of it in compiled mode."""
    rows = probe.probe(Toy(STORED), CASES)
    compiled = [replace(row, mode="compiled") for row in rows[:1]]
    return Result(SPEC, (*rows, *compiled), {"eager": EAGER, "compiled": COMPILED})


@pytest.fixture(scope="module")
def noisy():
    return Result(SPEC, tuple(probe.probe(Toy(STORED, noise=True), CASES)), {"eager": EAGER})


def test_a_result_survives_its_file(toy, noisy):
    for found in (toy, noisy):
        assert Result.from_json(found.to_json(versions={"torch": "2"})) == found


def test_the_preset_has_the_probes_points_and_the_engines_fingerprint(toy):
    preset = toy.preset("eager")
    assert {kind: preset.points[kind] for kind in STORED} == STORED
    assert set(preset.evidence.values()) == {BITWISE} and preset.probed and preset.note == ""
    assert (preset.name, preset.verified, preset.eager) == (f"probed-{EAGER.key}", (EAGER,), True)
    trainer = presets.get("hf_eager").points
    assert toy.preset("compiled").points["mlp"] == trainer["mlp"]  # not probed there: the trainer's own


def test_what_has_no_exact_answer_is_left_out_of_auto_and_said(noisy):
    preset = noisy.preset("eager")
    assert preset.evidence["swiglu"] == UNPROVEN and preset.evidence["rope"] == BITWISE
    assert preset.note.startswith("mlp: no match, best {act} on 9")
    assert parse_plan("auto", preset).groups == ("rope", "add_rms_norm", "carry")
    assert parse_plan("swiglu", preset).rounding("mlp").points == {"act"}  # asked for by name: the best there is


def test_auto_is_every_group_of_a_probed_engine_and_nothing_of_a_preset(toy):
    assert parse_plan("auto", toy.preset("eager")) == parse_plan("all", toy.preset("eager"))
    with pytest.raises(ValueError) as error:
        parse_plan("auto", "vllm_cpu", key="k")
    assert str(error.value) == (
        "k='auto': 'auto' takes the plan from a probe of the engine, and vllm_cpu is a preset; give the file that "
        "`verl-rounding-align probe --json` wrote as the engine, or choose from none, rope, swiglu, add_rms_norm, carry, "
        "paper, all"
    )


@pytest.mark.parametrize("value", [{"regions": "all", "engine": "auto"}, {"regions": "auto", "engine": "auto"}])
def test_auto_needs_somebody_who_knows_the_engine(value):
    with pytest.raises(ValueError) as error:
        parse_plan(value, key="k")
    assert str(error.value) == (
        "k.regions engine='auto': the engine is probed by verl's driver or by `verl-rounding-align plan --auto`; elsewhere "
        "give the file that `verl-rounding-align probe --json` wrote, or a preset's name"
    )


def test_auto_is_not_joined():
    with pytest.raises(ValueError, match=r"^rounding_align='auto\+rope': 'auto' cannot be joined with another region$"):
        parse_plan("auto+rope")


def test_a_model_aligned_by_a_probes_file_rounds_as_the_preset_with_its_points(toy, tmp_path):
    file = tmp_path / "probe.json"
    points = presets.get("vllm_compiled").points
    same = [replace(row, mode="compiled", points=points[row.kind] - row.inert) for row in toy.rows[:-1]]
    file.write_text(Result(SPEC, tuple(same), {"compiled": COMPILED}).to_json())

    def logits(*how, **options):
        model = tiny("qwen3").eval()
        if how or options:
            align(model, *how, backend="eager", **options)
        return model(tokens(), use_cache=False).logits

    probed = logits({"regions": "auto", "engine": str(file)})
    assert torch.equal(probed, logits("all", engine="vllm_compiled"))
    assert not torch.equal(probed, logits()), "negative control: alignment changes nothing"


# ---- files


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("none.json", {}, "engine='{path}': cannot be read: No such file or directory"),
        (
            "text.json",
            {},
            "engine='{path}': not a result of `verl-rounding-align probe --json` (JSONDecodeError: Expecting value: line 1 "
            "column 1 (char 0))",
        ),
        (
            "empty.json",
            {},
            "engine='{path}': not a result of `verl-rounding-align probe --json` (KeyError: 'fingerprints')",
        ),
        ("toy.json", {}, "engine='{path}': which mode is meant; it holds eager, compiled; write FILE:MODE"),
        ("toy.json:fast", {}, "engine='{path}': no rows for mode 'fast'; it holds eager, compiled; write FILE:MODE"),
        ("toy.json:eager", {"mode": "compiled"}, "engine='{path}': names mode 'eager', and the engine runs compiled"),
        (
            "toy.json:eager",
            {"spec": replace(SPEC, head_dim=32, eps=1e-5)},
            "engine='{path}': the probe was made for another model (head_dim 16, here 32, eps 1e-06, here 1e-05); probe "
            "this one",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(toy, tmp_path, name, kwargs, message):
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "toy.json").write_text(toy.to_json())
    with pytest.raises(ValueError) as error:
        result.load(tmp_path / name, **kwargs)
    assert str(error.value) == message.format(path=tmp_path / name)


def test_a_file_names_its_mode(toy, tmp_path):
    (tmp_path / "toy.json").write_text(toy.to_json())
    for mode in ("eager", "compiled"):
        assert result.load(f"{tmp_path}/toy.json:{mode}", SPEC) == toy.preset(mode)
        assert result.load(tmp_path / "toy.json", SPEC, mode) == toy.preset(mode)


# ---- kept results


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Return a stand-in for the probe's process: it counts its calls and writes ``engine.result`` if there is one."""
    monkeypatch.setenv(auto.FOLDER, str(tmp_path / "kept"))
    spec = ModelSpec.from_family("llama")
    rows = tuple(replace(row, mode="compiled") for row in probe.probe(Toy(), CASES))
    state = SimpleNamespace(calls=[], result=Result(spec, rows, {"compiled": COMPILED}), status=0, model=str(tmp_path))
    from transformers import AutoConfig

    AutoConfig.for_model("llama").save_pretrained(tmp_path)

    def run(command, stdout, env):
        state.calls.append((command, env))
        if state.result is not None:
            Path(command[command.index("--json") + 1]).write_text(state.result.to_json())
        return SimpleNamespace(returncode=state.status)

    monkeypatch.setattr(auto.subprocess, "run", run)
    return state


ROLLOUT = auto.Rollout("0.30.0", "cpu", eager=False)


def test_an_engine_is_asked_once_and_the_answer_kept(engine):
    said = []
    first, origin = auto.probe(engine.model, ROLLOUT, say=said.append)
    again, later = auto.probe(engine.model, ROLLOUT, say=said.append)
    assert first == again == engine.result.preset("compiled") and len(engine.calls) == 1
    assert len(said) == 2 and said[0].startswith("rounding_align: asking vllm 0.30.0, compiled, cpu where it rounds")
    assert origin.startswith("probed now, ") and later.startswith("probed earlier, ")
    command, _ = engine.calls[0]
    assert command[1:7] == ["-m", "verl_rounding_align", "probe", "--model", engine.model, "--mode"]
    assert command[command.index("--mode") + 1] == "compiled"


@pytest.mark.parametrize(
    "other",
    [
        replace(ROLLOUT, version="0.31.0"),
        replace(ROLLOUT, compilation={"custom_ops": ["+rms_norm"]}),
        replace(ROLLOUT, environment={"VLLM_BATCH_INVARIANT": "1"}),
    ],
    ids=["release", "custom ops", "environment"],
)
def test_another_engine_is_asked_again_with_its_own_settings(engine, other):
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    auto.probe(engine.model, other, say=lambda text: None)
    assert len(engine.calls) == 2
    command, env = engine.calls[1]
    assert json.loads(command[command.index("--compilation-config") + 1]) == dict(other.compilation)
    assert env.items() >= other.environment.items()


def test_another_variable_in_the_environment_asks_again(engine, monkeypatch):
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert len(engine.calls) == 2


def test_a_site_without_an_answer_is_a_result_all_the_same(engine):
    engine.status = 1
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)


def test_a_probe_that_fails_says_what_to_do_and_keeps_nothing(engine):
    engine.result, engine.status = None, 2
    with pytest.raises(ValueError) as error:
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert str(error.value) == (
        "rounding_align='auto': the probe of rollout vllm 0.30.0, compiled, cpu ended with status 2 (its message is above); "
        "it runs where the engine runs: run `verl-rounding-align probe --json FILE` there and set "
        "rounding_align={regions: all, engine: FILE}, or name a preset"
    )
    assert list(auto.folder().iterdir()) == []


def test_a_probe_on_another_device_is_refused(engine):
    with pytest.raises(
        ValueError, match=r"^rounding_align='auto': the rollout runs on cuda, and the probe found cpu here"
    ):
        auto.probe(engine.model, replace(ROLLOUT, device="cuda"), say=lambda text: None)
    assert list(auto.folder().iterdir()) == []
