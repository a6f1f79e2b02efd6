"""Contract: a fingerprint changes with every field that can move rounding, is the same in every process, and decides what
a plan is worth for a running engine: verified only if nothing differs, contradicted if something decisive does. A worker
that cannot say what it is says why, and is not harmed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import verified

from verl_rounding_align.engines import presets
from verl_rounding_align.engines.fingerprint import (
    _DECISIVE,
    CONTRADICTED,
    UNVERIFIED,
    VERIFIED,
    Fingerprint,
    judge,
)
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.engines.vllm.plugin import rounding_align_fingerprint

CPU = verified("vllm_compiled")
EAGER = replace(verified("vllm_cpu"), device="cuda")
OTHER = {"str": "other", "bool": lambda x: not x, "int": lambda x: x + 1, "tuple[str, ...]": lambda x: (*x, "other")}
NAMES = [f.name for f in fields(Fingerprint)]


def changed(name: str) -> Fingerprint:
    """Return the fingerprint with another value in one field."""
    kind = next(f.type for f in fields(Fingerprint) if f.name == name)
    new = OTHER[kind]
    return replace(CPU, **{name: new(getattr(CPU, name)) if callable(new) else new})


@pytest.mark.parametrize("name", NAMES)
def test_every_field_moves_the_key_and_costs_the_verification(name):
    other = changed(name)
    assert other.key != CPU.key and other.differences(CPU).keys() == {name}
    judgement = judge(other, [CPU], "row")
    assert judgement.status == (CONTRADICTED if name in _DECISIVE else UNVERIFIED)
    assert (
        judgement.why == f"the engine has {name}={getattr(other, name)!r}, row was verified with {getattr(CPU, name)!r}"
    )
    assert judge(CPU, [CPU], "row").status == judge(CPU, [other, CPU], "row").status == VERIFIED


def test_a_pass_that_is_on_contradicts_and_one_that_is_off_or_matches_nothing_is_said():
    fused, verified_with = replace(CPU, passes=("fuse_allreduce_rms",)), "row was verified with ()"
    assert (judge(fused, [CPU], "row").status, judge(fused, [fused], "row").status) == (CONTRADICTED, VERIFIED)
    assert judge(CPU, [fused], "row").status == UNVERIFIED
    for name in ("fuse_act_quant", "fuse_rope_kvcache_cat_mla"):  # quantization, latent attention: there is none
        inert = judge(replace(CPU, passes=(name,)), [CPU], "row")
        assert (inert.status, inert.why) == (UNVERIFIED, f"the engine has passes=({name!r},), {verified_with}")
    quantized = replace(CPU, quantization="fp8")
    assert judge(replace(quantized, passes=("fuse_act_quant",)), [quantized], "row").status == CONTRADICTED


def test_ranks_alone_contradict_nothing_and_are_never_passed_over():
    """The all-reduce stores its sum in the model dtype, as one rank does; a pass that fuses it is what moves rounding."""
    two = judge(replace(CPU, tensor_parallel=2), [CPU], "row")
    assert (two.status, two.why) == (UNVERIFIED, "the engine has tensor_parallel=2, row was verified with 1")
    both = judge(replace(CPU, tensor_parallel=2, passes=("fuse_allreduce_rms",)), [CPU], "row")
    assert both.status == CONTRADICTED and "fuse_allreduce_rms" in both.why


@pytest.mark.parametrize(
    ("engine", "trainer", "status"),
    [
        ("bfloat16", "bfloat16", VERIFIED),
        ("bfloat16", None, VERIFIED),
        ("float16", "float16", UNVERIFIED),  # both alike, and the points were compared in bf16
        ("float16", None, CONTRADICTED),
        ("float16", "bfloat16", CONTRADICTED),
        ("bfloat16", "float16", CONTRADICTED),
        ("float32", "bfloat16", CONTRADICTED),
    ],
)
def test_the_engines_dtype_is_judged_against_the_trainers(engine, trainer, status):
    assert judge(replace(CPU, dtype=engine), [CPU], "row", trainer).status == status
    unrun = presets.get("vllm_compiled_split").judge(replace(CPU, device="cuda", split=True, dtype=engine), trainer)
    expected = CONTRADICTED if trainer not in (None, engine) or engine == "float32" else UNVERIFIED
    assert unrun.status == expected


def test_the_nearest_verified_engine_is_the_one_that_is_named():
    """One torch release away from one row, another mode than the other: unverified, not contradicted."""
    running = replace(CPU, torch="2.14.0")
    judgement = judge(running, [replace(CPU, mode="eager"), CPU], "row")
    assert (judgement.status, judgement.why) == (
        UNVERIFIED,
        "the engine has torch='2.14.0', row was verified with '2.13.0'",
    )


def test_fields_survive_json_and_others_are_refused():
    values = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(CPU).items()}
    assert Fingerprint.from_dict(values) == CPU
    del values["torch"]
    with pytest.raises(ValueError) as error:
        Fingerprint.from_dict({**values, "cuda": "13"})
    assert str(error.value) == "fingerprint: unknown fields ['cuda'], missing fields ['torch']"


@pytest.mark.parametrize("preset", presets.PRESETS.values(), ids=str)
def test_a_row_that_claims_bitwise_evidence_for_an_engine_names_the_engine(preset):
    bitwise = preset.engine is not None and set(preset.evidence.values()) == {presets.BITWISE}
    assert bool(preset.verified) == bitwise
    mode = "eager" if preset.eager else "compiled"
    assert all((v.engine, v.device, v.mode) == (preset.engine, preset.device, mode) for v in preset.verified)
    assert all(preset.covers(v.version) for v in preset.verified)
    assert presets.Preset.from_dict(preset.as_dict()) == preset


@pytest.mark.parametrize(
    ("name", "running", "status", "why"),
    [
        (
            "vllm_cuda",
            EAGER,
            UNVERIFIED,
            "vllm_cuda was not compared with an engine (",
        ),
        ("vllm_cuda", CPU, CONTRADICTED, "the engine has device='cpu', vllm_cuda is for 'cuda'; the engine has mode="),
        (
            "vllm_cuda",
            replace(EAGER, batch_invariant=True),
            CONTRADICTED,
            "the engine has batch_invariant=True, vllm_cuda is for False",
        ),
        (
            "vllm_compiled_split",
            replace(CPU, device="cuda", split=True),
            UNVERIFIED,
            "vllm_compiled_split was not compared with an engine (",
        ),
        *(
            (
                "vllm_compiled_split",
                replace(CPU, **{"device": "cuda", "split": True, name: value}),
                CONTRADICTED,
                f"the engine has {name}={value!r}, vllm_compiled_split is for ",
            )
            for name, value in dict(
                split=False,
                emulate_precision_casts=True,
                custom_ops=("+rms_norm", "none"),
                quantization="fp8",
                model_impl="transformers",
                passes=("fuse_allreduce_rms",),
            ).items()
        ),
        (
            "vllm_compiled_split",
            replace(CPU, device="cuda", split=True, passes=("fuse_norm_quant",)),
            UNVERIFIED,
            "vllm_compiled_split was not compared with an engine (",
        ),
        ("hf_eager", CPU, UNVERIFIED, "hf_eager describes no engine"),
    ],
)
def test_a_row_that_nothing_was_compared_with_is_never_verified(name, running, status, why):
    judgement = presets.get(name).judge(running)
    assert judgement.status == status and judgement.why.startswith(why)


def test_ranks_of_an_engine_that_nothing_was_compared_with_are_named():
    row, running = presets.get("vllm_compiled_split"), replace(CPU, device="cuda", split=True)
    assert (
        row.judge(replace(running, tensor_parallel=2)).why
        == row.judge(running).why + "; the engine has tensor_parallel=2"
    )


def test_a_release_that_calls_the_mode_level_is_read_and_one_without_either_is_missing():
    pytest.importorskip("vllm")
    from verl_rounding_align.engines.vllm.fingerprint import of_config

    def config(**mode):
        options = dict(
            backend="", splitting_ops=["x"], custom_ops=["none", "+quant_fp8"], pass_config=SimpleNamespace()
        )
        compilation = SimpleNamespace(**options, inductor_compile_config={}, **mode)
        model = SimpleNamespace(enforce_eager=False, quantization="fp8")
        parallel = SimpleNamespace(tensor_parallel_size=2)
        return SimpleNamespace(compilation_config=compilation, model_config=model, parallel_config=parallel)

    old = of_config(config(level=3), "bfloat16", "bfloat16", "transformers")
    assert (old.mode, old.split, old.custom_ops, old.tensor_parallel) == ("compiled", True, ("none",), 2)
    assert (old.quantization, old.model_impl) == ("fp8", "transformers")
    assert of_config(config(level=0), "bfloat16", "bfloat16").mode == "eager"
    with pytest.raises(AttributeError):
        of_config(config(), "bfloat16", "bfloat16")


@pytest.mark.vllm
@pytest.mark.parametrize("first", ["plugin", "worker"])
def test_the_plugin_gives_workers_the_method_whichever_comes_first(first):
    lines = [
        "from verl_rounding_align.engines.vllm.plugin import register; register()",
        "import vllm.v1.worker.worker_base as w",
    ]
    code = [
        *(lines if first == "plugin" else reversed(lines)),
        "print(w.WorkerBase.rounding_align_fingerprint.__name__)",
    ]
    if first == "worker":
        code.insert(1, "assert not hasattr(w.WorkerBase, 'rounding_align_fingerprint')")  # negative control
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["rounding_align_fingerprint"], done.stderr


def test_a_worker_that_cannot_say_what_it_is_says_why():
    pytest.importorskip("vllm")
    answer = rounding_align_fingerprint(object())
    assert answer == {"missing": "AttributeError: 'object' object has no attribute 'model_runner'"}


@pytest.mark.vllm
@pytest.mark.parametrize(("mode", "preset"), [("compiled", "vllm_compiled"), ("eager", "vllm_cpu")])
def test_vllms_own_config_has_the_fingerprint_of_its_preset(mode, preset):
    """Whole runs compare a real worker's: tests/recipes/test_quickstart.py."""
    layers = pytest.importorskip("verl_rounding_align.engines.vllm.layers")
    from verl_rounding_align.engines.vllm.fingerprint import of_config

    row = presets.get(preset)

    def found(**options):
        """What vLLM says of itself here, as if on the CPU that the presets were verified on."""
        config = layers.engine_config(mode, **options)
        return replace(of_config(config, "bfloat16", "bfloat16"), arch=row.verified[0].arch)

    assert found() in row.verified
    assert row.judge(found(compilation={"custom_ops": ["+rms_norm"]})).status == CONTRADICTED
    with torch._inductor.config.patch(emulate_precision_casts=True):  # decides where Inductor rounds, and only there
        assert row.judge(found()).status == (CONTRADICTED if mode == "compiled" else VERIFIED)


