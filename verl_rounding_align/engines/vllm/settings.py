"""The settings of a vLLM rollout, read before it starts: which engine it will be, and what no preset and no probe covers.

The section is verl's `actor_rollout_ref.rollout`, as a mapping or in a YAML file. Every refusal names the setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from .. import ENGINES, presets
from ..auto import Rollout

KEY = "rounding_align"
SECTION = "actor_rollout_ref.rollout"

# engine_kwargs.vllm fields that move vLLM's rounding -> values that leave it where the presets have it
_SAFE_ENGINE_KWARGS = {
    "model_impl": (None, "auto", "vllm"),
    "quantization": (None,),
    "optimization_level": (None, 2),
    "ir_op_priority": (None, {}),
    "kernel_config": (None, {}),
}
# compilation_config fields that have no part in what is stored in which dtype
_SAFE_COMPILATION = {
    "mode",
    "level",
    "custom_ops",
    "pass_config",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "cudagraph_num_of_warmups",
    "cudagraph_copy_inputs",
    "cudagraph_specialize_lora",
    "cache_dir",
    "local_cache_dir",
    "compile_cache_save_format",
    "debug_dump_path",
}
_MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}


def _plain(value):
    """Return a config value as plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def read_rollout(file, device: str, probed: bool):
    """Return the ``Rollout`` that a YAML file describes.

    Args:
        file: path of verl's whole config, or of its `actor_rollout_ref.rollout` alone.
        device: where the file does not say it (`trainer.device`): `cuda` or `cpu`.
        probed: see :func:`rollout_engine`.

    Raises:
        ValueError: the file cannot be read, holds no rollout section, or one that nothing covers.
    """
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.load(file)
    except OSError as error:
        raise ValueError(f"rollout-config={str(file)!r}: cannot be read: {error.strerror}") from error
    places = (OmegaConf.select(config, place) for place in ("actor_rollout_ref.rollout", "rollout"))
    section = next((found for found in places if found is not None), config)
    if not OmegaConf.is_dict(section) or "name" not in section:
        raise ValueError(
            f"rollout-config={str(file)!r}: expected verl's config with actor_rollout_ref.rollout, or that section alone, "
            "with a field 'name'"
        )
    return rollout_engine(section, OmegaConf.select(config, "trainer.device") or device, probed)


def rollout_engine(rollout, device: str, probed: bool = False):
    """Return the ``Rollout`` that verl will start for a rollout section.

    Reads `{name, enforce_eager, dtype, quantization, qat, full_determinism, engine_kwargs.vllm}`, the installed release
    and the environment. A setting that moves the engine's rounding is refused, unless a probe can run with it.

    Args:
        rollout: verl's `actor_rollout_ref.rollout`.
        device: verl's `trainer.device`.
        probed: whether the points come from a probe of this engine; presets cover the default settings only.

    Raises:
        ValueError: an engine that is not known, or a setting that nothing covers.
    """
    prefix = SECTION
    if rollout.name != "vllm":
        presets.resolve(rollout.name, "0", "cuda", False, key=f"{prefix}.name")  # raises, naming the engines it knows
    escape = f"or name the engine's preset: {KEY}={{regions: ..., engine: ...}}"
    ask = f"or let the engine be asked: {KEY}=auto"
    environment = {}
    if rollout.get("full_determinism", False) or os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        environment["VLLM_BATCH_INVARIANT"] = "1"
        if not probed:
            raise ValueError(
                f"{prefix}.full_determinism=True (or VLLM_BATCH_INVARIANT=1): vLLM's batch-invariant kernels round elsewhere "
                f"and no preset covers them; switch it off, {ask}"
            )
    if rollout.get("quantization") is not None or (rollout.get("qat") or {}).get("enable", False):
        raise ValueError(f"{prefix}.quantization: no preset covers a quantized rollout; switch it off, {escape}")
    prefix += ".engine_kwargs.vllm"
    kwargs = _plain((rollout.get("engine_kwargs") or {}).get("vllm") or {})
    kwargs = {name.replace("-", "_"): value for name, value in kwargs.items()}
    for name, safe in _SAFE_ENGINE_KWARGS.items():
        if kwargs.get(name) not in safe:
            raise ValueError(
                f"{prefix}.{name}={kwargs[name]!r}: it moves vLLM's rounding and no preset covers it; leave it out, {escape}"
            )
    compilation = kwargs.get("compilation_config") or {}
    if isinstance(compilation, str):
        compilation = json.loads(compilation)
    eager = bool(kwargs.get("enforce_eager", rollout.get("enforce_eager", False)))
    eager = _check_compilation(compilation, eager, f"{prefix}.compilation_config", escape, ask, probed)
    moves = {"custom_ops": list(compilation["custom_ops"])} if compilation.get("custom_ops") else {}
    if device == "cuda":
        import torch

        device = "rocm" if torch.version.hip else "cuda"
    name = rollout.get("dtype", "bfloat16")
    dtype = {"half": "float16", "fp16": "float16", "bf16": "bfloat16"}.get(name, name)
    return Rollout(_vllm_version(), device, eager, dtype, moves, environment)


