"""The driver, before Ray starts anything: the key and every setting that is in its way are checked, plans are written back."""

import json
import os

from . import KEY, METRICS, ROLES, STRATEGIES, VERL, VERL_TESTED
from .config import metrics_obstacle, plain, take
from .hooks import wrap

METRICS_KEY = f"trainer.{METRICS}"
EVERY_GROUP = ("rope", "swiglu", "add_rms_norm", "carry")


def prepare(config, use_reference_policy: bool = True) -> dict:
    """Check the key and the metrics' switch against the whole config, before Ray starts anything.

    Args:
        config: verl's trainer config (DictConfig), not changed.
        use_reference_policy: whether the run has a reference model.

    Returns:
        role -> value to write back: ``none``, or ``{regions, engine}`` with the preset's name. Empty without the key.

    Raises:
        ValueError: the key, its value and the legal choices, or the setting that is in its way.
    """
    _check_places(config)
    _check_metrics(config)
    sections = {role: config.actor_rollout_ref[role] for role in ROLES}
    if not any(KEY in section for section in sections.values()):
        return {}
    from ...engines import presets
    from ...engines.probe.result import is_file
    from ...engines.vllm.settings import check_tensor_parallel
    from ...plan import AUTO, build_plan, find_preset, parse_request
    from ...regions import GROUPS

    values = {"actor": plain(sections["actor"].get(KEY))}
    values["ref"] = plain(sections["ref"].get(KEY)) if KEY in sections["ref"] else values["actor"]
    keys = {role: f"actor_rollout_ref.{role}.{KEY}" for role in ROLES}
    # the value by itself first: a typing error is reported as such, whatever else the config holds
    requests = {role: parse_request(values[role], keys[role]) for role in ROLES}
    for request in requests.values():
        if request.engine not in (None, AUTO) and not is_file(request.engine):
            request.plan(find_preset(request.engine, f"{request.key} engine"))
    resolved, lines, origins, engines = {}, [], [], {}
    for role, request in requests.items():
        if not request:
            resolved[role] = "none"
            continue
        asked = repr((request.engine, request.auto))
        if asked not in engines:
            if request.auto:  # what needs no plan is checked before a minute of probing
                _check_run(config)
                _check_role(config, role, build_plan(tuple(GROUPS), presets.get("fp32")), keys[role])
            engines[asked], origin = _preset(config, request)
            origins.append(origin)
        preset = engines[asked]
        plan = request.plan(preset)
        if not plan:
            raise ValueError(
                f"{keys[role]}={values[role]!r}: no group has an exact answer, nothing to align ({preset.note})"
            )
        _check_role(config, role, plan, keys[role])
        if request.engine is None or preset.probed:
            check_tensor_parallel(config.actor_rollout_ref.rollout, preset, plan, keys[role])
        # a probe's points travel with the config: its file may not be where the workers are
        engine = preset.as_dict() if preset.probed else preset.name
        resolved[role] = {"regions": "+".join(plan.groups), "engine": engine}
        if plan.backend != "auto":
            resolved[role]["backend"] = plan.backend
        lines.append(f"{role} {plan}")
        if preset.probed and preset.note:
            lines.append(f"not exact, left as it is unless asked for by name: {preset.note}")
    if lines:
        _check_run(config)
        _check_shared_reference(config, resolved, use_reference_policy)
        print(f"rounding_align: {'; '.join(lines)} ({'; '.join(origins)})", flush=True)
    return resolved


