"""The driver, before Ray starts anything: the key and every setting that conflicts with it are checked, plans are written back."""

import functools
import inspect
import json
import os

from . import KEY, METRICS, METRICS_KEY, ROLES, STRATEGIES, TESTED, VERL
from . import config as keys
from .config import compute_dtype, metrics_obstacle, origin, plain, take
from .methods import check, wrap

_TRAINER = ("verl.trainer.ppo.v1.trainer_base",)
_ALIGNED = ("verl.workers.engine_workers", *_TRAINER)


def prepare(config, use_reference_policy: bool = True) -> dict:
    """Check the key and the metrics' switch against the whole config, before Ray starts anything.

    Args:
        config: verl's trainer config (DictConfig), not changed.
        use_reference_policy: whether the run has a reference model. The settings of one that is not used do not matter.

    Returns:
        role -> value to write back: ``none``, or what ``Plan.as_dict`` gives. Empty without the key.

    Raises:
        ValueError: the key, its value and the legal choices, or the setting that is in its way.
        NotApplied: this verl lacks something that the hooks extend.
    """
    _check_places(config)
    _check_metrics(config)
    asked = keys.asked(config)
    requests = _requests(config) if asked else {}
    if keys.metrics(config) == keys.FULL and config.trainer.get("use_v1", False):
        check(KEY if asked else f"{METRICS_KEY}=True", modules=_TRAINER)
    if not asked:
        return {}
    used = {role: bool(request) and (role == "actor" or use_reference_policy) for role, request in requests.items()}
    if not any(used.values()):
        return dict.fromkeys(ROLES, "none")
    plans, origins, engines = {}, [], {}
    for role in ROLES:
        if used[role]:
            plans[role] = _plan(config, role, requests[role], engines, origins)
    _check_run(config)
    check(KEY, modules=_ALIGNED)
    if use_reference_policy:
        _check_shared_reference(config, plans)
    lines = [f"{role} {plan}" for role, plan in plans.items()]
    lines += dict.fromkeys(
        f"not exact, left as it is unless asked for by name: {plan.preset.note}"
        for plan in plans.values()
        if plan.preset.probed and plan.preset.note
    )
    print(f"rounding_align: {'; '.join(lines)} ({'; '.join(origins)})", flush=True)
    for line in _said(config):
        print(f"rounding_align: {line}", flush=True)
    return {role: plans[role].as_dict() if role in plans else "none" for role in ROLES}


def _requests(config) -> dict:
    """Return role -> Request; its key is the one that the user set. A preset that is named is checked at once."""
    from ...engines.probe.result import is_file
    from ...plan import AUTO, find_preset, parse_request

    own = {role: f"actor_rollout_ref.{role}.{KEY}" for role in ROLES}
    sections = {role: config.actor_rollout_ref[role] for role in ROLES}
    if KEY not in sections["ref"]:
        own["ref"], sections["ref"] = own["actor"], sections["actor"]
    # the value by itself first: a typing error is reported as such, whatever else the config holds
    found = {role: parse_request(plain(sections[role].get(KEY)), origin(config, own[role])) for role in ROLES}
    for request in found.values():
        if request.engine not in (None, AUTO) and not is_file(request.engine):
            request.plan(find_preset(request.engine, f"{request.key} engine"))
    return found


def _plan(config, role: str, request, engines: dict, origins: list):
    """Return the Plan of a role that asks for one. ``engines`` keeps presets, ``origins`` says where they are from."""
    from ...engines import presets
    from ...plan import build_plan
    from ...regions import GROUPS

    key = request.key.removesuffix(".regions")
    asked = repr((request.engine, request.auto))
    if asked not in engines:
        if request.auto:  # what needs no plan is checked before a minute of probing
            _check_run(config)
            _check_role(config, role, build_plan(tuple(GROUPS), presets.get("fp32")), key)
        engines[asked], where = _preset(config, request, key)
        origins.append(where)
    preset = engines[asked]
    plan = request.plan(preset)
    if not plan:
        raise ValueError(
            f"{request.key}={request.value!r}: no group has an exact answer, nothing to align ({preset.note})"
        )
    _check_role(config, role, plan, key)
    if request.engine is None or preset.probed:
        _settings(config).check_tensor_parallel(config.actor_rollout_ref.rollout, preset, plan.groups, key)
    return plan


