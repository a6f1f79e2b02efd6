"""The key in verl: where it is accepted, what the driver refuses, and what each worker must prove.

Contract: a bad value or setting fails in the driver, before Ray starts, with the key, the value and the choices; what
was asked for and not applied stops the training; without the key nothing in verl's config or engines changes.
"""

import copy
import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tiny import tiny, tokens, verified

from verl_rounding_align import align
from verl_rounding_align.engines import presets
from verl_rounding_align.engines.vllm import settings
from verl_rounding_align.integrations.verl import driver, running, workers
from verl_rounding_align.integrations.verl import trainer as hooked
from verl_rounding_align.integrations.verl.config import plain
from verl_rounding_align.plan import parse_plan

pytestmark = pytest.mark.verl
KEY = "actor_rollout_ref.actor.rounding_align"
REF = "actor_rollout_ref.ref.rounding_align"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
ESCAPE = "or name the engine's preset: rounding_align={regions: ..., engine: ...}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a config.json, all that the driver reads of a model."""

    @functools.cache
    def make(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(folder)

    return make


@pytest.fixture
def config(model, monkeypatch):
    """Return a function: overrides -> verl's trainer config on a machine with vLLM 0.30.0 and CUDA."""
    monkeypatch.setattr(settings, "_vllm_version", lambda: "0.30.0")

    def make(*overrides, model_type="qwen3", **kwargs):
        return composed(f"actor_rollout_ref.model.path={model(model_type)}", *overrides, **kwargs)

    return make


@pytest.fixture
def updated(model, monkeypatch):
    """Return a function like `config`, which applies the overrides to verl's composed config: a second faster."""
    monkeypatch.setattr(settings, "_vllm_version", lambda: "0.30.0")
    parser = OverridesParser.create()

    def make(*overrides, model_type="qwen3"):
        groups = [o for o in overrides if o.startswith("model_engine=")]
        found = copy.deepcopy(stock(*groups))
        rest = [o for o in overrides if o not in groups]
        for override in parser.parse_overrides([f"actor_rollout_ref.model.path={model(model_type)}", *rest]):
            OmegaConf.update(found, override.key_or_group, override.value(), force_add=True)
        return found

    return make


def composed(*overrides, config_name="ppo_trainer", context=None):
    base = [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    ]
    with context or initialize_config_module("verl.trainer.config", version_base=None):
        return compose(config_name, overrides=[*base, *overrides])


stock = functools.cache(composed)


def validate(config):
    """Run verl's own check of its config, as its main does in the driver."""
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=True, use_critic=False)


def values(config):
    section = config.actor_rollout_ref
    return [plain(section[role].get("rounding_align")) for role in ("actor", "ref")]


# -------------------------------------------------------------------------------------------------------- acceptance

ROPE = {"regions": "rope", "engine": "vllm_compiled_split"}


@pytest.mark.parametrize(
    "overrides, actor, ref",
    [
        ([f"+{KEY}=rope"], ROPE, ROPE),
        ([f"+{KEY}=none"], "none", "none"),
        ([f"+{KEY}=null"], "none", "none"),
        ([f"+{KEY}=rope", f"+{REF}=none"], ROPE, "none"),
        ([f"+{REF}=rope"], "none", ROPE),
        ([f"+{KEY}=carry+rope"], {**ROPE, "regions": "rope+carry"}, {**ROPE, "regions": "rope+carry"}),
        ([f"+{KEY}=[rope,swiglu]"], {**ROPE, "regions": "rope+swiglu"}, {**ROPE, "regions": "rope+swiglu"}),
        ([f"+{KEY}=paper"], {**ROPE, "regions": "rope+swiglu+add_rms_norm"}, {**ROPE, "regions": "rope+swiglu+add_rms_norm"}),
        ([f"+{KEY}={{regions: rope, engine: fp32}}"], {**ROPE, "engine": "fp32"}, {**ROPE, "engine": "fp32"}),
        ([f"+{KEY}=rope", "actor_rollout_ref.rollout.enforce_eager=True"], {**ROPE, "engine": "vllm_cuda"}, {**ROPE, "engine": "vllm_cuda"}),
        ([f"+{KEY}=rope", "trainer.device=cpu"], {**ROPE, "engine": "vllm_compiled"}, {**ROPE, "engine": "vllm_compiled"}),
        (["+rounding_align=rope"], ROPE, ROPE),
        (["+rounding_align=none"], "none", "none"),
        (["+rounding_align=rope", f"{REF}=none"], ROPE, "none"),
        ([f"+{KEY}=rope", "actor_rollout_ref.actor.strategy=fsdp2"], ROPE, ROPE),
        ([f"+{KEY}=rope", "actor_rollout_ref.model.use_fused_kernels=True"], ROPE, ROPE),
    ],
)  # fmt: skip
def test_accepted_and_resolved(config, overrides, actor, ref):
    found = config(*overrides)
    validate(found)
    assert values(found) == [actor, ref]


