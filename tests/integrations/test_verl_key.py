"""The key in verl's config: where it is accepted, what the driver makes of it, and what it refuses.

Contract: a bad value or setting fails in the driver, before Ray starts, with the key that the user set, the value and the
choices; an override that a message proposes can be copied; without the key nothing in verl's config changes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from verl_config import KEY, REF, ROLLOUT, VLLM, probed, validate, values

from verl_rounding_align.engines.vllm import settings
from verl_rounding_align.integrations.verl import NotApplied, driver, hooks
from verl_rounding_align.integrations.verl import config as keys
from verl_rounding_align.plan import parse_plan

pytestmark = pytest.mark.verl
ESCAPE = f"or set ++{KEY}=none"
ASK = f"or let the engine be asked: ++{KEY}=auto"
NONE = f"++{KEY}=none"


# -------------------------------------------------------------------------------------------------------- acceptance

ROPE = "rope: hf_eager -> vllm_compiled_split"


@pytest.mark.parametrize(
    "overrides, actor, ref",
    [
        ([f"+{KEY}=rope"], ROPE, ROPE),
        ([f"+{KEY}=none"], "none", "none"),
        ([f"+{KEY}=null"], "none", "none"),
        ([f"+{KEY}=rope", f"+{REF}=none"], ROPE, "none"),
        ([f"+{REF}=rope"], "none", ROPE),
        ([f"+{KEY}=carry+rope"], *["rope+carry: hf_eager -> vllm_compiled_split"] * 2),
        ([f"+{KEY}=[rope,swiglu]"], *["rope+swiglu: hf_eager -> vllm_compiled_split"] * 2),
        ([f"+{KEY}=paper"], *["rope+swiglu+add_rms_norm: hf_eager -> vllm_compiled_split"] * 2),
        ([f"+{KEY}={{regions: rope, engine: fp32}}"], *["rope: hf_eager -> fp32"] * 2),
        ([f"+{KEY}=rope", f"{ROLLOUT}.enforce_eager=True"], *["rope: hf_eager -> vllm_cuda"] * 2),
        ([f"+{KEY}=rope", "trainer.device=cpu"], *["rope: hf_eager -> vllm_compiled"] * 2),
        (["+rounding_align=rope"], ROPE, ROPE),
        (["+rounding_align=none"], "none", "none"),
        (["+rounding_align=rope", f"{REF}=none"], ROPE, "none"),
        ([f"+{KEY}=rope", "actor_rollout_ref.actor.strategy=fsdp2"], ROPE, ROPE),
        ([f"+{KEY}=rope", "actor_rollout_ref.model.use_fused_kernels=True"], ROPE, ROPE),
        # verl 0.9's engines read tiled_mlp nowhere
        ([f"+{KEY}=paper", "actor_rollout_ref.model.tiled_mlp.enabled=True"], *["rope+swiglu+add_rms_norm: hf_eager -> vllm_compiled_split"] * 2),
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

PARAM = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
CHOICES = "choose from none, rope, swiglu, add_rms_norm, carry, paper, all, auto (join with +)"
LIGER = (
    "actor_rollout_ref.model.use_liger=True: Liger's kernels replace rope, swiglu, add_rms_norm, carry, so {}='swiglu' "
    f"cannot be applied; set actor_rollout_ref.model.use_liger=False or {NONE}"
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
        f"actor_rollout_ref.actor.strategy='megatron': {KEY}='rope' works with fsdp, fsdp2; set {NONE}",
    ),
    "torchtitan": (
        [f"+{KEY}=rope", "model_engine=torchtitan"],
        f"actor_rollout_ref.actor.strategy='torchtitan': {KEY}='rope' works with fsdp, fsdp2; set {NONE}",
    ),
    "veomni": (
        [f"+{KEY}=rope", "model_engine=veomni"],
        f"actor_rollout_ref.actor.strategy='veomni': {KEY}='rope' works with fsdp, fsdp2; set {NONE}",
    ),
    "ref strategy": (
        [f"+{REF}=rope", "actor_rollout_ref.ref.strategy=veomni"],
        f"actor_rollout_ref.ref.strategy='veomni': {REF}='rope' works with fsdp, fsdp2; set ++{REF}=none",
    ),
    # what the reference takes over from the actor is named by the actor's key, and so is a setting that it takes over
    "ref strategy, actor's key": (
        [f"+{KEY}=rope", "actor_rollout_ref.ref.strategy=veomni"],
        f"actor_rollout_ref.ref.strategy='veomni': {KEY}='rope' works with fsdp, fsdp2; set {NONE}",
    ),
    "ref takes over the actor's strategy": (
        [f"+{REF}=rope", "actor_rollout_ref.actor.strategy=veomni"],
        f"actor_rollout_ref.actor.strategy='veomni': {REF}='rope' works with fsdp, fsdp2; set ++{REF}=none",
    ),
    "liger": ([f"+{KEY}=swiglu", "actor_rollout_ref.model.use_liger=True"], LIGER.format(KEY)),
    "liger, ref": ([f"+{REF}=swiglu", "actor_rollout_ref.model.use_liger=True"], LIGER.format(REF).replace(NONE, f"++{REF}=none")),
    "Ulysses": (
        [f"+{KEY}=rope", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
        f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2: {KEY}='rope' has not been tested with Ulysses "
        f"sequence parallelism; set actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1 or {NONE}",
    ),
    "Ulysses, ref takes over the actor's": (
        [f"+{REF}=rope", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size=2: {REF}='rope' has not been tested with Ulysses sequence "
        f"parallelism; set actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 or ++{REF}=none",
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
        [f"+{KEY}=rope", f"+{PARAM}=fp32"],
        f"{PARAM}='fp32': the trainer computes in fp32 and rounds nothing, so there is nothing for {KEY}='rope' to align; set "
        f"++{PARAM}=bf16 or {NONE}",
    ),
    "two dtypes": (
        [f"+{KEY}=rope", f"{ROLLOUT}.dtype=half"],
        f"{ROLLOUT}.dtype='half': {PARAM} is bfloat16; {KEY}='rope' needs trainer and engine in one dtype; set "
        f"{ROLLOUT}.dtype=bfloat16 or +{PARAM}=fp16",
    ),
    "two dtypes, engine_kwargs win": (
        [f"+{KEY}=rope", f"+{VLLM}.dtype=float16"],
        f"{VLLM}.dtype='float16': {PARAM} is bfloat16; {KEY}='rope' needs trainer and engine in one dtype; set "
        f"++{VLLM}.dtype=bfloat16 or +{PARAM}=fp16",
    ),
    "an engine in fp32": (
        [f"+{KEY}=rope", f"+{VLLM}.dtype=float32"],
        f"{VLLM}.dtype='float32': {PARAM} is bfloat16; {KEY}='rope' needs trainer and engine in one dtype; set "
        f"++{VLLM}.dtype=bfloat16",
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
        [f"+{KEY}=rope", f"{ROLLOUT}.full_determinism=True"],
        f"{ROLLOUT}.full_determinism=True: vLLM's batch-invariant kernels round elsewhere and no preset covers them; set "
        f"{ROLLOUT}.full_determinism=False, {ASK}",
    ),
    "quantized": (
        [f"+{KEY}=rope", f"{ROLLOUT}.quantization=fp8"],
        f"{ROLLOUT}.quantization='fp8': quantized layers round elsewhere, and no preset covers it; leave it out, {ESCAPE}",
    ),
    "quantized, the engine's own argument": (
        [f"+{KEY}=rope", f"+{VLLM}.quantization=fp8"],
        f"{VLLM}.quantization='fp8': quantized layers round elsewhere, and no preset covers it; leave it out, {ESCAPE}",
    ),
    "quantized while training": (
        [f"+{KEY}=rope", "actor_rollout_ref.actor.fsdp_config.qat.enable=True"],
        f"actor_rollout_ref.actor.fsdp_config.qat.enable=True: quantized layers round elsewhere and no preset covers it; leave it out, {ESCAPE}",
    ),
    "Transformers' models": (
        [f"+{KEY}=rope", f"+{VLLM}.model_impl=transformers"],
        f"{VLLM}.model_impl='transformers': Transformers' model code inside vLLM rounds elsewhere, and no preset covers it; "
        f"leave it out, {ESCAPE}",
    ),
    "written as on a command line": (
        [f"+{KEY}=rope", f"+{VLLM}.model-impl=transformers"],
        f"{VLLM}.model-impl='transformers': Transformers' model code inside vLLM rounds elsewhere, and no preset covers it; "
        f"leave it out, {ESCAPE}",
    ),
    "KV cache": (
        [f"+{KEY}=rope", f"+{VLLM}.kv_cache_dtype=fp8"],
        f"{VLLM}.kv_cache_dtype='fp8': keys and values would be stored in another format than the model's, and no preset covers it; leave it out, "
        f"{ESCAPE}",
    ),
    "pipeline": (
        [f"+{KEY}=rope", f"+{VLLM}.pipeline_parallel_size=2"],
        f"{VLLM}.pipeline_parallel_size=2: the residual stream is stored where one rank hands it on, and no preset covers it; "
        f"leave it out, {ESCAPE}",
    ),
    "another model for the engine": (
        [f"+{KEY}=rope", f"+{VLLM}.hf_overrides.hidden_act=gelu"],
        f"{VLLM}.hf_overrides.hidden_act='gelu': it changes the engine's model only, and no preset covers it; write it into "
        f"the checkpoint's config.json, which both read, or leave it out, {ESCAPE}",
    ),
    "other angles for the engine": (
        [f"+{KEY}=rope", f"+{VLLM}.hf_overrides='{{\"rope_theta\": 1e6}}'"],
        f"{VLLM}.hf_overrides.rope_theta=1000000.0: the engine would rotate by other angles than the trainer, which is more "
        "than rounding; write it into the checkpoint's config.json, which both read, or leave it out",
    ),
    "other angles for the trainer": (
        [f"+{KEY}=swiglu", "+actor_rollout_ref.model.override_config.rope_scaling={rope_type: yarn, factor: 2.0}"],
        "actor_rollout_ref.model.override_config.rope_scaling={'rope_type': 'yarn', 'factor': 2.0}: the trainer would rotate "
        "by other angles than the engine, which is more than rounding; write it into the checkpoint's config.json, which both "
        "read, or leave it out",
    ),
    "compilation_config is not JSON": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config='mode: 3'"],
        f"{VLLM}.compilation_config='mode: 3': not JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "compilation mode": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.mode=1"],
        f"{VLLM}.compilation_config.mode=1: presets cover 0 (no compilation) and 3 (vLLM's default) only",
    ),
    "custom ops": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.custom_ops=[+rms_norm]"],
        f"{VLLM}.compilation_config.custom_ops=['+rms_norm']: it moves vLLM's rounding; presets cover ['none'] only "
        f"(the default here); leave it out, {ASK}",
    ),
    "fusion pass": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.pass_config.enable_qk_norm_rope_fusion=True"],
        f"{VLLM}.compilation_config.pass_config.enable_qk_norm_rope_fusion=True: it fuses across regions and no preset "
        f"covers it; set ++{VLLM}.compilation_config.pass_config.enable_qk_norm_rope_fusion=False, {ESCAPE}",
    ),
    "unknown compilation setting": (
        [f"+{KEY}=rope", f"+{VLLM}.compilation_config.splitting_ops=[]"],
        f"{VLLM}.compilation_config.splitting_ops=[]: it may move vLLM's rounding and no preset covers it; leave it out, "
        f"{ESCAPE}",
    ),
    **{
        f"tensor parallel, {name}": (
            [f"+{KEY}=add_rms_norm", *overrides],
            f"{key}=2: vLLM may fuse the all-reduce with add and norm, which moves the rounding of {KEY}='add_rms_norm'; set "
            f"+{VLLM}.compilation_config.pass_config.fuse_allreduce_rms=False, or leave out add_rms_norm",
        )
        for name, key, overrides in (
            ("rollout", f"{ROLLOUT}.tensor_model_parallel_size", [f"{ROLLOUT}.tensor_model_parallel_size=2"]),
            ("engine_kwargs win", f"{VLLM}.tensor_parallel_size", [f"+{VLLM}.tensor_parallel_size=2"]),
            (
                "replicas that decode",
                f"{ROLLOUT}.disaggregation.decode_tensor_model_parallel_size",
                [f"{ROLLOUT}.disaggregation.enabled=True", f"{ROLLOUT}.disaggregation.decode_tensor_model_parallel_size=2"],
            ),
        )
    },
    "metrics without log-probs": (
        ["+trainer.rounding_align_metrics=True", "actor_rollout_ref.rollout.calculate_log_probs=False"],
        "trainer.rounding_align_metrics=True cannot be met: actor_rollout_ref.rollout.calculate_log_probs=False: the "
        "rollout engine returns no log-probs; set actor_rollout_ref.rollout.calculate_log_probs=True or leave it out",
    ),
    "metrics in bypass mode": (
        ["+trainer.rounding_align_metrics=True", "algorithm.rollout_correction.bypass_mode=True"],
        "trainer.rounding_align_metrics=True cannot be met: algorithm.rollout_correction.bypass_mode=True: the trainer "
        "computes no log-probs of its own; set algorithm.rollout_correction.bypass_mode=False or leave it out",
    ),
    "metrics switch": (
        ["+trainer.rounding_align_metrics=yess"],
        "trainer.rounding_align_metrics='yess': choose from true, false, null (null: with the key every metric, without "
        "it those that verl's own data give for free)",
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
    overrides = [f"+{KEY}=none" if "rounding_align=" in o else o for o in ERRORS[case][0] if REF not in o]
    assert set(driver.prepare(updated(f"+{KEY}=none", *overrides)).values()) == {"none"}


def proposed(message: str) -> list[str]:
    """Return the overrides that a message tells the user to set, as a shell would hand them on."""
    key = r"(?:actor_rollout_ref|trainer|algorithm)\.[\w.]+"
    return [
        shlex.split(x)[0] for x in re.findall(rf"(?:set|or|asked:|preset:) ('?\+*{key}=(?:\{{[^']*\}}'|\w+))", message)
    ]


PROPOSALS = {case: proposed(message) for case, (_, message) in ERRORS.items()}


def test_the_messages_propose_what_they_should():
    assert PROPOSALS["liger"] == ["actor_rollout_ref.model.use_liger=False", NONE]
    off = f"{VLLM}.compilation_config.pass_config"
    assert PROPOSALS["fusion pass"] == [f"++{off}.enable_qk_norm_rope_fusion=False", f"++{KEY}=none"]
    assert PROPOSALS["tensor parallel, rollout"] == [f"+{off}.fuse_allreduce_rms=False"]
    assert PROPOSALS["V0"] == ["trainer.use_v1=True"] and PROPOSALS["compilation mode"] == []


def test_an_overlay_is_named_by_the_key_that_it_sets(config):
    overrides, message = ERRORS["ref strategy, actor's key"]
    with pytest.raises(ValueError) as error:
        driver.prepare(config("+rounding_align=rope", *overrides[1:]))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("case", "override"),
    [
        pytest.param(case, override, id=f"{case}: {override}")
        for case, found in PROPOSALS.items()
        for override in found
        if case not in ("liger, ref", "veomni", "torchtitan")  # as others
    ],
)
def test_an_override_that_a_message_proposes_can_be_copied(config, monkeypatch, case, override):
    """Behind the user's own overrides, composed by Hydra on verl's real config; what was refused is so no more. A setting
    of the actor may then be refused for the reference, with an override of its own."""
    overrides, number = list(ERRORS[case][0]), PROPOSALS[case].index(override)
    if "auto" in override:
        monkeypatch.setattr("verl_rounding_align.engines.auto.probe", lambda *args: (probed(), "probed now, FILE"))
    overrides.append(override.replace("PRESET", "vllm_cuda"))
    found = config(*overrides)
    try:
        driver.prepare(found)
    except ValueError as error:
        assert ".ref." in str(error) and str(error) != ERRORS[case][1]
        driver.prepare(config(*overrides, proposed(str(error))[number]))


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
    made = driver.prepare(updated(*ERRORS["tensor parallel, rollout"][0], off))
    assert set(made) == {"actor", "ref"} and "none" not in made.values()


# ----------------------------------------------------------------------------------------- settings that do not matter


def test_settings_of_a_reference_that_is_not_used_do_not_matter(updated):
    overrides = [f"+{KEY}=rope", "actor_rollout_ref.ref.strategy=veomni", f"+{REF}=carry"]
    found = updated(*overrides)
    validate(found, use_reference_policy=False)
    assert values(found) == [ROPE, "none"]
    with pytest.raises(ValueError, match="ref.strategy='veomni'"):  # control: where it is used
        driver.prepare(updated(*overrides))
    with pytest.raises(ValueError, match="unknown region 'ropee'"):  # what nobody can mean is still said
        driver.prepare(updated(f"+{KEY}=rope", f"+{REF}=ropee"), use_reference_policy=False)


@pytest.mark.parametrize("name", [name for name, row in settings.SETTINGS.items() if row.done == settings.REFUSED])
def test_every_setting_that_is_refused_has_values_that_are_not(updated, name):
    for safe in settings.SETTINGS[name].safe:
        driver.prepare(updated(f"+{KEY}=rope", f"+{VLLM}.{name}={settings._hydra(safe)}"))
    with pytest.raises(ValueError, match=rf"^{re.escape(VLLM)}\.{name}"):
        driver.prepare(updated(f"+{KEY}=rope", f"+{VLLM}.{name}={'{x:y}' if name == 'hf_overrides' else 'other'}"))


def test_a_head_in_fp32_is_no_matter_to_any_region(updated):
    made = driver.prepare(updated(f"+{KEY}=rope", f"+{VLLM}.hf_overrides.head_dtype=float32"))
    assert made == driver.prepare(updated(f"+{KEY}=rope")) and "none" not in made.values()


def described(model, **fields):
    """Write a config.json, with these fields, for a model of the driver's."""
    folder = Path(model("qwen3")).with_name("described")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
    return f"actor_rollout_ref.model.path={folder}"


