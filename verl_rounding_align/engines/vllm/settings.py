"""A vLLM rollout, read from its settings before it starts: which engine will run, and which settings neither a preset nor a
probe covers.

The settings are a mapping or a YAML file as verl has them (`actor_rollout_ref.rollout`). Every refusal names the setting as
the user wrote it, its value, and what to write instead.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...files import read_yaml, select
from .. import ENGINES, presets
from ..auto import Rollout

KEY = "rounding_align"
SECTION = "actor_rollout_ref.rollout"
ALIGN = f"actor_rollout_ref.actor.{KEY}"
REFUSED, FOLLOWED, SAID = "refused", "followed", "said"


@dataclass(frozen=True)
class Setting:
    """How one of vLLM's engine arguments is treated.

    Args:
        done: ``followed`` (it selects the engine that a plan is for), ``said`` (a line tells the user what it means), or
            ``refused`` unless its value is one of ``safe``.
        safe: values that leave the rounding where presets have it.
        meaning: what it moves, and what is done about it.
    """

    done: str
    safe: tuple
    meaning: str


# Every argument of vLLM that is read. verl passes `engine_kwargs.vllm` on after its own fields, so the former win.
SETTINGS = {
    "dtype": Setting(FOLLOWED, (), "the model dtype; it must be the one that the trainer computes in"),
    "enforce_eager": Setting(FOLLOWED, (False,), "vLLM's own kernels instead of the compiled graph: another preset"),
    "compilation_config": Setting(
        FOLLOWED,
        (None, {}),
        "mode selects the preset; custom_ops need a probe; a fusion pass that is on, and fields that are not known, are refused",
    ),
    "tensor_parallel_size": Setting(
        FOLLOWED,
        (1,),
        "the all-reduce stores its sum as one rank does; compiled on CUDA a pass may fuse it with add and norm, so "
        "add_rms_norm and carry need pass_config.fuse_allreduce_rms=False",
    ),
    "pipeline_parallel_size": Setting(REFUSED, (None, 1), "the residual stream is stored where one rank hands it on"),
    "hf_overrides": Setting(REFUSED, (None, {}), "it changes the engine's model only; head_dtype touches no region"),
    "rope_scaling": Setting(REFUSED, (None, {}), "the engine would rotate by other angles than the trainer"),
    "rope_theta": Setting(REFUSED, (None,), "the engine would rotate by other angles than the trainer"),
    "quantization": Setting(REFUSED, (None,), "quantized layers round elsewhere"),
    "kv_cache_dtype": Setting(
        REFUSED, (None, "auto"), "keys and values would be stored in another format than the model's"
    ),
    "speculative_config": Setting(
        SAID, (None, {}), "the model itself scores every token that a draft proposes, with kernels for several tokens"
    ),
    "model_impl": Setting(REFUSED, (None, "auto", "vllm"), "Transformers' model code inside vLLM rounds elsewhere"),
    "optimization_level": Setting(REFUSED, (None, 2), "it switches fusion passes"),
    "ir_op_priority": Setting(REFUSED, (None, {}), "it selects other kernels for the norms"),
    "kernel_config": Setting(REFUSED, (None, {}), "it selects other kernels"),
}
# What else is read, of the rollout section, the model section and the checkpoint: setting -> (what is done, meaning)
BESIDE = {
    "full_determinism": (REFUSED, "batch-invariant kernels round elsewhere; a probe can run with them"),
    "qat.enable": (REFUSED, "quantized layers round elsewhere"),
    "mtp.enable_rollout": (SAID, SETTINGS["speculative_config"].meaning),
    "disaggregation.decode_tensor_model_parallel_size": (FOLLOWED, "as tensor_parallel_size, where it is larger"),
    "quantization_config in config.json": (REFUSED, "quantized layers round elsewhere"),
    "model.override_config.rope_*": (REFUSED, "the trainer would rotate by other angles than the engine"),
    "model.override_config.attention_dropout": (SAID, "the update drops attention weights at random, no engine does"),
}
# fields of compilation_config that have no part in what is stored in which dtype
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
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_NOOPS = ("eliminate_noops", "enable_noop")  # passes that move no value


@dataclass(frozen=True)
class Given:
    """A setting's value, and the full config key under which it was given."""

    value: object
    key: str


def override(key: str, value, there: bool = False) -> str:
    """Return a command-line override for Hydra, quoted for a shell.

    Args:
        key: full config key.
        value: plain Python.
        there: whether the key may be set already; verl's own config has no such key.

    >>> override("a.b", False), override("a.c", {"x": 1, "y": [2]}, there=True)
    ('+a.b=False', "'++a.c={x:1,y:[2]}'")
    """
    return shlex.quote(f"{'++' if there else '+'}{key}={_hydra(value)}")