def _check_compilation(compilation: Mapping, eager: bool, prefix: str, escape: str, ask: str, probed: bool) -> bool:
    """Return whether vLLM runs eager kernels, from ``enforce_eager`` and its compilation_config."""
    modes = set()
    for name in ("mode", "level"):
        value = compilation.get(name)
        if value is None:
            continue
        mode = _MODES.get(str(value).upper(), value)
        if str(mode) not in ("0", "3"):
            raise ValueError(f"{prefix}.{name}={value!r}: presets cover 0 (no compilation) and 3 (vLLM's default) only")
        modes.add(int(mode))
    eager = eager or 0 in modes
    default = "all" if eager else "none"
    if not probed and list(compilation.get("custom_ops") or [default]) != [default]:
        raise ValueError(
            f"{prefix}.custom_ops={compilation['custom_ops']!r}: it moves vLLM's rounding; "
            f"presets cover [{default!r}] only (the default here); leave it out, {ask}"
        )
    for name, value in (compilation.get("pass_config") or {}).items():
        if value is True and name not in ("eliminate_noops", "enable_noop"):
            raise ValueError(
                f"{prefix}.pass_config.{name}=True: it fuses across regions and no preset covers it; set it to False, {escape}"
            )
    unknown = sorted(name for name, value in compilation.items() if value is not None and name not in _SAFE_COMPILATION)
    if unknown:
        raise ValueError(
            f"{prefix}.{unknown[0]}={compilation[unknown[0]]!r}: it may move vLLM's rounding and no preset covers it; "
            f"leave it out, {escape}"
        )
    return eager


def check_tensor_parallel(rollout, preset, plan, key: str) -> None:
    """vLLM may fuse the all-reduce with add and norm (default on Hopper with FlashInfer): presets are for one rank."""
    groups = [g for g in ("add_rms_norm", "carry") if g in plan.groups]
    if not groups or preset.device != "cuda" or preset.eager or rollout.tensor_model_parallel_size == 1:
        return
    compilation = (_plain(rollout.get("engine_kwargs") or {}).get("vllm") or {}).get("compilation_config") or {}
    if isinstance(compilation, str):
        compilation = json.loads(compilation)
    if (compilation.get("pass_config") or {}).get("fuse_allreduce_rms") is not False:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: vLLM may fuse the "
            f"all-reduce with add and norm, which moves the rounding of {key}={'+'.join(groups)!r}; set "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.pass_config.fuse_allreduce_rms=False, "
            f"or leave out {' and '.join(groups)}"
        )


def _vllm_version() -> str:
    found = ENGINES["vllm"].installed()
    if found is None:
        raise ValueError(
            "actor_rollout_ref.rollout.name='vllm': vLLM is not installed where the driver runs, and its release selects the "
            f"preset; install it, or name the preset: {KEY}={{regions: ..., engine: ...}}"
        )
    return found