def test_angles_that_the_checkpoint_has_anyway_are_accepted(updated, model):
    path = described(model, rope_parameters={"rope_theta": 1e6})
    for where in (f"+{VLLM}.hf_overrides", "+actor_rollout_ref.model.override_config"):
        driver.prepare(updated(path, f"+{KEY}=rope", f"{where}.rope_theta=1e6"))
        with pytest.raises(ValueError, match="rotate by other angles"):
            driver.prepare(updated(path, f"+{KEY}=rope", f"{where}.rope_theta=1e4"))


def test_a_quantized_checkpoint_is_refused(updated, model):
    path = described(model, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError) as error:
        driver.prepare(updated(path, f"+{KEY}=rope"))
    assert str(error.value) == (
        "actor_rollout_ref.model.path: its config.json has a quantization_config (fp8): quantized layers round elsewhere, and "
        f"no preset covers it; take a checkpoint that is not quantized, {ESCAPE}"
    )
    with pytest.raises(
        ValueError, match="quantized layers round elsewhere"
    ):  # a preset that is named covers it no more
        driver.prepare(updated(path, f"+{KEY}={{regions: rope, engine: vllm_cuda}}"))
    driver.prepare(updated(path, f"+{KEY}={{regions: rope, engine: fp32}}"))  # describes no engine