def _hydra(value) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if value is None:
        return "null"
    text = str(value)
    return text if re.fullmatch(r"[\w.+/-]+", text) else json.dumps(text)


def _plain(value):
    """Return a config value as plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _mapping(value, key: str) -> dict:
    """Return a mapping that may be written as JSON.

    Raises:
        ValueError: neither.
    """
    found = value or {}
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"{key}={value!r}: not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{key}={value!r}: expected a mapping, or one as JSON")
    return dict(found)


def engine_args(rollout, named: Callable[[str], str] = str) -> dict[str, Given]:
    """Return vLLM's engine arguments as verl will pass them on: name -> value, and the key that it comes from.

    Mirrors: verl 0.9.1 ``vLLMHttpServer.launch_server``, where ``engine_kwargs.vllm`` comes last and None is left out.

    Args:
        rollout: the section, any mapping.
        named: config key -> the key that the user sets to change it, where a config refers to other places of its own.
    """
    own = {
        "dtype": "dtype",
        "enforce_eager": "enforce_eager",
        "tensor_parallel_size": "tensor_model_parallel_size",
        "pipeline_parallel_size": "pipeline_model_parallel_size",
        "quantization": "quantization",
    }
    found = {
        name: Given(_plain(rollout[field]), named(f"{SECTION}.{field}"))
        for name, field in own.items()
        if rollout.get(field) is not None
    }
    key = f"{SECTION}.engine_kwargs.vllm"
    kwargs = _mapping(_plain((rollout.get("engine_kwargs") or {}).get("vllm")), key)
    for name, value in kwargs.items():
        if value is not None:
            found[name.replace("-", "_")] = Given(value, named(f"{key}.{name}"))
    return found


def engine_dtype(args: Mapping[str, Given], checkpoint: Mapping | None = None) -> Given:
    """Return the dtype by name that the engine is given, ``auto`` where only the engine will know.

    Args:
        args: see :func:`engine_args`.
        checkpoint: the model's ``config.json``, if it could be read; vLLM's ``auto`` takes a 16-bit dtype from it.
    """
    given = args.get("dtype", Given("auto", f"{SECTION}.dtype"))
    name = _DTYPES.get(str(given.value), str(given.value))
    if name == "auto" and checkpoint is not None:
        stored = str(checkpoint.get("dtype") or checkpoint.get("torch_dtype")).removeprefix("torch.")
        name = stored if stored in ("bfloat16", "float16") else name
    return replace(given, value=name)


def read_rollout(file, device: str, probed: bool) -> Rollout:
    """Return the rollout engine that a YAML file describes.

    Args:
        file: path of verl's whole config, or of its `actor_rollout_ref.rollout` alone.
        device: where the file does not say it (`trainer.device`): `cuda` or `cpu`.
        probed: see :func:`rollout_engine`.

    Raises:
        ValueError: the file cannot be read, holds no rollout section, or one that nothing covers.
    """
    from omegaconf import OmegaConf

    config, where = read_yaml(file, "rollout-config"), (file, "rollout-config")
    places = (select(config, place, *where, plain=False) for place in (SECTION, "rollout"))
    section = next((found for found in places if found is not None), config)
    if not OmegaConf.is_dict(section) or "name" not in section:
        raise ValueError(
            f"rollout-config={str(file)!r}: expected verl's config with {SECTION}, or that section alone, with a field 'name'"
        )
    return rollout_engine(section, select(config, "trainer.device", *where) or device, probed)


def rollout_engine(
    rollout,
    device: str,
    probed: bool = False,
    checkpoint: Mapping | None = None,
    align: str = ALIGN,
    named: Callable[[str], str] = str,
) -> Rollout:
    """Return the engine that verl will start for a rollout section.

    Reads the arguments of :data:`SETTINGS`, `name`, `qat`, `mtp`, `full_determinism`, `disaggregation`, the installed release
    and the environment. A setting that moves the engine's rounding is refused, unless a probe can run with it.

    Args:
        rollout: verl's `actor_rollout_ref.rollout`.
        device: verl's `trainer.device`.
        probed: whether the points come from a probe of this engine; presets cover the default settings only.
        checkpoint: the model's ``config.json``, where it could be read.
        align: the config key that asks for the alignment, for messages.
        named: see :func:`engine_args`.

    Raises:
        ValueError: an engine that is not known, or a setting that nothing covers.
    """
    if rollout.get("name") != "vllm":
        presets.resolve(rollout.get("name"), "0", "cuda", False, key=f"{SECTION}.name")  # raises, with the known ones
    args, compilation, eager, environment = check(rollout, probed, checkpoint, align, named)
    moves = {"custom_ops": list(compilation["custom_ops"])} if compilation.get("custom_ops") else {}
    if device == "cuda":
        import torch

        device = "rocm" if torch.version.hip else "cuda"
    return Rollout(
        _vllm_version(align),
        device,
        eager,
        engine_dtype(args, checkpoint).value,
        moves,
        environment,
        tensor_parallel=tensor_parallel(rollout, args).value,
    )


def check(
    rollout,
    probed: bool = False,
    checkpoint: Mapping | None = None,
    align: str = ALIGN,
    named: Callable[[str], str] = str,
) -> tuple[dict[str, Given], dict, bool, dict[str, str]]:
    """Refuse a setting that moves the engine's rounding and that nothing covers.

    Args: see :func:`rollout_engine`.

    Returns:
        The engine's arguments, its compilation settings, whether it runs op by op, and variables that the run sets for it.

    Raises:
        ValueError: such a setting, with what to write instead.
    """
    args = engine_args(rollout, named)
    ask = f"or let the engine be asked: {override(align, 'auto', there=True)}"
    escape = f"or set {override(align, 'none', there=True)}"
    environment = {}
    if rollout.get("full_determinism", False) or os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        environment["VLLM_BATCH_INVARIANT"] = "1"
        if not probed:
            own = rollout.get("full_determinism", False)
            what = f"{SECTION}.full_determinism=True" if own else "the environment variable VLLM_BATCH_INVARIANT=1"
            off = f"set {SECTION}.full_determinism=False" if own else "unset it"
            raise ValueError(
                f"{what}: vLLM's batch-invariant kernels round elsewhere and no preset covers them; {off}, {ask}"
            )
    qat = rollout.get("qat") or {}
    if qat.get("enable", False):
        raise ValueError(
            f"{named(f'{SECTION}.qat.enable')}=True: quantized layers round elsewhere and no preset covers it; leave it out, {escape}"
        )
    for name, setting in SETTINGS.items():
        given = args.get(name)
        if setting.done == REFUSED and name != "hf_overrides" and given is not None and given.value not in setting.safe:
            raise ValueError(
                f"{given.key}={given.value!r}: {setting.meaning}, and no preset covers it; leave it out, {escape}"
            )
    _check_model(args, checkpoint, escape)
    compilation, place = _compilation(args)
    eager = bool(args["enforce_eager"].value) if "enforce_eager" in args else False
    written = args["compilation_config"].value if "compilation_config" in args else None
    eager = _check_compilation(compilation, eager, place, escape, ask, probed, written)
    return args, compilation, eager, environment


def _check_model(args: Mapping[str, Given], checkpoint: Mapping | None, escape: str) -> None:
    """Raise where the engine is told to run another model than the trainer, or a quantized one."""
    given = args.get("hf_overrides", Given({}, ""))
    for name, value in _mapping(given.value, given.key).items():
        if name == "head_dtype" or (name.startswith("rope_") and same_rope(name, value, checkpoint)):
            continue
        what = "the engine would rotate by other angles than the trainer, which is more than rounding"
        what = what if name.startswith("rope_") else "it changes the engine's model only, and no preset covers it"
        cure = f"write it into the checkpoint's config.json, which both read, or leave it out{'' if name.startswith('rope_') else f', {escape}'}"
        raise ValueError(f"{given.key}.{name}={value!r}: {what}; {cure}")
    quantized = (checkpoint or {}).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"actor_rollout_ref.model.path: its config.json has a quantization_config ({method}): quantized layers round "
            f"elsewhere, and no preset covers it; take a checkpoint that is not quantized, {escape}"
        )


def same_rope(name: str, value, checkpoint: Mapping | None) -> bool:
    """Return whether a checkpoint's ``config.json`` has this value of a rotary setting anyway."""
    checkpoint = checkpoint or {}
    own = {
        name: x for name, x in checkpoint.items() if name in ("rope_theta", "partial_rotary_factor") and x is not None
    }
    own |= checkpoint.get("rope_parameters") or checkpoint.get("rope_scaling") or {}
    if isinstance(value, Mapping):  # a scaling that is not named is none
        wanted, own = (
            {"rope_type": "default", **{"rope_type" if k == "type" else k: x for k, x in one.items()}}
            for one in (value, own)
        )
        return wanted == own
    return (name in checkpoint and checkpoint[name] == value) or (name in own and own[name] == value)