def _preset(config, request):
    """Return (Preset, where it is from) of the engine that a role is aligned to."""
    from ...engines import auto, presets
    from ...engines.probe import result
    from ...engines.vllm.settings import rollout_engine
    from ...plan import find_preset

    model = config.actor_rollout_ref.model
    path = model.get("hf_config_path") or model.path
    if request.engine is not None and not request.auto:
        if not result.is_file(request.engine):
            return find_preset(request.engine, f"{request.key} engine"), "preset named in the config"
        engine = rollout_engine(config.actor_rollout_ref.rollout, config.trainer.device, probed=True)
        spec = auto.sized(path, engine) if _model_type(path) is not None else None
        found = find_preset(request.engine, f"{request.key} engine", spec=spec, mode=engine.mode)
        return found, f"{engine}; {found.source}"
    engine = rollout_engine(config.actor_rollout_ref.rollout, config.trainer.device, probed=request.auto)
    if request.auto:
        found, origin = auto.probe(os.path.expanduser(path), engine, request.key)
        return found, f"{engine}; {origin}"
    key = "actor_rollout_ref.rollout.name"
    return presets.resolve("vllm", engine.version, engine.device, engine.eager, key=key), str(engine)


def _check_places(config) -> None:
    """Raise where one of the keys stands in a place that nothing reads: verl would not notice."""
    aligned = config.actor_rollout_ref
    places = {"": config, "trainer.": config.trainer, "actor_rollout_ref.": aligned}
    places |= {
        f"actor_rollout_ref.{name}.": aligned[name] for name in ("rollout", "model") if aligned.get(name) is not None
    }
    right = f"actor_rollout_ref.actor.{KEY}, actor_rollout_ref.ref.{KEY}"
    for place, section in places.items():
        if KEY in section:
            raise ValueError(
                f"{place}{KEY}={plain(section[KEY])!r}: nothing reads this key here; choose from {right}, or the overlay "
                f"+{KEY}=NAME on the command line"
            )
        if METRICS in section and place != "trainer.":
            raise ValueError(
                f"{place}{METRICS}={section[METRICS]!r}: nothing reads this key here; choose {METRICS_KEY}"
            )


def _check_run(config) -> None:
    """Raise unless the release of verl, its trainer and the model are ones that can be aligned."""
    import verl
    from packaging.version import Version

    if not Version(VERL[0]) <= Version(verl.__version__) < Version(VERL[1]):
        raise ValueError(
            f"{KEY} works with verl >={VERL[0]},<{VERL[1]} (tested with {VERL_TESTED}); verl {verl.__version__} is installed"
        )
    if not config.trainer.get("use_v1", False):
        raise ValueError(f"trainer.use_v1=False: {KEY} works with the V1 trainer; set trainer.use_v1=True")
    from ...trainers import families
    from ...trainers import huggingface as patch

    patch.check_transformers()
    path = config.actor_rollout_ref.model.get("hf_config_path") or config.actor_rollout_ref.model.path
    model_type = _model_type(path)
    if model_type is None:
        print(f"rounding_align: no config.json to read at {path}; the workers check the model's family", flush=True)
    else:
        families.get(model_type, key=f"actor_rollout_ref.model.path={path!r}: model_type")


def _model_type(path: str) -> str | None:
    """Return ``model_type`` of a model's config.json, from a folder or a hub name; None where the driver cannot read it."""
    file = os.path.join(os.path.expanduser(path), "config.json")
    if os.path.isfile(file):
        with open(file) as f:
            return json.load(f).get("model_type")
    if "://" in path or path.startswith(("/", "~", ".")):
        return None
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(path)[0].get("model_type")
    except OSError:
        return None