def _preset(config, request, key: str):
    """Return (Preset, where it is from) of the engine that a role is aligned to."""
    from ...engines import auto, presets
    from ...engines.probe import result
    from ...plan import find_preset

    file = request.engine is not None and not request.auto
    if file and not result.is_file(request.engine):
        found = find_preset(request.engine, f"{request.key} engine")
        if found.engine is not None:  # what the running engine would contradict is said before it is started
            named = functools.partial(origin, config)
            checkpoint = _checkpoint(config.actor_rollout_ref.model.path)
            _settings(config).check(config.actor_rollout_ref.rollout, False, checkpoint, key, named)
        return found, "preset named in the config"
    path, rollout = config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout
    checkpoint = _checkpoint(path)
    named = functools.partial(origin, config)
    engine = _settings(config).rollout_engine(
        rollout, config.trainer.device, file or request.auto, checkpoint, key, named
    )
    if file:
        spec = auto.sized(path, engine) if checkpoint else None
        found = find_preset(request.engine, f"{request.key} engine", spec=spec, mode=engine.mode)
        return found, f"{engine}; {found.source}"
    if request.auto:
        found, where = auto.probe(os.path.expanduser(path), engine, request.key)
        return found, f"{engine}; {where}"
    name = "actor_rollout_ref.rollout.name"
    return presets.resolve(engine.engine, engine.version, engine.device, engine.eager, key=name), str(engine)


def _settings(config):
    """Return the module that reads the settings of the rollout's engine; vLLM's for an engine that has no room here, whose
    preset can be named all the same."""
    from ...engines import ENGINES

    return ENGINES.get(config.actor_rollout_ref.rollout.name, ENGINES["vllm"]).settings_module()


def _checkpoint(path: str) -> dict:
    """Return what matters of a model's config.json, from a folder or a hub name; empty where the driver cannot read it."""
    file = os.path.join(os.path.expanduser(path), "config.json")
    if os.path.isfile(file):
        with open(file) as f:
            return json.load(f)
    if "://" in path or path.startswith(("/", "~", ".")):
        return {}
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(path)[0]
    except OSError:
        return {}


# -------------------------------------------------------------------------------------------------------------- checks


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


def _check_metrics(config) -> None:
    """Raise where the mismatch metrics are asked for by name and cannot be computed."""
    value = config.trainer.get(METRICS)
    if value not in (None, True, False):
        raise ValueError(
            f"{METRICS_KEY}={value!r}: choose from true, false, null (null: with the key every metric, without it those that "
            "verl's own data give for free)"
        )
    if value is not None and not config.trainer.get("use_v1", False):
        raise ValueError(
            f"{METRICS_KEY}={value!r}: only the V1 trainer reads it; set trainer.use_v1=True or leave it out"
        )
    obstacle = metrics_obstacle(config) if value else ""
    if obstacle:
        key, _, given = obstacle.partition(":")[0].partition("=")
        raise ValueError(f"{METRICS_KEY}=True cannot be met: {obstacle}; set {key}={given != 'True'} or leave it out")


def _check_run(config) -> None:
    """Raise unless the release of verl, its trainer and the model are ones that can be aligned."""
    import verl
    from packaging.specifiers import SpecifierSet

    from ... import families, releases
    from ...trainers import huggingface as patch

    releases.check("verl", verl.__version__, SpecifierSet(VERL), KEY, TESTED)
    if not config.trainer.get("use_v1", False):
        raise ValueError(f"trainer.use_v1=False: {KEY} works with the V1 trainer; set trainer.use_v1=True")
    patch.check_transformers()
    model = config.actor_rollout_ref.model
    name = "hf_config_path" if model.get("hf_config_path") else "path"
    checkpoint = _checkpoint(model[name])
    if not checkpoint:
        print(
            f"rounding_align: no config.json to read at {model[name]}; the workers check the model's family", flush=True
        )
    else:
        families.get(checkpoint.get("model_type"), key=f"actor_rollout_ref.model.{name}={model[name]!r}: model_type")
    _check_angles(config)


def _check_angles(config) -> None:
    """Raise where only the trainer is told to rotate by other angles than the checkpoint's: the engine does not hear of it."""
    checkpoint = _checkpoint(config.actor_rollout_ref.model.path)
    for name, value in _trainer_overrides(config).items():
        if name.startswith("rope_") and not _settings(config).same_rope(name, value, checkpoint):
            raise ValueError(
                f"actor_rollout_ref.model.override_config.{name}={value!r}: the trainer would rotate by other angles than the "
                "engine, which is more than rounding; write it into the checkpoint's config.json, which both read, or leave "
                "it out"
            )


def _trainer_overrides(config) -> dict:
    """Return what the trainer's model config is changed by. Mirrors: verl 0.9.1 ``HFModelConfig``."""
    found = plain(config.actor_rollout_ref.model.get("override_config")) or {}
    return found.get("model_config", found)