@pytest.mark.parametrize("value", ["none", "rope", "swiglu", "add_rms_norm", "carry", "paper", "all"])
def test_overlay_sets_both_without_touching_target(config, value):
    found, stock = config(f"+rounding_align={value}"), config()
    assert values(found) == [value, value]
    for role in ("actor", "ref"):
        del found.actor_rollout_ref[role].rounding_align
    assert found == stock


def test_yaml_that_extends_verls_config(config, tmp_path):
    text = """
        defaults: [ppo_trainer, _self_]
        hydra: {searchpath: ["pkg://verl.trainer.config"]}
        actor_rollout_ref: {actor: {rounding_align: rope}}
    """
    (tmp_path / "mine.yaml").write_text(text)
    found = config(config_name="mine", context=initialize_config_dir(str(tmp_path), version_base=None))
    validate(found)
    assert values(found) == [ROPE, ROPE]


def test_without_the_key_the_config_is_left_alone(config, capsys):
    found = config()
    validate(found)
    assert found == config() and "rounding_align" not in capsys.readouterr().out


def test_the_driver_says_once_what_will_be_aligned(config, capsys):
    validate(config(f"+{KEY}=rope", f"+{REF}=none", "trainer.device=cpu"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "rounding_align" in line]
    assert lines == ["rounding_align: actor rope: hf_eager -> vllm_compiled (rollout vllm 0.30.0, compiled, cpu)"]


def test_verl_itself_refuses_the_key(config):
    """Negative control: without the hooks the key stops verl, so a plugin that failed to load is not silent."""
    from hydra.errors import InstantiationException
    from verl.utils.config import validate_config

    with pytest.raises(InstantiationException, match="unexpected keyword argument 'rounding_align'"):
        validate_config.__wrapped__(config(f"+{KEY}=rope"), True, False)


# ------------------------------------------------------------------------------------------------------------ errors

CHOICES = "choose from none, rope, swiglu, add_rms_norm, carry, paper, all, auto (join with +)"
LIGER = (
    "actor_rollout_ref.model.use_liger=True: Liger's kernels replace rope, swiglu, add_rms_norm, carry, so {}='swiglu' "
    "cannot be applied; set use_liger=False or rounding_align=none"
)
ERRORS = {
    "unknown region": ([f"+{KEY}=ropee"], f"{KEY}='ropee': unknown region 'ropee'; {CHOICES}"),
    "ref": ([f"+{KEY}=rope", f"+{REF}=ropee"], f"{REF}='ropee': unknown region 'ropee'; {CHOICES}"),
    "type": (
        [f"+{KEY}=3"],
        f"{KEY}=3: expected a name, names joined with +, or a list of names from none, rope, swiglu, add_rms_norm, "
        "carry, paper, all, auto",
    ),
    "preset": (
        [f"+{KEY}={{regions: rope, engine: vllm}}"],
        f"{KEY}.regions engine='vllm': unknown engine preset 'vllm'; choose from hf_eager, vllm_compiled, "
        "vllm_compiled_split, vllm_cpu, vllm_cuda, vllm_cuda_0_23, vllm_cuda_0_20, vllm_cuda_0_19, fp32",
    ),
    "engine": (
        [f"+{KEY}=rope", "actor_rollout_ref.rollout.name=sglang"],
        "actor_rollout_ref.rollout.name='sglang': no rounding preset for this rollout engine; choose from vllm",
    ),
    "device": (
        [f"+{KEY}=rope", "trainer.device=npu"],
        "actor_rollout_ref.rollout.name='vllm': no rounding preset for vllm (compiled) on device 'npu'",
    ),
    "strategy": (
        [f"+{KEY}=rope", "model_engine=megatron"],
        f"actor_rollout_ref.actor.strategy='megatron': {KEY}='rope' works with fsdp, fsdp2",
    ),
    "torchtitan": (
        [f"+{KEY}=rope", "model_engine=torchtitan"],
        f"actor_rollout_ref.actor.strategy='torchtitan': {KEY}='rope' works with fsdp, fsdp2",
    ),
    "veomni": (
        [f"+{KEY}=rope", "model_engine=veomni"],
        f"actor_rollout_ref.actor.strategy='veomni': {KEY}='rope' works with fsdp, fsdp2",
    ),
    "ref strategy": (
        [f"+{REF}=rope", "actor_rollout_ref.ref.strategy=veomni"],
        f"actor_rollout_ref.ref.strategy='veomni': {REF}='rope' works with fsdp, fsdp2",
    ),
    "liger": ([f"+{KEY}=swiglu", "actor_rollout_ref.model.use_liger=True"], LIGER.format(KEY)),
    "liger, ref": ([f"+{REF}=swiglu", "actor_rollout_ref.model.use_liger=True"], LIGER.format(REF)),
    "tiled MLP": (
        [f"+{KEY}=paper", "actor_rollout_ref.model.tiled_mlp.enabled=True"],
        "actor_rollout_ref.model.tiled_mlp.enabled=True: it replaces the MLP's forward, so "
        f"{KEY}='rope+swiglu+add_rms_norm' cannot be applied; set it to False or leave out swiglu",
    ),
    "Ulysses": (
        [f"+{KEY}=rope", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2: "
        f"{KEY}='rope' has not been tested with Ulysses sequence parallelism; set it to 1 or rounding_align=none",
    ),
    "empty list": (
        [f"+{KEY}=[]"],
        f"{KEY}=[]: expected a name, names joined with +, or a list of names from none, rope, swiglu, add_rms_norm, "
        "carry, paper, all, auto",
    ),
    **{
        f"key under {place or 'the root'}": (
            [f"+{place}rounding_align=rope"],
            f"{place}rounding_align='rope': nothing reads this key here; choose from {KEY}, {REF}, or the overlay "
            "+rounding_align=NAME on the command line",
        )
        for place in ("", "trainer.", "actor_rollout_ref.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.")
    },
    "metrics, key at the root": (
        ["+rounding_align_metrics=True"],
        "rounding_align_metrics=True: nothing reads this key here; choose trainer.rounding_align_metrics",
    ),
    "fp32": (
        [f"+{KEY}=rope", "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32"],
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype='fp32': the trainer computes in fp32 and rounds "
        f"nothing, so there is nothing for {KEY}='rope' to align; choose bf16 or fp16, or rounding_align=none",
    ),
    "two dtypes": (
        [f"+{KEY}=rope", "actor_rollout_ref.rollout.dtype=half"],
        "actor_rollout_ref.rollout.dtype='half': actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype is bf16; "
        f"{KEY}='rope' needs trainer and engine in one dtype",
    ),
    "V0": (
        [f"+{KEY}=rope", "trainer.use_v1=False"],
        "trainer.use_v1=False: rounding_align works with the V1 trainer; set trainer.use_v1=True",
    ),
    "LoRA": (
        [f"+{KEY}=rope", f"+{REF}=none", "actor_rollout_ref.model.lora_rank=8"],
        f"{REF}='none': with LoRA the reference runs on the actor's model, which has {ROPE!r}; leave out the ref's own value",
    ),
    "batch invariant": (
        [f"+{KEY}=rope", "actor_rollout_ref.rollout.full_determinism=True"],
        "actor_rollout_ref.rollout.full_determinism=True (or VLLM_BATCH_INVARIANT=1): vLLM's batch-invariant kernels round "
        "elsewhere and no preset covers them; switch it off, or let the engine be asked: rounding_align=auto",
    ),
    "quantized": (
        [f"+{KEY}=rope", "actor_rollout_ref.rollout.quantization=fp8"],
        f"actor_rollout_ref.rollout.quantization: no preset covers a quantized rollout; switch it off, {ESCAPE}",
    ),
    "Transformers' models": (
        [f"+{KEY}=rope", f"+{VLLM}.model_impl=transformers"],
        f"{VLLM}.model_impl='transformers': it moves vLLM's rounding and no preset covers it; leave it out, {ESCAPE}",
    ),
    "compilation mode": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.mode=1"],
        f"{VLLM}.compilation_config.mode=1: presets cover 0 (no compilation) and 3 (vLLM's default) only",
    ),
    "custom ops": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.custom_ops=[+rms_norm]"],
        f"{VLLM}.compilation_config.custom_ops=['+rms_norm']: it moves vLLM's rounding; presets cover ['none'] only "
        "(the default here); leave it out, or let the engine be asked: rounding_align=auto",
    ),
    "fusion pass": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.pass_config.enable_qk_norm_rope_fusion=True"],
        f"{VLLM}.compilation_config.pass_config.enable_qk_norm_rope_fusion=True: it fuses across regions and no preset "
        f"covers it; set it to False, {ESCAPE}",
    ),
    "unknown compilation setting": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.splitting_ops=[]"],
        f"{VLLM}.compilation_config.splitting_ops=[]: it may move vLLM's rounding and no preset covers it; leave it out, "
        f"{ESCAPE}",
    ),
    "tensor parallel": (
        [f"+{KEY}=add_rms_norm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2: vLLM may fuse the all-reduce with add and norm, which moves "
        f"the rounding of {KEY}='add_rms_norm'; set "
        f"{VLLM}.compilation_config.pass_config.fuse_allreduce_rms=False, or leave out add_rms_norm",
    ),
    "metrics without log-probs": (
        ["+trainer.rounding_align_metrics=True", "actor_rollout_ref.rollout.calculate_log_probs=False"],
        "trainer.rounding_align_metrics=True cannot be met: actor_rollout_ref.rollout.calculate_log_probs=False: the "
        "rollout engine returns no log-probs",
    ),
    "metrics in bypass mode": (
        ["+trainer.rounding_align_metrics=True", "algorithm.rollout_correction.bypass_mode=True"],
        "trainer.rounding_align_metrics=True cannot be met: algorithm.rollout_correction.bypass_mode=True: the trainer "
        "computes no log-probs of its own",
    ),
    "metrics switch": (
        ["+trainer.rounding_align_metrics=yess"],
        "trainer.rounding_align_metrics='yess': choose from true, false, null (null: on where there are log-probs)",
    ),
    "metrics, V0": (
        ["+trainer.rounding_align_metrics=False", "trainer.use_v1=False"],
        "trainer.rounding_align_metrics=False: only the V1 trainer reads it; set trainer.use_v1=True or leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_the_driver_refuses(updated, case):
    overrides, message = ERRORS[case]
    with pytest.raises(ValueError) as error:
        validate(updated(*overrides))
    assert str(error.value) == message


@pytest.mark.parametrize("case", [case for case in ERRORS if not case.startswith(("metrics", "key under"))])
def test_the_same_settings_are_accepted_with_none(updated, case):
    """Negative control: it is the alignment that is refused, not the setting."""
    overrides = [f"+{KEY}=none" if KEY in o else f"+{REF}=none" if REF in o else o for o in ERRORS[case][0]]
    assert set(driver.prepare(updated(*dict.fromkeys(overrides))).values()) == {"none"}


def test_unsupported_family(updated):
    found = updated(f"+{KEY}=rope", model_type="gemma2")
    path = found.actor_rollout_ref.model.path
    with pytest.raises(ValueError) as error:
        validate(found)
    assert str(error.value) == (
        f"actor_rollout_ref.model.path={path!r}: model_type='gemma2': unsupported model family 'gemma2'; "
        "choose from llama, mistral, qwen2, qwen3, qwen3_moe"
    )


def test_a_family_that_the_driver_cannot_read_is_left_to_the_workers(updated, capsys):
    found = updated(f"+{KEY}=rope", "actor_rollout_ref.model.path=hdfs://store/model")
    driver.prepare(found)
    assert capsys.readouterr().out.splitlines()[0] == (
        "rounding_align: no config.json to read at hdfs://store/model; the workers check the model's family"
    )


def test_other_releases_of_verl_are_refused(updated, monkeypatch):
    import verl

    monkeypatch.setattr(verl, "__version__", "0.8.0")
    with pytest.raises(ValueError) as error:
        validate(updated(f"+{KEY}=rope"))
    assert str(error.value) == (
        "rounding_align works with verl >=0.9,<0.10 (tested with 0.9.1); verl 0.8.0 is installed"
    )


def test_other_releases_of_transformers_are_refused(updated, monkeypatch):
    monkeypatch.setattr("verl_rounding_align.trainers.huggingface.transformers.__version__", "4.57.0")
    with pytest.raises(ValueError) as error:
        validate(updated(f"+{KEY}=rope"))
    assert (
        str(error.value)
        == "rounding_align works with transformers >=5.5,<5.17 (tested with 5.10.4 and 5.16.1); transformers 4.57.0 is installed"
    )


@pytest.mark.parametrize(
    "overrides, eager",
    [
        ([], False),
        (["actor_rollout_ref.rollout.enforce_eager=True"], True),
        ([f"+{VLLM}.enforce_eager=True"], True),
        ([f"+{VLLM}.compilation_config.mode=0"], True),
        ([f"+{VLLM}.compilation_config.mode=NONE"], True),
        ([f"+{VLLM}.compilation_config.level=0"], True),
        ([f"+{VLLM}.compilation_config.mode=VLLM_COMPILE"], False),
        ([f"+{VLLM}.compilation_config='{{\"mode\": 0}}'"], True),
        ([f"+{VLLM}.compilation_config.mode=0", f"+{VLLM}.compilation_config.custom_ops=[all]"], True),
        ([f"+{VLLM}.compilation_config.custom_ops=[none]"], False),
        ([f"+{VLLM}.compilation_config.cudagraph_mode=PIECEWISE"], False),
    ],
)
def test_the_rollouts_mode_is_read_wherever_it_is_set(updated, overrides, eager):
    config = updated(*overrides)
    found = settings.rollout_engine(config.actor_rollout_ref.rollout, config.trainer.device)
    assert (found.eager, found.device) == (eager, "cuda")


def test_a_switched_off_fusion_makes_tensor_parallel_acceptable(updated):
    off = f"+{VLLM}.compilation_config.pass_config.fuse_allreduce_rms=False"
    driver.prepare(updated(*ERRORS["tensor parallel"][0], off))


# ------------------------------------------------------------------------------------------------------ a probed engine

EAGER = verified("vllm_cpu")


def probed(note="", **evidence):
    """Return the preset that a probe would give: vLLM-CPU's eager points, under a name of their own."""
    row = presets.get("vllm_cpu")
    return replace(row, name="probed-1234", note=note, evidence={**row.evidence, **evidence})


@pytest.fixture
def asked(monkeypatch):
    """Replace the probe; return the list of (model, Rollout, key) that it was asked for."""
    calls = []

    def probe(model, rollout, key):
        calls.append((model, rollout, key))
        return probed(), "probed now, FILE"

    monkeypatch.setattr("verl_rounding_align.engines.auto.probe", probe)
    return calls


@pytest.mark.parametrize("value", ["auto", "{regions:all,engine:auto}", "{regions:auto}"])
def test_auto_is_resolved_in_the_driver_and_travels_with_the_config(updated, asked, value, capsys):
    config = updated(f"+{KEY}={value}", "actor_rollout_ref.rollout.enforce_eager=True", "trainer.device=cpu")
    written = driver.prepare(config)
    (call,) = asked  # once for both roles
    assert call[0] == config.actor_rollout_ref.model.path
    assert (call[1].version, call[1].device, call[1].mode) == ("0.30.0", "cpu", "eager")
    assert written["actor"] == written["ref"] and written["actor"]["engine"] == probed().as_dict()
    section = OmegaConf.create({"actor": {"rounding_align": written["actor"]}, "ref": {}})
    plan = workers._requests(section)["actor"]  # as a worker reads it
    assert plan == parse_plan("all", probed()) and plan.engine == "probed-1234"
    assert "actor rope+swiglu+add_rms_norm+carry: hf_eager -> probed-1234" in capsys.readouterr().out


def test_auto_probes_with_the_settings_that_presets_refuse(updated, asked):
    custom = f"+{VLLM}.compilation_config.custom_ops=[+rms_norm]"
    driver.prepare(updated(f"+{KEY}=auto", custom, "actor_rollout_ref.rollout.full_determinism=True"))
    assert asked[0][1].compilation == {"custom_ops": ["+rms_norm"]}
    assert asked[0][1].environment == {"VLLM_BATCH_INVARIANT": "1"}
    for name in ("quantized", "Transformers' models", "fusion pass", "compilation mode"):
        overrides, message = ERRORS[name]
        with pytest.raises(ValueError) as error:
            driver.prepare(updated(f"+{KEY}=auto", *overrides[1:]))
        assert str(error.value) == message
    assert len(asked) == 1


def test_a_probe_of_one_rank_does_not_speak_for_a_fused_all_reduce(updated, monkeypatch):
    compiled = replace(probed(), device="cuda", eager=False)
    monkeypatch.setattr("verl_rounding_align.engines.auto.probe", lambda *args: (compiled, "probed now, FILE"))
    overrides, message = ERRORS["tensor parallel"]
    assert "vLLM may fuse the all-reduce with add and norm" in message
    for value in ("auto", "{regions:all,engine:auto}"):
        with pytest.raises(ValueError, match="vLLM may fuse the all-reduce with add and norm"):
            driver.prepare(updated(f"+{KEY}={value}", *overrides[1:]))


def test_what_needs_no_plan_is_checked_before_the_probe(updated, asked):
    with pytest.raises(ValueError, match="use_liger=True"):
        driver.prepare(updated(f"+{KEY}=auto", "actor_rollout_ref.model.use_liger=True"))
    assert asked == []


def test_a_group_without_an_exact_answer_is_said(updated, monkeypatch, capsys):
    doubtful = probed("experts: no match, best {} on 99.9970%", swiglu="unproven")
    monkeypatch.setattr("verl_rounding_align.engines.auto.probe", lambda *args: (doubtful, "probed now, FILE"))
    written = driver.prepare(updated(f"+{KEY}=auto"))
    assert written["actor"]["regions"] == "rope+add_rms_norm+carry"
    assert (
        "not exact, left as it is unless asked for by name: experts: no match, best {} on 99.9970%"
        in capsys.readouterr().out
    )


def test_no_exact_answer_at_all_stops(updated, monkeypatch):
    nothing = probed("mlp: no match", **dict.fromkeys(("rope", "swiglu", "add_rms_norm", "carry"), "unproven"))
    monkeypatch.setattr("verl_rounding_align.engines.auto.probe", lambda *args: (nothing, "probed now, FILE"))
    with pytest.raises(ValueError) as error:
        driver.prepare(updated(f"+{KEY}=auto"))
    assert str(error.value) == f"{KEY}='auto': no group has an exact answer, nothing to align (mlp: no match)"


def trainer(actor, ref="none", path="/m"):
    """Return what ``check_engines`` reads of verl's trainer."""
    section = {"actor": {"rounding_align": actor}, "ref": {"rounding_align": ref}, "model": {"path": path}}
    return SimpleNamespace(config=OmegaConf.create({"actor_rollout_ref": section}))


def answers(monkeypatch, *fingerprints, missing=()):
    monkeypatch.setattr(running, "engines", lambda trainer: (list(fingerprints), list(missing)))


NAMED = {"regions": "all", "engine": "vllm_cpu"}
PROBED = {"regions": "all", "engine": probed().as_dict()}
RUN = "run `verl-rounding-align probe --model /m --mode eager` in the engine's environment"


@pytest.mark.parametrize("value", [NAMED, PROBED], ids=["named", "probed"])
def test_the_running_engine_is_verified_once_for_each_role(monkeypatch, capsys, value):
    answers(monkeypatch, EAGER)
    assert running.check_engines(trainer(value, value)) is True
    assert capsys.readouterr().out == "".join(
        f"rounding_align: {role}: engine verified; {EAGER}\n" for role in ("actor", "ref")
    )


@pytest.mark.parametrize(
    ("value", "advice"), [(NAMED, f"{RUN}, or set rounding_align=auto"), (PROBED, RUN)], ids=["named", "probed"]
)
def test_an_engine_that_nobody_verified_is_named_with_what_to_run(monkeypatch, capsys, value, advice):
    newer = replace(EAGER, torch="2.14.0")
    answers(monkeypatch, newer)
    assert running.check_engines(trainer(value)) is False
    name = "vllm_cpu" if value is NAMED else "probed-1234"
    assert capsys.readouterr().out == (
        f"rounding_align: actor: engine unverified: the engine has torch='2.14.0', {name} was verified with '2.13.0'; "
        f"{advice}; {newer}\n"
    )


def test_one_replica_that_contradicts_the_plan_stops_the_run(monkeypatch):
    answers(monkeypatch, EAGER, verified("vllm_compiled"))
    with pytest.raises(RuntimeError) as error:
        running.check_engines(trainer(NAMED))
    assert str(error.value) == (
        f"{KEY}: the running engine contradicts the plan: the engine has mode='compiled', vllm_cpu was verified with 'eager'; "
        "the engine has custom_ops=('none',), vllm_cpu was verified with ('all',); engine: "
        f"{verified('vllm_compiled')}; set rounding_align=auto, or give the engine the settings that the plan was made for"
    )


def test_a_fingerprint_that_is_missing_is_said_and_harms_nothing(monkeypatch, capsys):
    answers(monkeypatch, EAGER, missing=["AttributeError: no"])
    assert running.check_engines(trainer(NAMED)) is False
    line = "rounding_align: actor: engine unverified: its fingerprint is missing: AttributeError: no\n"
    assert line in capsys.readouterr().out


def test_whatever_replicas_answer_becomes_a_fingerprint_or_a_reason(monkeypatch):
    """A handle without the method, a worker that raised, fields of another release of this package, and a good answer."""

    def handle(answer):
        remote = SimpleNamespace(remote=lambda: answer)
        return SimpleNamespace(server_handle=SimpleNamespace(rounding_align_fingerprint=remote))

    def get(answer, timeout):
        assert 0 <= timeout <= running.ENGINE_TIMEOUT
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get", get)
    replicas = [
        SimpleNamespace(server_handle=object()),
        handle(TimeoutError("line\nno answer")),
        handle([{**asdict(EAGER), "new": 1}]),
        handle([{"missing": "why"}]),
        handle([asdict(EAGER), asdict(EAGER)]),
    ]
    found, missing = running.engines(SimpleNamespace(llm_server_manager=SimpleNamespace(get_replicas=lambda: replicas)))
    assert found == [EAGER]
    assert missing == [
        "AttributeError: 'object' object has no attribute 'rounding_align_fingerprint'",
        "TimeoutError: no answer",
        "ValueError: fingerprint: unknown fields ['new'], missing fields []",
        "why",
    ]
    assert running.engines(SimpleNamespace()) == ([], ["the trainer knows no rollout replica"])


def test_fit_asks_the_engines_before_the_first_step(monkeypatch):
    class PPOTrainer:
        steps = 0
        fit = lambda self: setattr(self, "steps", 1)  # noqa: E731
        _setup = _compute_metrics = lambda self, metrics: None

    hooked.on_trainer(SimpleNamespace(PPOTrainer=PPOTrainer))
    answers(monkeypatch, replace(EAGER, mode="compiled"))
    run = PPOTrainer()
    run.config = trainer(NAMED).config
    with pytest.raises(RuntimeError, match="contradicts the plan"):
        run.fit()
    assert run.steps == 0
    for nothing in ({}, {"rounding_align": "none"}):  # nobody is asked
        run.config = OmegaConf.create({"actor_rollout_ref": {"actor": nothing, "ref": {}}})
        run.steps = 0
        run.fit()
        assert run.steps == 1


# ----------------------------------------------------------------------------------------------------------- workers


class Engine:
    """Stand-in for verl's engine: builds a tiny model and runs it once per batch."""

    model_type = "qwen3"

    def __init__(self, **requests):
        self.engine_config = SimpleNamespace(**requests)

    def _build_module(self):
        return tiny(self.model_type, layers=2)

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        return self.module(data).logits


class Aligned(workers.AlignedEngine, Engine):
    pass


def built(value="all", **kwargs):
    engine = Aligned(rounding_align=("actor", parse_plan(value)), **kwargs)
    engine.module = engine._build_module()
    return engine


def test_the_engine_aligns_what_it_builds_and_says_so(capsys):
    engine = built()
    assert capsys.readouterr().out == (
        "rounding_align: qwen3, 2 layers, add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites, hf_eager -> vllm_compiled "
        "(actor, rank 0)\n"
    )
    assert workers._report(engine) == {
        "plan": "rope+swiglu+add_rms_norm+carry: hf_eager -> vllm_compiled",
        "sites": 9,
        "forwards": 0,
        "idle": engine.rounding_alignment.patched,
    }
    engine.forward_backward_batch(tokens(), None)
    assert (workers._report(engine)["forwards"], workers._report(engine)["idle"]) == (1, [])


def test_an_engine_without_a_request_is_untouched():
    engine = Aligned()
    engine.module = engine._build_module()
    assert not any("forward" in module.__dict__ for module in engine.module.modules())
    assert torch.equal(engine.forward_backward_batch(tokens(), None), tiny("qwen3", layers=2)(tokens()).logits)
    assert workers._report(engine) == {"plan": "none", "sites": 0, "forwards": 0, "idle": []}


def test_a_forward_before_the_trainer_read_the_report_stops():
    with pytest.raises(RuntimeError) as error:
        built().forward_backward_batch(tokens(), None)
    assert str(error.value) == (
        "rounding_align: this model is aligned, and the trainer has not read its report; works with the V1 trainer of verl "
        ">=0.9,<0.10 (python -m verl.trainer.main_ppo) where verl_rounding_align is installed for every process"
    )


def test_a_site_that_the_forward_does_not_reach_stops():
    engine = built("swiglu")
    workers._report(engine)
    mlp = engine.module.model.layers[1].mlp
    mlp.forward = type(mlp).forward.__get__(mlp)  # somebody patches over it
    with pytest.raises(RuntimeError) as error:
        engine.forward_backward_batch(tokens(), None)
    assert str(error.value) == (
        "rounding_align: 1 of 2 patched sites were not reached by the forward pass, so something else runs in their place: "
        "model.layers.1.mlp"
    )


@pytest.fixture
def registry(monkeypatch):
    """Return verl's engine registry with stand-in engines for device `test`, vendor `maker`."""
    from verl.workers.engine import BaseEngine, EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "test")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "maker")

    class TestEngine(Engine, BaseEngine):
        pass

    for strategy in ("fsdp", "fsdp2"):
        monkeypatch.setitem(
            EngineRegistry._engines["language_model"],
            strategy,
            {**EngineRegistry._engines["language_model"][strategy], "test": TestEngine},
        )
    return EngineRegistry, TestEngine


