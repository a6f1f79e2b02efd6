"""Contract of ``auto``: the plan is what a probe of the engine at hand found, made once per engine and model and kept;
what has no exact answer is left out and said; a result of another model, mode or device is refused."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_probe import CASES, SPEC, Toy
from tiny import tiny, tokens, verified

from verl_rounding_align import align
from verl_rounding_align.engines import auto, presets, probe
from verl_rounding_align.engines.presets import BITWISE, UNPROVEN
from verl_rounding_align.engines.probe import result
from verl_rounding_align.engines.probe.result import Result
from verl_rounding_align.engines.spec import ModelSpec
from verl_rounding_align.plan import parse_plan

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
    assert (preset.verified, preset.eager) == ((EAGER,), True)
    moved = replace(toy.rows[0], points=frozenset())  # another answer of the same engine has another name
    assert Result(SPEC, (moved, *toy.rows[1:]), toy.fingerprints).preset("eager").name != preset.name


def test_a_region_that_was_not_probed_is_no_answer(toy):
    compiled = toy.preset("compiled")  # of which the attention's row alone is there
    assert compiled.evidence == {"rope": BITWISE}
    with pytest.raises(ValueError) as error:
        parse_plan("rope+swiglu", compiled, key="k")
    assert str(error.value) == f"k='swiglu': preset {compiled.name} says nothing about 'swiglu'; choose from rope"


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
        "k.regions engine='auto': the engine is probed by the framework's driver or by `verl-rounding-align plan --auto`; elsewhere "
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
    state = SimpleNamespace(
        calls=[],
        result=Result(spec, rows, {"compiled": COMPILED}),
        status=0,
        model=str(tmp_path),
        waits=0,
        killed=False,
    )
    from transformers import AutoConfig

    AutoConfig.for_model("llama").save_pretrained(tmp_path)

    class Popen:
        """Ends after ``state.waits`` timeouts."""

        def __init__(self, command, stdout, env):
            state.calls.append((command, env))
            self.waits = state.waits
            if state.result is not None:
                Path(command[command.index("--json") + 1]).write_text(state.result.to_json())

        def wait(self, timeout=None):
            self.waits -= 1
            if self.waits >= 0 and timeout is not None:
                raise subprocess.TimeoutExpired("probe", timeout)
            return state.status

        def kill(self):
            state.killed = True

    monkeypatch.setattr(auto.subprocess, "Popen", Popen)
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
        replace(ROLLOUT, compilation={"custom_ops": ["+rms_norm"]}),
        replace(ROLLOUT, environment={"VLLM_BATCH_INVARIANT": "1"}),
    ],
    ids=["custom ops", "environment"],
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
        "rounding_align='auto': the probe of rollout vllm 0.30.0, compiled, cpu ended with status 2 (see above); run "
        "`verl-rounding-align probe --json FILE` where the engine runs and set rounding_align={regions: all, engine: FILE}, or "
        "name a preset"
    )
    assert list(auto.folder().iterdir()) == []


def test_a_device_that_is_not_here_is_refused_before_the_probe(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^rounding_align='auto': the rollout runs on cuda, and there is none here; run "
    ):
        auto.probe(engine.model, replace(ROLLOUT, device="cuda"), say=lambda text: None)
    assert engine.calls == []


@pytest.mark.parametrize("other", [replace(ROLLOUT, device="cuda"), replace(ROLLOUT, version="0.19.0")], ids=str)
def test_an_answer_of_another_engine_is_refused_and_not_kept(engine, monkeypatch, other):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError) as error:
        auto.probe(engine.model, other, say=lambda text: None)
    assert str(error.value).startswith(
        f"rounding_align='auto': the rollout is vllm {other.version} on {other.device}, and the probe found 0.30.0 on cpu here"
    )
    assert list(auto.folder().iterdir()) == []


def test_a_slow_probe_gives_signs_of_life(engine):
    said, engine.waits = [], 2
    auto.probe(engine.model, ROLLOUT, say=said.append)
    assert (
        said[1:3] == ["rounding_align: still asking, 20 s", "rounding_align: still asking, 40 s"] and not engine.killed
    )


def test_a_probe_that_hangs_is_ended(engine):
    engine.waits, engine.result = 10**6, None
    with pytest.raises(
        ValueError, match=r"^rounding_align='auto': the probe of .* ended with no answer in 600 s \(see above\); run "
    ):
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert engine.killed


def test_a_damaged_file_is_replaced(engine):
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    (file,) = auto.folder().iterdir()
    file.write_text("{")
    assert auto.probe(engine.model, ROLLOUT, say=lambda text: None)[0] == engine.result.preset("compiled")
    assert len(engine.calls) == 2 and file.read_text() != "{"


def test_a_folder_that_cannot_be_written_is_named(engine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(auto.FOLDER, str(tmp_path / "file" / "x.json.d"))
    with pytest.raises(
        ValueError, match=r"^VERL_ROUNDING_ALIGN_CACHE='.*': results cannot be kept there: .*; name a folder$"
    ):
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)


def test_a_folder_named_like_a_file_is_no_matter(engine, monkeypatch, tmp_path):
    monkeypatch.setenv(auto.FOLDER, str(tmp_path / "x.json.d"))
    for _ in range(2):
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert len(engine.calls) == 1


def test_the_engine_is_asked_in_the_dtype_it_is_given(engine):
    spec = auto.sized(engine.model, replace(ROLLOUT, dtype="float16"))
    assert spec.dtype == torch.float16 and auto.sized(engine.model, ROLLOUT).dtype == torch.bfloat16
    engine.result = replace(engine.result, spec=spec)
    auto.probe(engine.model, replace(ROLLOUT, dtype="float16"), say=lambda text: None)
    command, _ = engine.calls[0]
    assert command[command.index("--dtype") + 1] == "float16"
