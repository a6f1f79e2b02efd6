"""Contract of ``auto``: the plan is what a probe of the engine at hand found, made once per engine and model and kept;
what has no exact answer is left out and said; a result of another model, mode or device is refused."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch
from test_probe import CASES, SPEC, Toy
from tiny import tiny, tokens, verified

from verl_rounding_align import align
from verl_rounding_align.engines import auto, cards, presets, probe, process
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
        looks=(),  # after how many seconds to tell that it runs
        meanwhile=lambda: None,
        hangs=False,
    )
    from transformers import AutoConfig

    AutoConfig.for_model("llama").save_pretrained(tmp_path)

    def run(module, command, *, limit, out, environment, every, tell):
        assert (module, limit, every) == ("verl_rounding_align", auto.TIMEOUT, auto.PATIENCE)
        state.calls.append((command, environment))
        state.meanwhile()
        for seconds in state.looks:
            tell(seconds)
        if state.hangs:
            raise process.TimeLimit("it hangs")
        if state.result is not None:
            Path(command[command.index("--json") + 1]).write_text(state.result.to_json())
        return state.status

    monkeypatch.setattr(process, "run", run)
    return state


def results() -> list[Path]:
    """Return the kept results; locks lie beside them."""
    return sorted(auto.folder().glob("*.json"))


ROLLOUT = auto.Rollout("0.30.0", "cpu", eager=False)


def test_an_engine_is_asked_once_and_the_answer_kept(engine):
    said = []
    first, origin = auto.probe(engine.model, ROLLOUT, say=said.append)
    again, later = auto.probe(engine.model, ROLLOUT, say=said.append)
    assert first == again == engine.result.preset("compiled") and len(engine.calls) == 1
    assert len(said) == 2 and said[0].startswith("rounding_align: asking vllm 0.30.0, compiled, cpu where it rounds")
    assert origin.startswith("probed now, ") and later.startswith("probed earlier, ")
    command, _ = engine.calls[0]
    assert command[:7] == ["probe", "--model", engine.model, "--engine", "vllm", "--mode", "compiled"]


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
    command, environment = engine.calls[1]
    assert json.loads(command[command.index("--compilation-config") + 1]) == dict(other.compilation)
    assert environment == other.environment


def test_another_variable_in_the_environment_asks_again(engine, monkeypatch):
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert len(engine.calls) == 2


def test_a_site_without_an_answer_is_a_result_all_the_same(engine):
    engine.status = 1
    preset, source = auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert (preset, source) == (engine.result.preset("compiled"), f"probed now, {results()[0]}")


def test_a_probe_that_fails_says_what_to_do_and_keeps_nothing(engine):
    engine.result, engine.status = None, 2
    with pytest.raises(ValueError) as error:
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert str(error.value) == (
        "rounding_align='auto': the probe of rollout vllm 0.30.0, compiled, cpu ended with status 2 (see above); run "
        "`verl-rounding-align probe --json FILE` where the engine runs and set rounding_align={regions: all, engine: FILE}, or "
        "name a preset"
    )
    assert results() == []


def test_a_device_that_is_not_here_is_refused_before_the_probe(engine, monkeypatch):
    monkeypatch.setattr(auto, "cards", lambda device: ())
    with pytest.raises(
        ValueError, match=r"^rounding_align='auto': the rollout runs on cuda, and there is none here; run "
    ):
        auto.probe(engine.model, replace(ROLLOUT, device="cuda"), say=lambda text: None)
    assert engine.calls == []


@pytest.mark.parametrize("other", [replace(ROLLOUT, device="cuda"), replace(ROLLOUT, version="0.19.0")], ids=str)
def test_an_answer_of_another_engine_is_refused_and_not_kept(engine, monkeypatch, other):
    monkeypatch.setattr(auto, "cards", lambda device: ("NVIDIA H200, 9.0",))
    with pytest.raises(ValueError) as error:
        auto.probe(engine.model, other, say=lambda text: None)
    assert str(error.value).startswith(
        f"rounding_align='auto': the rollout is vllm {other.version} on {other.device}, and the probe found vllm 0.30.0 on cpu here"
    )
    assert results() == []


def test_a_slow_probe_gives_signs_of_life(engine):
    said, engine.looks = [], (20.01, 40.3)
    auto.probe(engine.model, ROLLOUT, say=said.append)
    assert said[1:3] == ["rounding_align: still asking, 20 s", "rounding_align: still asking, 40 s"]


def test_a_probe_that_hangs_is_ended(engine):
    engine.hangs = True
    with pytest.raises(
        ValueError, match=r"^rounding_align='auto': the probe of .* ended with no answer in 600 s \(see above\); run "
    ):
        auto.probe(engine.model, ROLLOUT, say=lambda text: None)


def test_two_jobs_that_need_one_answer_ask_once(engine, monkeypatch):
    """The first job's probe does not end before the second job has said that it waits."""
    monkeypatch.setattr(auto, "PATIENCE", 0.01)
    waits, found, said = threading.Event(), [], []

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    def second() -> None:
        found.append(auto.probe(engine.model, ROLLOUT, say=say))

    other = threading.Thread(target=second)

    def meanwhile() -> None:
        other.start()
        assert waits.wait(60)

    engine.meanwhile = meanwhile
    first, origin = auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    other.join(60)
    (file,) = results()
    assert len(engine.calls) == 1 and found == [(first, f"probed by another job, {file}")]
    assert origin == f"probed now, {file}"
    assert said[0].startswith("rounding_align: another job asks this engine, waited ")