@pytest.mark.parametrize("vendor_entry", [False, True])
def test_the_engine_stacks_on_whatever_verl_would_use(registry, vendor_entry):
    engines, base = registry
    if vendor_entry:  # another plugin's engine for this vendor
        base = engines.register("language_model", "fsdp2", device="test", vendor="maker")(type("Other", (base,), {}))
    assert engines.get_engine_cls("language_model", "fsdp2") is base
    cls = workers._register_engine("fsdp2")
    assert engines.get_engine_cls("language_model", "fsdp2") is cls and issubclass(cls, base)
    assert workers._register_engine("fsdp2") is cls  # again: no second layer
    assert engines.get_engine_cls("language_model", "fsdp") is not cls


def test_an_engine_with_another_signature_is_refused(registry):
    engines, base = registry
    base._build_module = lambda self, mesh: None
    with pytest.raises(RuntimeError) as error:
        workers._register_engine("fsdp2")
    assert str(error.value) == (
        "rounding_align was tested with verl 0.9.1, where TestEngine._build_module takes ('self',); here it takes ('self', 'mesh')"
    )


class Worker:
    """Stand-in for verl's TrainingWorker."""

    def __init__(self, config):
        from verl.workers.engine import EngineRegistry

        engine_cls = EngineRegistry.get_engine_cls("language_model", config.engine_config.strategy)
        self.engine = engine_cls(**vars(config.engine_config))
        self.engine.module = self.engine._build_module()