@pytest.mark.vllm
def test_a_split_graph_has_another_fingerprint():
    layers = pytest.importorskip("verl_rounding_align.engines.vllm.layers")
    from verl_rounding_align.engines.vllm.fingerprint import of_config

    split = of_config(layers.engine_config("compiled", split=True), "bfloat16", "bfloat16")
    assert split.split and presets.get("vllm_compiled").judge(split).status != VERIFIED


def test_a_row_that_nobody_ran_says_what_it_does_not_cover():
    row, running = PRESETS["vllm_compiled_split"], replace(CPU, device="cuda", split=True)
    later = row.judge(replace(running, version="0.40.0", ir_op_priority=("rms_norm=vllm_c",)))
    assert later.status == UNVERIFIED
    assert later.why.endswith(
        "; the engine is 0.40.0, and the row covers 0.8.5-0.33.0; the engine takes rms_norm=vllm_c, and the row was read for "
        "native ones"
    )
    assert "covers" not in row.judge(replace(running, ir_op_priority=())).why, "negative control"


def test_an_engines_own_model_code_contradicts_nothing_and_transformers_code_does():
    own = replace(PRESETS["vllm_compiled_split"], engine="other")
    running = replace(CPU, engine="other", device="cuda", split=True, model_impl="other")
    assert own.judge(running).status == UNVERIFIED
    assert own.judge(replace(running, model_impl="transformers")).status == CONTRADICTED