def _check_role(config, role: str, plan, key: str) -> None:
    """Raise unless actor or ref can be aligned as its own settings are."""
    from verl.utils.torch_dtypes import PrecisionType

    section, model = config.actor_rollout_ref[role], config.actor_rollout_ref.model
    what = f"{key}={'+'.join(plan.groups)!r}"
    if section.strategy not in STRATEGIES:
        raise ValueError(
            f"actor_rollout_ref.{role}.strategy={section.strategy!r}: {what} works with {', '.join(STRATEGIES)}"
        )
    if model.get("use_liger", False):
        raise ValueError(
            f"actor_rollout_ref.model.use_liger=True: Liger's kernels replace {', '.join(EVERY_GROUP)}, "
            f"so {what} cannot be applied; set use_liger=False or {KEY}=none"
        )
    # use_fused_kernels replaces the language-model head and the loss, which no region touches: nothing to refuse
    if "swiglu" in plan.groups and model.get("tiled_mlp", {}).get("enabled", False):
        raise ValueError(
            f"actor_rollout_ref.model.tiled_mlp.enabled=True: it replaces the MLP's forward, so {what} cannot be "
            "applied; set it to False or leave out swiglu"
        )
    parallel = section.fsdp_config.get("ulysses_sequence_parallel_size", 1) or 1
    parallel = max(parallel, section.get("ulysses_sequence_parallel_size", 1) or 1)
    if parallel > 1:
        raise ValueError(
            f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size={parallel}: {what} has not been tested with Ulysses "
            f"sequence parallelism; set it to 1 or {KEY}=none"
        )
    mixed = section.fsdp_config.get("mixed_precision") or {}
    where = f"actor_rollout_ref.{role}.fsdp_config.mixed_precision.param_dtype"
    dtype = PrecisionType.to_dtype(mixed.get("param_dtype", "bf16"))
    if PrecisionType.is_fp32(dtype):
        raise ValueError(
            f"{where}={mixed.get('param_dtype')!r}: the trainer computes in fp32 and rounds nothing, so there is nothing "
            f"for {what} to align; choose bf16 or fp16, or {KEY}=none"
        )
    name = config.actor_rollout_ref.rollout.get("dtype", "bfloat16")
    engine = {"half": "fp16", "float": "fp32"}.get(name, name)
    if engine != "auto" and PrecisionType.to_dtype(engine) != dtype:
        raise ValueError(
            f"actor_rollout_ref.rollout.dtype={name!r}: {where} is {PrecisionType.to_str(dtype)}; "
            f"{what} needs trainer and engine in one dtype"
        )


def _check_shared_reference(config, resolved: dict, use_reference_policy: bool) -> None:
    """With LoRA the reference is the actor without its adapter: one model, one plan."""
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank", 0) or 0
    shared = rank > 0 or model.get("lora_rank", 0) > 0 or model.get("lora_adapter_path") is not None
    if use_reference_policy and shared and resolved["ref"] != resolved["actor"]:
        raise ValueError(
            f"actor_rollout_ref.ref.{KEY}={resolved['ref']!r}: with LoRA the reference runs on the actor's model, which has "
            f"{resolved['actor']!r}; leave out the ref's own value"
        )


def _check_metrics(config) -> None:
    """Raise where the mismatch metrics are asked for by name and cannot be computed."""
    value = config.trainer.get(METRICS)
    if value not in (None, True, False):
        raise ValueError(f"{METRICS_KEY}={value!r}: choose from true, false, null (null: on where there are log-probs)")
    if value is not None and not config.trainer.get("use_v1", False):
        raise ValueError(
            f"{METRICS_KEY}={value!r}: only the V1 trainer reads it; set trainer.use_v1=True or leave it out"
        )
    if value and metrics_obstacle(config):
        raise ValueError(f"{METRICS_KEY}=True cannot be met: {metrics_obstacle(config)}")


def on_config(module) -> None:
    """verl.utils.config: the key is checked where verl checks its config, in the driver before Ray starts."""

    def make(original):
        def validate_config(config, use_reference_policy, use_critic):
            from omegaconf import open_dict

            resolved = prepare(config, use_reference_policy)
            take(config.actor_rollout_ref)  # verl's own dataclasses do not know the key
            result = original(config, use_reference_policy, use_critic)
            for role, value in resolved.items():
                with open_dict(config.actor_rollout_ref[role]):
                    config.actor_rollout_ref[role][KEY] = value
            return result

        return validate_config

    wrap(module, "validate_config", make)