@pytest.fixture
def worker_group(registry):
    """Return a function: (actor value, ref value) -> worker whose init_model went through the hook."""
    from verl.single_controller.base.decorator import Dispatch, register

    class ActorRolloutRefWorker:
        actor_worker_cls = ref_worker_cls = Worker
        hooked = True

        def __init__(self, actor, ref):
            section = {"actor": {"strategy": "fsdp2"}, "ref": {"strategy": "fsdp2"}}
            for role, value in (("actor", actor), ("ref", ref)):
                if value is not ...:
                    section[role]["rounding_align"] = value
            self.config = OmegaConf.create(section)
            OmegaConf.set_struct(self.config, True)

        def init_model(self):
            for role in ("actor", "ref"):
                assert dict(self.config[role]) == {"strategy": "fsdp2"}  # verl's dataclass would refuse more
                engine = SimpleNamespace(strategy="fsdp2")
                worker_cls = getattr(self if self.hooked else type(self), f"{role}_worker_cls")
                worker = worker_cls(config=SimpleNamespace(model_type="language_model", engine_config=engine))
                setattr(self, role, worker)

    module = SimpleNamespace(ActorRolloutRefWorker=ActorRolloutRefWorker, register=register, Dispatch=Dispatch)
    workers.on_workers(module)
    return ActorRolloutRefWorker