def test_a_compilation_config_that_is_one_text_is_kept_by_the_override(updated):
    key = f"{VLLM}.compilation_config"
    overrides = [f"+{KEY}=paper", "actor_rollout_ref.rollout.tensor_model_parallel_size=2", f"+{key}='{{\"mode\": 3}}'"]
    with pytest.raises(ValueError) as error:
        driver.prepare(updated(*overrides))
    (whole,) = proposed(str(error.value))
    assert whole == f"++{key}={{mode:3,pass_config:{{fuse_allreduce_rms:False}}}}"
    driver.prepare(updated(*overrides, whole))


def test_the_same_angles_in_another_form_are_accepted_and_others_are_not(updated, model):
    path, override = described(model, rope_theta=1e6), "+actor_rollout_ref.model.override_config.rope_parameters"
    driver.prepare(updated(path, f"+{KEY}=rope", f"{override}={{rope_theta: 1e6}}"))
    for other in ("{rope_theta: 1e4}", "{rope_theta: 1e6, rope_type: linear, factor: 2.0}"):
        with pytest.raises(ValueError, match="rotate by other angles"):
            driver.prepare(updated(path, f"+{KEY}=rope", f"{override}={other}"))


def test_a_verl_that_calls_its_config_otherwise_is_left_alone():
    module = SimpleNamespace(validate_config=lambda settings, use_reference_policy, use_critic: "as it is")
    assert driver.on_config(module) == []
    assert module.validate_config({"any": 1}, True, False) == "as it is"