def _said(config):
    """Yield what a user should know of settings that are neither refused nor part of a plan."""
    yield from _settings(config).said(config.actor_rollout_ref.rollout, functools.partial(origin, config))
    overrides = _trainer_overrides(config)
    dropout = overrides.get("attention_dropout")
    where = "actor_rollout_ref.model.override_config.attention_dropout"
    if dropout is None:
        path = config.actor_rollout_ref.model.path
        dropout, where = _checkpoint(path).get("attention_dropout"), f"{path}/config.json: attention_dropout"
    if dropout:
        yield (
            f"{where}={dropout}: the update drops attention weights at random, which no engine does; log-probs and metrics "
            "are computed without dropout"
        )


def _check_role(config, role: str, plan, key: str) -> None:
    """Raise unless actor or ref can be aligned as its own settings are."""
    from ...regions import GROUPS

    settings = _settings(config)
    override = settings.override

    place, model = f"actor_rollout_ref.{role}", config.actor_rollout_ref.model
    section = config.actor_rollout_ref[role]
    what = f"{key}={'+'.join(plan.groups)!r}"
    none = override(key, "none", there=True)
    if section.strategy not in STRATEGIES:
        raise ValueError(
            f"{origin(config, f'{place}.strategy')}={section.strategy!r}: {what} works with {', '.join(STRATEGIES)}; set "
            f"{none}"
        )
    if model.get("use_liger", False):
        where = origin(config, "actor_rollout_ref.model.use_liger")
        raise ValueError(
            f"{where}=True: Liger's kernels replace {', '.join(GROUPS)}, so {what} cannot be applied; set {where}=False or "
            f"{none}"
        )
    # use_fused_kernels replaces the language-model head and the loss, which no region touches: nothing to refuse.
    # tiled_mlp is read by no engine of verl 0.9: apply_monkey_patch is called without it.
    for name in (f"{place}.fsdp_config.ulysses_sequence_parallel_size", f"{place}.ulysses_sequence_parallel_size"):
        owner = section.fsdp_config if "fsdp_config" in name else section
        parallel = owner.get("ulysses_sequence_parallel_size", 1) or 1
        if parallel > 1:
            where = origin(config, name)
            raise ValueError(
                f"{where}={parallel}: {what} has not been tested with Ulysses sequence parallelism; set {where}=1 or {none}"
            )
    where = f"{place}.fsdp_config.mixed_precision.param_dtype"
    dtype, given = compute_dtype(section)
    if dtype == "float32":
        there = override(where, "bf16", there=True)
        raise ValueError(
            f"{where}={given!r}: the trainer computes in fp32 and rounds nothing, so there is nothing for {what} to align; "
            f"set {there} or {none}"
        )
    args = settings.engine_args(config.actor_rollout_ref.rollout, functools.partial(origin, config))
    engine = settings.engine_dtype(args, _checkpoint(model.path))
    if engine.value not in ("auto", dtype):
        there = "mixed_precision" in section.fsdp_config
        same = {"bfloat16": "bf16", "float16": "fp16"}.get(engine.value)
        cures = [override(engine.key, dtype, there=True) if "engine_kwargs" in engine.key else f"{engine.key}={dtype}"]
        cures += [override(where, same, there)] if same else []
        raise ValueError(
            f"{engine.key}={args['dtype'].value if 'dtype' in args else 'auto'!r}: {where} is {dtype}; {what} "
            f"needs trainer and engine in one dtype; set {' or '.join(cures)}"
        )


def _check_shared_reference(config, plans: dict) -> None:
    """With LoRA the reference is the actor without its adapter: one model, one plan."""
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank", 0) or 0
    shared = rank > 0 or model.get("lora_rank", 0) > 0 or model.get("lora_adapter_path") is not None
    if shared and plans.get("ref") != plans.get("actor"):
        mine, other = (str(plans.get(role, "none")) for role in ("ref", "actor"))
        raise ValueError(
            f"actor_rollout_ref.ref.{KEY}={mine!r}: with LoRA the reference runs on the actor's model, which has {other!r}; "
            "leave out the ref's own value"
        )


def on_config(module) -> list[str]:
    """verl.utils.config: the key is checked where verl checks its config, in the driver before Ray starts."""

    def make(original):
        def validate_config(*args, **kwargs):
            from omegaconf import open_dict

            try:
                given = inspect.signature(original).bind(*args, **kwargs).arguments
                config = given["config"]
            except (TypeError, KeyError):  # another verl: it refuses the key by itself, and runs without it as it is
                return original(*args, **kwargs)
            resolved = prepare(config, given.get("use_reference_policy", True))
            take(config.actor_rollout_ref)  # verl's own dataclasses do not know the key
            result = original(*args, **kwargs)
            for role, value in resolved.items():
                with open_dict(config.actor_rollout_ref[role]):
                    config.actor_rollout_ref[role][KEY] = value
            return result

        return validate_config

    return wrap(module, "validate_config", make)