def test_a_job_waits_no_longer_than_a_probe_may_take(engine, monkeypatch):
    monkeypatch.setattr(auto, "PATIENCE", 0.01)
    monkeypatch.setattr(auto, "TIMEOUT", 0.02)
    spec = auto.sized(engine.model, ROLLOUT)
    auto.folder().mkdir()
    said = []
    with filelock.FileLock(auto.kept(ROLLOUT, spec).with_suffix(".lock")):
        assert auto.probe(engine.model, ROLLOUT, say=said.append)[1].startswith("probed now, ")
    assert said[:2] == [
        f"rounding_align: another job asks this engine, waited {waited} s for its answer" for waited in (0.01, 0.02)
    ]
    assert len(engine.calls) == 1


@pytest.mark.parametrize("error", [OSError("no locks available"), NotImplementedError()], ids=["refused", "unknown"])
def test_where_there_are_no_locks_the_engine_is_asked_all_the_same(engine, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    assert len(engine.calls) == 1 and len(results()) == 1


def test_results_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(auto.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not sys.platform.startswith("linux") or auto.folder() == tmp_path / "verl-rounding-align"
    monkeypatch.setenv(auto.FOLDER, str(tmp_path / "own"))
    assert auto.folder() == tmp_path / "own"


def test_a_damaged_file_is_replaced(engine):
    auto.probe(engine.model, ROLLOUT, say=lambda text: None)
    (file,) = results()
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


# ---- GPUs

H200, H100 = "NVIDIA H200, 9.0", "NVIDIA H100 80GB HBM3, 9.0"


def test_on_a_gpu_a_result_is_kept_for_the_cards_not_for_the_host(monkeypatch):
    """The host's name was the key: a new node asked again, and one with other cards kept its old answer."""
    spec, rollout = ModelSpec.from_family("llama"), replace(ROLLOUT, device="cuda")

    def file(host: str, *found: str) -> Path:
        monkeypatch.setattr("platform.node", lambda: host)
        monkeypatch.setattr(auto, "cards", lambda device: found)
        return auto.kept(rollout, spec)

    assert file("a", H200) == file("b", H200)
    assert len({file("a", H200), file("a", H100), file("a", H200, H100), file("a", "NVIDIA H200, 9.1")}) == 4


class Nvml:
    """NVIDIA's library, as far as it is used; ``at`` fails with its error."""

    NVMLError = type("NVMLError", (Exception,), {})
    CARDS = (("NVIDIA H200", (9, 0)), ("NVIDIA H200", (9, 0)), ("NVIDIA A100-SXM4-40GB", (8, 0)))

    def __init__(self, at: str = ""):
        self.at, self.open = at, 0

    def _call(self, name: str, value=None):
        if name == self.at:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self):
        self._call("init")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return self._call("count", len(self.CARDS))

    def nvmlDeviceGetHandleByIndex(self, i):
        return self.CARDS[i]

    def nvmlDeviceGetName(self, card):
        return card[0]

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return card[1]


def test_nvml_is_asked_and_torch_is_left_alone(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(process, "run", lambda *args, **kwargs: pytest.fail("torch was asked"))
    for name in ("is_available", "device_count", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: pytest.fail("CUDA was started here"))
    assert cards.cards("cuda") == ("NVIDIA A100-SXM4-40GB, 8.0", "NVIDIA H200, 9.0") and nvml.open == 0


@pytest.mark.parametrize("at", ["init", "count", None])
def test_without_nvml_torch_is_asked_in_another_process(monkeypatch, at):
    """What hides cards from this process does not hide them there."""
    nvml = Nvml(at)
    monkeypatch.setitem(sys.modules, "pynvml", None if at is None else nvml)  # None: the import fails
    asked = []

    def run(module, *, out, limit, environment, name):
        asked.append((module, environment))
        out.write_text(json.dumps([H200, H200]))
        return 0

    monkeypatch.setattr(process, "run", run)
    assert cards.cards("cuda") == (H200,) and nvml.open == 0
    assert asked == [(cards.__name__, dict.fromkeys(cards.HIDING))]


def test_rocms_cards_are_torchs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(process, "run", lambda *args, out, **kwargs: out.write_text('["AMD Instinct MI300X, gfx942"]'))
    assert cards.cards("rocm") == ("AMD Instinct MI300X, gfx942",)


@pytest.mark.parametrize("said", ["", "Segmentation fault", None], ids=["nothing", "no JSON", "no end"])
def test_where_torch_has_no_answer_there_are_no_cards(monkeypatch, said):
    def run(*args, out, **kwargs):
        if said is None:
            raise process.TimeLimit("torch did not end")
        out.write_text(said)

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(process, "run", run)
    assert cards.cards("cuda") == ()


def test_torch_names_its_cards_as_nvml_does(monkeypatch, capsys):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    cards.main()
    assert json.loads(capsys.readouterr().out) == [H200]
