"""verl's own trainer config, composed as its command line does, for tests in any room."""

from __future__ import annotations

import functools
from dataclasses import replace

from hydra import compose, initialize_config_module

from verl_rounding_align.engines import presets
from verl_rounding_align.integrations.verl.config import plain
from verl_rounding_align.plan import Plan

KEY = "actor_rollout_ref.actor.rounding_align"
REF = "actor_rollout_ref.ref.rounding_align"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


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


def validate(config, use_reference_policy=True):
    """Run verl's own check of its config, as its main does in the driver."""
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=use_reference_policy, use_critic=False)


def values(config) -> list:
    """Return the key's value of actor and ref: as the user wrote it, or the plan that the driver wrote back."""
    found = []
    for role in ("actor", "ref"):
        value = plain(config.actor_rollout_ref[role].get("rounding_align"))
        found.append(str(Plan.from_dict(value)) if isinstance(value, dict) and "plan" in value else value)
    return found


def probed(note="", **evidence):
    """Return the preset that a probe would give: vLLM-CPU's eager points, under a name of their own."""
    row = presets.get("vllm_cpu")
    return replace(row, name="probed-1234", note=note, evidence={**row.evidence, **evidence})