def test_each_role_gets_its_own_plan(worker_group):
    worker = worker_group(ROPE, {"regions": "swiglu", "engine": "vllm_compiled"})
    worker.init_model()
    report = worker.rounding_align_report()
    assert {role: (r["plan"], r["sites"]) for role, r in report.items()} == {
        "actor": ("rope: hf_eager -> vllm_compiled_split", 2),
        "ref": ("swiglu: hf_eager -> vllm_compiled", 2),
    }


@pytest.mark.parametrize("value", [..., "none", None])
def test_a_worker_without_a_plan_uses_verls_engine(worker_group, registry, value):
    worker = worker_group(value, value)
    worker.init_model()
    assert type(worker.actor.engine) is registry[1] and not isinstance(worker.ref.engine, workers.AlignedEngine)
    assert worker.rounding_align_report()["actor"]["sites"] == 0


def test_an_engine_hook_that_did_not_run_stops(worker_group):
    worker = worker_group(ROPE, "none")
    worker.hooked = False
    with pytest.raises(RuntimeError) as error:
        worker.init_model()
    assert str(error.value) == (
        f"{KEY} was asked for and TestEngine built its model without it (tested with verl 0.9.1)"
    )


def test_a_value_that_the_driver_has_not_checked_stops(worker_group):
    with pytest.raises(RuntimeError) as error:
        worker_group("rope", "none").init_model()
    assert str(error.value) == (
        f"{KEY}='rope' was not checked by the driver: verl_rounding_align must be installed where verl.trainer.main_ppo runs, "
        "and VERL_USE_EXTERNAL_PLUGINS must not exclude it"
    )