def _compilation(args: Mapping[str, Given]) -> tuple[dict, str]:
    """Return (compilation_config, its key)."""
    given = args.get("compilation_config", Given({}, f"{SECTION}.engine_kwargs.vllm.compilation_config"))
    return _mapping(given.value, given.key), given.key


def _without(compilation: Mapping, prefix: str, written: object, name: str) -> str:
    """Return the override that switches a pass off; where the whole config is written as one JSON text, that text merged."""
    passes = {**_mapping(compilation.get("pass_config"), f"{prefix}.pass_config"), name: False}
    if isinstance(written, str):
        return override(prefix, {**compilation, "pass_config": passes}, there=True)
    there = name in (compilation.get("pass_config") or {})
    return override(f"{prefix}.pass_config.{name}", False, there)


def _check_compilation(
    compilation: Mapping, eager: bool, prefix: str, escape: str, ask: str, probed: bool, written: object = None
) -> bool:
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
    passes = _mapping(compilation.get("pass_config"), f"{prefix}.pass_config")
    for name, value in passes.items():
        if value is True and name not in _NOOPS:
            off = _without(compilation, prefix, written, name)
            raise ValueError(
                f"{prefix}.pass_config.{name}=True: it fuses across regions and no preset covers it; set {off}, {escape}"
            )
    unknown = sorted(name for name, value in compilation.items() if value is not None and name not in _SAFE_COMPILATION)
    if unknown:
        raise ValueError(
            f"{prefix}.{unknown[0]}={compilation[unknown[0]]!r}: it may move vLLM's rounding and no preset covers it; "
            f"leave it out, {escape}"
        )
    return eager