@pytest.mark.parametrize(("stored", "accepted"), [("bfloat16", True), ("float16", False), ("float32", True)])
def test_the_engines_auto_dtype_is_the_checkpoints(updated, model, stored, accepted):
    """fp32 checkpoints are cast to what the platform prefers, which only the engine knows: its fingerprint is judged."""
    config = updated(described(model, dtype=stored), f"+{KEY}=rope", f"+{VLLM}.dtype=auto")
    if accepted:
        driver.prepare(config)
        return
    with pytest.raises(ValueError, match=rf"^{re.escape(VLLM)}\.dtype='auto': "):
        driver.prepare(config)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [f"+{VLLM}.speculative_config={{method: ngram}}"],
            f"{VLLM}.speculative_config: the model itself scores every token that a draft proposes, with kernels for several "
            "tokens",
        ),
        (
            ["actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable_rollout=True"],
            "actor_rollout_ref.model.mtp.enable_rollout=True: the model itself scores every token that a draft proposes, with kernels for "
            "several tokens",
        ),
        (
            ["+actor_rollout_ref.model.override_config.attention_dropout=0.1"],
            "actor_rollout_ref.model.override_config.attention_dropout=0.1: the update drops attention weights at random, "
            "which no engine does; log-probs and metrics are computed without dropout",
        ),
    ],
)
def test_settings_that_are_said(updated, capsys, overrides, line):
    driver.prepare(updated(f"+{KEY}=rope", *overrides))
    assert f"rounding_align: {line}\n" in capsys.readouterr().out
    driver.prepare(updated(f"+{KEY}=rope"))
    assert line not in capsys.readouterr().out


