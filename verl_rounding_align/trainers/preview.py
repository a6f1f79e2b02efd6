"""What a plan would patch in a model, from its config alone: the model is built on the meta device, without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from .. import families
from ..engines import ENGINES, auto, presets
from ..files import read_yaml, select
from ..plan import AUTO, Request, find_preset, parse_request
from .alignment import Alignment
from .huggingface import align


def installed_vllm() -> str:
    """Return the installed vLLM's release.

    Raises:
        ValueError: there is none.
    """
    found = ENGINES["vllm"].installed()
    if found is not None:
        return found
    raise ValueError("vllm=None: vLLM is not installed here; give its release with --vllm, or a preset with --engine")


def engine_preset(model: str, engine: str | None, rollout: auto.Rollout, key: str = "engine") -> presets.Preset:
    """Return the preset of an engine, for one model.

    Args:
        model: folder or hub name with a ``config.json``.
        engine: a preset's name, a probe's file, ``auto`` to probe ``rollout``, None for the preset that covers it.
        rollout: the engine as it will run.
    """
    if engine is None:
        return presets.resolve(rollout.engine, rollout.version, rollout.device, rollout.eager)
    if engine == AUTO:
        return auto.probe(model, rollout, key)[0]
    return find_preset(engine, key, spec=auto.sized(model, rollout), mode=rollout.mode)


def request(
    regions: str | None,
    engine: str | None,
    auto: bool,
    rollout_config: Path | None = None,
    key: str = "actor_rollout_ref.actor.rounding_align",
) -> Request:
    """Return what a command line asks for.

    Args:
        regions: value of the key; None for the config's own, else ``auto`` where the engine is probed, else ``rope``.
        engine: a preset's name or a probe's file; wins over the value's own.
        auto: whether the engine is to be probed.
        rollout_config: YAML that may hold the framework's key.
        key: where the framework's config holds the value.

    Raises:
        ValueError: an illegal value, or both ``engine`` and ``auto``.
    """
    if auto and engine:
        raise ValueError(f"engine={engine!r}: --auto probes the engine; leave out one of the two")
    value: object = regions
    if value is None and rollout_config is not None:
        option = "rollout-config"
        value = select(read_yaml(rollout_config, option), key, rollout_config, option)
    asked = parse_request(value if value is not None else AUTO if auto else "rope")
    return replace(asked, engine=AUTO if auto else engine or asked.engine)


def rollout(version: str | None, device: str | None, eager: bool, asked: Request) -> auto.Rollout:
    """Return the engine that three options describe.

    Args:
        version: vLLM's release, None for the installed one.
        device: None for ``cuda``, or for what is here if the engine is probed.
        eager: ``enforce_eager``.
        asked: what for; an engine that is named needs no release.
    """
    if device is None:
        device = "cpu" if asked.auto and not torch.cuda.is_available() else "cuda"
    named = asked.engine not in (None, AUTO)
    return auto.Rollout(version or ("0" if named else installed_vllm()), device, eager)


def preview(model: str, asked: Request, where: auto.Rollout) -> Alignment:
    """Return the Alignment of a weightless copy of ``model``: its ``.plan`` and ``.sites``.

    Args:
        model: folder or hub name with a ``config.json``.
        asked: what is to be aligned, to which engine.
        where: the engine as it will run; see :func:`engine_preset`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    families.get(config.model_type)
    preset = engine_preset(model, AUTO if asked.auto else asked.engine, where)
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return align(weightless, asked.plan(preset))