def tensor_parallel(rollout, args: Mapping[str, Given] | None = None) -> Given:
    """Return the most ranks that one model of the rollout has; replicas that only decode may have more than the others.

    verl gives each kind its own size, and `engine_kwargs.vllm.tensor_parallel_size` wins over both.
    """
    args = engine_args(rollout) if args is None else args
    found = args.get("tensor_parallel_size", Given(1, f"{SECTION}.tensor_model_parallel_size"))
    apart = rollout.get("disaggregation") or {}
    decode = apart.get("decode_tensor_model_parallel_size")
    if "engine_kwargs" not in found.key and apart.get("enabled", False) and decode and decode > found.value:
        found = Given(decode, f"{SECTION}.disaggregation.decode_tensor_model_parallel_size")
    return replace(found, value=int(found.value))


def check_tensor_parallel(rollout, preset: presets.Preset, groups, align: str = ALIGN) -> None:
    """Refuse an all-reduce that vLLM may fuse with add and norm (default on Hopper with FlashInfer): presets are for one rank.

    Args:
        rollout: verl's `actor_rollout_ref.rollout`.
        preset: the engine's preset.
        groups: names of the groups that are aligned to it.
        align: the config key that asks for it.

    Raises:
        ValueError: the pass is not switched off.
    """
    groups, args = [group for group in ("add_rms_norm", "carry") if group in groups], engine_args(rollout)
    ranks = tensor_parallel(rollout, args)
    if not groups or preset.device != "cuda" or preset.eager or ranks.value == 1:
        return
    compilation, place = _compilation(args)
    passes = _mapping(compilation.get("pass_config"), f"{place}.pass_config")
    if passes.get("fuse_allreduce_rms") is not False:
        written = args["compilation_config"].value if "compilation_config" in args else None
        off = _without(compilation, place, written, "fuse_allreduce_rms")
        raise ValueError(
            f"{ranks.key}={ranks.value}: vLLM may fuse the all-reduce with add and norm, which moves the rounding of "
            f"{align}={'+'.join(groups)!r}; set {off}, or leave out {' and '.join(groups)}"
        )


def said(rollout, named: Callable[[str], str] = str):
    """Yield what a user should know of settings that are neither refused nor part of a plan."""
    args = engine_args(rollout, named)
    given, mtp = args.get("speculative_config"), rollout.get("mtp") or {}
    if given is not None and given.value not in SETTINGS["speculative_config"].safe:
        yield f"{given.key}: {SETTINGS['speculative_config'].meaning}"
    elif mtp.get("enable", False) and mtp.get("enable_rollout", False):
        yield f"{named(f'{SECTION}.mtp.enable_rollout')}=True: {SETTINGS['speculative_config'].meaning}"


def _preset_named(align: str) -> str:
    return override(align, {"regions": "all", "engine": "PRESET"}, there=True)


def _vllm_version(align: str = ALIGN) -> str:
    found = ENGINES["vllm"].installed()
    if found is None:
        raise ValueError(
            f"{SECTION}.name='vllm': vLLM is not installed where the driver runs, and its release selects the preset; "
            f"install it, or name the preset: {_preset_named(align)}"
        )
    return found