def test_the_hooks_reach_the_installed_verl():
    """The entry point is installed, and each hook has found what it changes, with verl's own marks left on it."""
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.config import validate_config
    from verl.utils.debug.metrics import calculate_debug_metrics
    from verl.workers.engine_workers import ActorRolloutRefWorker

    hooked = [PPOTrainer._setup, PPOTrainer.fit, PPOTrainer._compute_metrics, validate_config, calculate_debug_metrics]
    assert all(function._rounding_align for function in [*hooked, ActorRolloutRefWorker.init_model])
    marks = getattr(ActorRolloutRefWorker.init_model, MAGIC_ATTR)
    assert marks == getattr(ActorRolloutRefWorker.init_model.__wrapped__, MAGIC_ATTR)
    assert getattr(ActorRolloutRefWorker.rounding_align_report, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL


def test_fused_kernels_leave_every_site_in_use():
    """verl's fused language-model head replaces the outermost forward only, so the driver lets it pass."""
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    module = tiny("qwen3", layers=2)
    cls, original = type(module), type(module).forward
    try:
        patch_forward_with_backends(module, use_fused_kernels=True, fused_kernels_backend="torch")
        alignment = align(module, "all", backend="eager")
        assert cls.forward is not original
        module(input_ids=tokens(), temperature=1.0, return_dict=True)
    finally:
        cls.forward = original
    assert alignment.idle() == []


# ----------------------------------------------------------------------------------------------------- whole processes


def test_the_entry_point_imports_the_standard_library_only():
    """Cost of `import verl` without the key; recipes/import_time measures it."""
    code = "import sys, verl_rounding_align.integrations.verl.plugin; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in run.stdout.split() if name.startswith("verl_rounding_align")}
    assert loaded == {"verl_rounding_align", "verl_rounding_align.postimport", "verl_rounding_align.integrations"} | {
        f"verl_rounding_align.integrations.{name}" for name in ("verl", "verl.hooks", "verl.plugin")
    }
    assert not {"torch", "omegaconf", "packaging", "verl"} & set(run.stdout.split())


def drive(model, *overrides, **environment):
    """Run verl's main with a bad value in a process of its own and return its output."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={model('qwen3')}"]
    command += ["actor_rollout_ref.rollout.name=vllm", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **environment}
    start = time.monotonic()
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    print(f"failed in the driver after {time.monotonic() - start:.1f} s")  # shown by pytest -rP
    assert run.returncode == 1 and "ray init kwargs" not in run.stdout  # verl prints these before it starts Ray
    return run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {},
        dict(
            VERL_USE_EXTERNAL_PLUGINS="none",
            VERL_USE_EXTERNAL_MODULES="verl_rounding_align.integrations.verl.plugin",
        ),
    ],
    ids=["entry point", "VERL_USE_EXTERNAL_MODULES"],
)
def test_verls_main_fails_in_the_driver(model, environment, tmp_path):
    output = drive(model, f"+{KEY}=ropee", f"hydra.run.dir={tmp_path}", **environment)
    assert f"ValueError: {ERRORS['unknown region'][1]}\n" in output


@pytest.mark.slow
def test_verls_main_without_the_plugin_refuses_the_key(model, tmp_path):
    """Negative control of the entry point."""
    output = drive(model, f"+{KEY}=ropee", f"hydra.run.dir={tmp_path}", VERL_USE_EXTERNAL_PLUGINS="none")
    assert ERRORS["unknown region"][1] not in output