@pytest.mark.parametrize("asked", [f"+{KEY}=rope", f"+{KEY}=none", "+trainer.rounding_align_metrics=True"])
def test_a_method_of_verl_that_a_hook_does_not_find_stops_who_asked(updated, monkeypatch, asked):
    monkeypatch.setitem(hooks.ABSENT, "verl.trainer.ppo.v1.trainer_base", ["PPOTrainer._compute_metrics"])
    with pytest.raises(NotApplied) as error:
        driver.prepare(updated(asked))
    what = "trainer.rounding_align_metrics=True" if "metrics" in asked else "rounding_align"
    assert str(error.value) == (
        f"{what}: verl 0.9.1 has no verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics, which this package extends; "
        "it works with verl >=0.9,<0.10 (tested with 0.9.1)"
    )
    driver.prepare(updated())  # who did not ask does not notice


def test_every_hook_finds_what_it_extends_in_the_installed_verl(updated):
    driver.prepare(updated(f"+{KEY}=rope"))
    assert {module: names for module, names in hooks.ABSENT.items() if names} == {}
    assert set(hooks.ABSENT) == {name for name in hooks.HOOKS if "vllm" not in name}


# ------------------------------------------------------------------------------------------------------ a probed engine


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
    assert written["actor"] == written["ref"] and written["actor"]["preset"] == probed().as_dict()
    plan = keys.plans(OmegaConf.create({"actor": {"rounding_align": written["actor"]}, "ref": {}}))["actor"]
    assert plan == parse_plan("all", probed()) and plan.preset == probed()  # as a worker reads it
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
    overrides, message = ERRORS["tensor parallel, rollout"]
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
    assert written["actor"]["groups"] == ["rope", "add_rms_norm", "carry"]
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


# ----------------------------------------------------------------------------------------------------- whole processes


def test_the_entry_point_imports_the_standard_library_only():
    """Cost of `import verl` without the key; recipes/import_time measures it."""
    code = "import sys, verl_rounding_align.integrations.verl.plugin; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in run.stdout.split() if name.startswith("verl_rounding_align")}
    assert loaded == {"verl_rounding_align", "verl_rounding_align.postimport", "verl_rounding_align.integrations"} | {
        f"verl_rounding_align.integrations.{name}" for name in ("verl", "verl.hooks", "verl.methods", "verl.plugin")
    }
    assert not {"torch", "omegaconf", "packaging", "verl"} & set(run.stdout.split())


def drive(model, *overrides, **environment):
    """Run verl's main with a bad value in a process of its own and return its output."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={model('qwen3')}"]
    command += ["actor_rollout_ref.rollout.name=vllm", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **environment}
    start = time.monotonic()
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
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
