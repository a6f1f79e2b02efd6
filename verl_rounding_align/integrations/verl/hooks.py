"""The key in verl: read in the driver, applied in the workers, proved and measured in the trainer. verl is not changed.

    driver      `validate_config` checks the key, names the engine's preset, writes both back into the config
    worker      `ActorRolloutRefWorker.init_model` gives the key's plans to an engine subclass that aligns the module
    TaskRunner  `PPOTrainer` reads from every worker what it has patched and logs it; mismatch metrics, phantom clipping
                and the trend alarm join verl's own metrics, log-probs join verl's rollout dump

Each part waits for verl's module (`HOOKS`) and does nothing in a run without the key, except for the mismatch metrics.
Nothing is skipped silently: a worker without these hooks meets a key that verl rejects; an aligned engine refuses to
run until a trainer has read its report; a site that the first forward pass has not reached is an error.

Standard library only at import: every process of a run imports this module.
"""

import functools
import inspect
import json
import os
import time
from collections.abc import Mapping

KEY = "rounding_align"
METRICS_KEY = "trainer.rounding_align_metrics"
ROLES = ("actor", "ref")
STRATEGIES = ("fsdp", "fsdp2")
VERL = ("0.9", "0.10")  # releases [low, high) whose extension points are these
VERL_TESTED = "0.9.1"
ENGINE_TIMEOUT = 120  # seconds that an engine has to say what it is
EVERY_GROUP = ("rope", "swiglu", "add_rms_norm", "carry")
CLIPPED = ("vanilla", "clip_cov")  # policy losses that clip a token's ratio to a range: the others have no such range
HISTORY = "rounding_align_trend.json"  # beside verl's checkpoints


def _wrap(owner, name, make) -> None:
    """Replace ``owner.name`` by ``make(original)``; where verl has no such name, its run stops at the key itself."""
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "_rounding_align"):
        wrapper = functools.wraps(original)(make(original))
        wrapper._rounding_align = True
        setattr(owner, name, wrapper)


def _plain(value):
    """Return a config value as plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


# ---------------------------------------------------------------------------------------------------------- driver


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

    values = {"actor": _plain(sections["actor"].get(KEY))}
    values["ref"] = _plain(sections["ref"].get(KEY)) if KEY in sections["ref"] else values["actor"]
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
                f"{place}{KEY}={_plain(section[KEY])!r}: nothing reads this key here; choose from {right}, or the overlay "
                f"+{KEY}=NAME on the command line"
            )
        if "rounding_align_metrics" in section and place != "trainer.":
            raise ValueError(
                f"{place}rounding_align_metrics={section['rounding_align_metrics']!r}: nothing reads this key here; "
                f"choose {METRICS_KEY}"
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
    from ... import families
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


def _metrics_obstacle(config) -> str | None:
    """Return the setting that leaves a step without trainer or rollout log-probs, or None."""
    if not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
        return "actor_rollout_ref.rollout.calculate_log_probs=False: the rollout engine returns no log-probs"
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
        return "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own"
    return None


def _check_metrics(config) -> None:
    """Raise where the mismatch metrics are asked for by name and cannot be computed."""
    value = config.trainer.get(METRICS_KEY.split(".")[1])
    if value not in (None, True, False):
        raise ValueError(f"{METRICS_KEY}={value!r}: choose from true, false, null (null: on where there are log-probs)")
    if value is not None and not config.trainer.get("use_v1", False):
        raise ValueError(
            f"{METRICS_KEY}={value!r}: only the V1 trainer reads it; set trainer.use_v1=True or leave it out"
        )
    if value and _metrics_obstacle(config):
        raise ValueError(f"{METRICS_KEY}=True cannot be met: {_metrics_obstacle(config)}")


def _on_config(module) -> None:
    """verl.utils.config: the key is checked where verl checks its config, in the driver before Ray starts."""

    def make(original):
        def validate_config(config, use_reference_policy, use_critic):
            from omegaconf import open_dict

            resolved = prepare(config, use_reference_policy)
            _take(config.actor_rollout_ref)  # verl's own dataclasses do not know the key
            result = original(config, use_reference_policy, use_critic)
            for role, value in resolved.items():
                with open_dict(config.actor_rollout_ref[role]):
                    config.actor_rollout_ref[role][KEY] = value
            return result

        return validate_config

    _wrap(module, "validate_config", make)


def _take(section) -> dict:
    """Remove the key from actor and ref of ``section`` (verl's actor_rollout_ref) and return role -> value."""
    from omegaconf import open_dict

    found = [role for role in ROLES if section.get(role) is not None and KEY in section[role]]
    values = {role: _plain(section[role].get(KEY)) for role in found}  # read before removing: ref may refer to actor
    for role in found:
        with open_dict(section[role]):
            del section[role][KEY]
    return values


# ---------------------------------------------------------------------------------------------------------- workers


class AlignedEngine:
    """Mixin in front of a verl engine class: aligns the module that verl builds, and proves that it is used."""

    rounding_alignment = None
    rounding_align_read = False  # whether a trainer has read this engine's report
    rounding_align_forwards = 0

    def _build_module(self):
        module = super()._build_module()
        request = getattr(self.engine_config, KEY, None)
        if request is not None:
            from ...trainers.huggingface import align

            role, plan = request
            self.rounding_alignment = align(module, plan, key=f"actor_rollout_ref.{role}.{KEY}")
            print(f"{self.rounding_alignment} ({role}, rank {os.environ.get('RANK', '0')})", flush=True)
        return module

    def forward_backward_batch(self, *args, **kwargs):
        alignment = self.rounding_alignment
        if alignment is not None and not self.rounding_align_read:
            raise RuntimeError(
                f"{KEY}: this model is aligned, and the trainer has not read its report; works with the V1 trainer of verl "
                f">={VERL[0]},<{VERL[1]} (python -m verl.trainer.main_ppo) where verl_rounding_align is installed for every process"
            )
        output = super().forward_backward_batch(*args, **kwargs)
        if alignment is not None:
            self.rounding_align_forwards += 1
            idle = alignment.idle() if self.rounding_align_forwards == 1 else []
            if idle:
                raise RuntimeError(
                    f"{KEY}: {len(idle)} of {len(alignment.sites)} patched sites were not reached by the forward pass, so "
                    f"something else runs in their place: {', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''}"
                )
            if self.rounding_align_forwards == 1:
                role, rank = getattr(self.engine_config, KEY)[0], os.environ.get("RANK", "0")
                ran = "+".join(sorted(alignment.ran))
                print(f"rounding_align: {role}, rank {rank}: regions run by {ran}", flush=True)
        return output


def _register_engine(strategy: str) -> type:
    """Put `AlignedEngine` in front of whatever engine this process would get for language models; return that class."""
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine import EngineRegistry

    base = EngineRegistry.get_engine_cls("language_model", strategy)
    if issubclass(base, AlignedEngine):
        return base
    for name, parameters in (
        ("_build_module", ("self",)),
        ("forward_backward_batch", ("self", "data", "loss_function", "forward_only")),
    ):
        found = tuple(inspect.signature(getattr(base, name)).parameters)
        if found != parameters:
            raise RuntimeError(
                f"{KEY} was tested with verl {VERL_TESTED}, where {base.__name__}.{name} takes {parameters}; here it takes {found}"
            )
    cls = type(f"Aligned{base.__name__}", (AlignedEngine, base), {"__module__": __name__})
    # (device, vendor) wins over device alone in get_engine_cls; a plugin's entry there is our base, so it is stacked on
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    EngineRegistry._engines["language_model"][strategy].pop((device, vendor), None)
    EngineRegistry.register("language_model", strategy, device=device, vendor=vendor)(cls)
    return cls


def _build_worker(worker_cls, role: str, plan, config):
    """Build verl's worker for a role whose model is aligned."""
    if config.model_type != "language_model":
        raise RuntimeError(f"actor_rollout_ref.{role}.{KEY}: model_type {config.model_type!r} is not a language model")
    _register_engine(config.engine_config.strategy)
    setattr(config.engine_config, KEY, (role, plan))
    return worker_cls(config=config)


def _on_workers(module) -> None:
    """verl.workers.engine_workers: the worker reads the key, and answers what it has patched."""
    worker = getattr(module, "ActorRolloutRefWorker", None)
    if worker is None:
        return

    def make(original):
        def init_model(self):
            plans = _requests(self.config)
            for role, plan in plans.items():
                name = f"{role}_worker_cls"
                setattr(self, name, functools.partial(_build_worker, getattr(self, name), role, plan))
            result = original(self)
            for role in plans:
                built = getattr(self, role)
                if built is not None and getattr(built.engine, "rounding_alignment", None) is None:
                    raise RuntimeError(
                        f"actor_rollout_ref.{role}.{KEY} was asked for and {type(built.engine).__name__} built its model "
                        f"without it (tested with verl {VERL_TESTED})"
                    )
            return result

        return init_model

    def rounding_align_report(self) -> dict:
        """Return what is patched in this process: role -> plan, sites, forwards so far, sites not reached yet."""
        return {role: _report(getattr(self, role).engine) for role in ROLES if getattr(self, role) is not None}

    _wrap(worker, "init_model", make)
    worker.rounding_align_report = module.register(dispatch_mode=module.Dispatch.ONE_TO_ALL)(rounding_align_report)


def _requests(section) -> dict:
    """Return role -> Plan for the roles to align, from the config as the driver wrote it; the key is removed."""
    from ...plan import parse_plan

    plans = {}
    for role, value in _take(section).items():
        if value is None or value == "none":
            continue
        if not isinstance(value, Mapping) or not value.get("engine"):
            raise RuntimeError(
                f"actor_rollout_ref.{role}.{KEY}={value!r} was not checked by the driver: verl_rounding_align must be installed "
                "where verl.trainer.main_ppo runs, and VERL_USE_EXTERNAL_PLUGINS must not exclude it"
            )
        plans[role] = parse_plan(value, key=f"actor_rollout_ref.{role}.{KEY}")
    return plans


def _report(engine) -> dict:
    alignment = getattr(engine, "rounding_alignment", None)
    if alignment is None:
        return {"plan": "none", "sites": 0, "forwards": 0, "idle": []}
    engine.rounding_align_read = True
    return {
        "plan": str(alignment.plan),
        "sites": len(alignment.sites),
        "forwards": engine.rounding_align_forwards,
        "idle": alignment.idle(),
    }


# ---------------------------------------------------------------------------------------------------------- trainer


class _Trainer:
    """What this process's trainer logs; mismatch metrics are on until a trainer's config says otherwise."""

    metrics = True
    verified = False
    said: set[str] = set()
    detector = None  # trend.Detector of this run's mismatch_k3
    history: str | None = None  # file that keeps its state for a resume
    columns: dict | None = None  # while verl dumps rollouts: key of a sequence -> what joins its line
    masks: dict = {}  # where verl dumps rollouts: key of a sequence -> its mask before rollout correction rejects tokens


def sites(trainer) -> dict[str, int]:
    """Return role -> number of patched sites, as every worker of the trainer reports it.

    Args:
        trainer: verl's PPOTrainer, with its worker groups.

    Raises:
        RuntimeError: ranks disagree, or what they did is not what the config asks for.
    """
    groups = {id(g): g for g in (trainer.actor_rollout_wg, getattr(trainer, "ref_policy_wg", None)) if g is not None}
    reports = []
    for group in groups.values():
        if not hasattr(group, "rounding_align_report"):
            raise RuntimeError(f"{KEY} was asked for, and verl's workers were built without verl_rounding_align")
        reports += group.rounding_align_report()
    counts = {}
    for role in ROLES:
        entries = [report[role] for report in reports if role in report]
        found = {(entry["plan"], entry["sites"]) for entry in entries}
        if role == "ref" and not entries and trainer.use_reference_policy:
            found = {("shared with the actor", counts["actor"])}  # LoRA: the reference is the actor without its adapter
        if len(found) > 1:
            raise RuntimeError(f"{KEY}: the ranks of {role} disagree: {sorted(found)}")
        counts[role] = found.pop()[1] if found else 0
        value = _plain(trainer.config.actor_rollout_ref[role].get(KEY))
        built = role == "actor" or trainer.use_reference_policy
        if built and value not in (None, "none") and counts[role] == 0:
            raise RuntimeError(f"actor_rollout_ref.{role}.{KEY}={value!r} was asked for, and no worker has applied it")
        for entry in entries:
            if entry["forwards"] and entry["idle"]:
                raise RuntimeError(f"{KEY}: {role} never reached {entry['idle'][:5]}")
    return counts


def engines(trainer) -> tuple[list, list[str]]:
    """Return (fingerprints, reasons why one is missing) of the running engines, each once.

    Every rank of every rollout replica is asked; of a replica with data parallelism vLLM lets its first engine answer.
    """
    import ray

    from ...engines.fingerprint import Fingerprint

    managers = [getattr(trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager")]
    replicas = [replica for manager in managers if manager is not None for replica in manager.get_replicas()]
    asked, running, missing = [], [], [] if replicas else ["the trainer knows no rollout replica"]
    for replica in replicas:  # all at once, with one deadline
        try:
            asked.append(replica.server_handle.rounding_align_fingerprint.remote())
        except Exception as error:  # an engine that cannot answer is no reason to stop a run
            missing.append(_brief(error))
    deadline = time.monotonic() + ENGINE_TIMEOUT
    for answer in asked:
        try:
            for fields in ray.get(answer, timeout=max(0.0, deadline - time.monotonic())):
                if "missing" in fields:
                    missing.append(fields["missing"])
                else:
                    running.append(Fingerprint.from_dict(fields))
        except Exception as error:
            missing.append(_brief(error))
    return list(dict.fromkeys(running)), list(dict.fromkeys(missing))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def check_engines(trainer) -> bool:
    """Compare the running engines with what each role is aligned to, and say so; return whether all are verified.

    Raises:
        RuntimeError: an engine contradicts a plan.
    """
    from ...engines.fingerprint import CONTRADICTED, VERIFIED
    from ...plan import find_preset

    running, missing = engines(trainer)
    model = trainer.config.actor_rollout_ref.model.path
    every = not missing
    for role in ROLES:
        value = _plain(trainer.config.actor_rollout_ref[role].get(KEY))
        if value in (None, "none"):
            continue
        preset = find_preset(value["engine"], f"actor_rollout_ref.{role}.{KEY}.engine")
        for fingerprint in running:
            judgement = preset.judge(fingerprint)
            if judgement.status == CONTRADICTED:
                remedy = "probe the engine with the settings it runs with" if preset.probed else f"set {KEY}=auto"
                raise RuntimeError(
                    f"actor_rollout_ref.{role}.{KEY}: the running engine contradicts the plan: {judgement.why}; engine: "
                    f"{fingerprint}; {remedy}, or give the engine the settings that the plan was made for"
                )
            advice = ""
            if judgement.status != VERIFIED:
                every = False
                run = f"run `verl-rounding-align probe --model {model} --mode {fingerprint.mode}` in the engine's environment"
                advice = f"; {run}" if preset.probed else f"; {run}, or set {KEY}=auto"
            print(f"rounding_align: {role}: engine {judgement}{advice}; {fingerprint}", flush=True)
        for reason in missing:
            print(f"rounding_align: {role}: engine unverified: its fingerprint is missing: {reason}", flush=True)
    return every


def _on_server(module) -> None:
    """verl's vLLM server: an actor method that passes the workers' fingerprints on."""
    server = getattr(module, "vLLMHttpServer", None)
    if server is None:
        return

    async def rounding_align_fingerprint(self) -> list[dict]:
        return await self.engine.collective_rpc("rounding_align_fingerprint")

    server.rounding_align_fingerprint = rounding_align_fingerprint


def _on_trainer(module) -> None:
    """verl.trainer.ppo.v1.trainer_base: read the workers' reports after set-up and at every step, and log them."""
    trainer_cls = getattr(module, "PPOTrainer", None)
    if trainer_cls is None:
        return

    def asked(trainer) -> bool:
        return any(KEY in trainer.config.actor_rollout_ref[role] for role in ROLES)

    def aligned(trainer) -> bool:
        return any(_plain(trainer.config.actor_rollout_ref[role].get(KEY)) not in (None, "none") for role in ROLES)

    def make_setup(original):
        def _setup(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            _Trainer.metrics = self.config.trainer.get(METRICS_KEY.split(".")[1]) is not False
            if asked(self):
                sites(self)
            return result

        return _setup

    def make_fit(original):
        def fit(self, *args, **kwargs):
            if aligned(self):  # the engines are up, no step has run
                _Trainer.verified = check_engines(self)
            if _Trainer.metrics:
                _begin_trend(self)
            return original(self, *args, **kwargs)

        return fit

    def make_metrics(original):
        parameters = inspect.signature(original)

        def _compute_metrics(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            given = parameters.bind(self, *args, **kwargs).arguments
            metrics = given["metrics"]
            if asked(self):
                metrics.update({f"{KEY}/sites_{role}": n for role, n in sites(self).items()})
            if aligned(self):
                metrics[f"{KEY}/engine_verified"] = float(_Trainer.verified)
            if _Trainer.metrics and f"{KEY}/tokens" not in metrics:
                reason = _metrics_obstacle(self.config) or "verl has not compared log-probs in this step"
                metrics.update(_mismatch_metrics(reason=reason))
            if _Trainer.metrics:
                metrics.update(_phantom_metrics(module, self.config, given["batch"]))
                metrics.update(_trend_metrics(given["global_steps"], metrics.get(f"{KEY}/mismatch_k3", float("nan"))))
            return result

        return _compute_metrics

    def make_advantage(original):
        parameters = inspect.signature(original)

        def _compute_advantage(self, *args, **kwargs):
            if _Trainer.metrics and self.config.trainer.get("rollout_data_dir"):
                _keep_masks(module, parameters.bind(self, *args, **kwargs).arguments["batch"])
            return original(self, *args, **kwargs)

        return _compute_advantage

    def make_log(original):
        parameters = inspect.signature(original)

        def _log_rollout_data(self, *args, **kwargs):
            batch = parameters.bind(self, *args, **kwargs).arguments["batch"]
            _Trainer.columns = _dump_columns(module, self.config, batch) if _Trainer.metrics else None
            try:
                return original(self, *args, **kwargs)
            finally:
                _Trainer.columns, _Trainer.masks = None, {}

        return _log_rollout_data

    def make_dump(original):
        parameters = inspect.signature(original)

        def _dump_generations(self, *args, **kwargs):
            given = parameters.bind(self, *args, **kwargs)
            if _Trainer.columns is not None:
                given.arguments["reward_extra_infos_dict"] = _with_columns(given.arguments["reward_extra_infos_dict"])
            return original(*given.args, **given.kwargs)

        return _dump_generations

    _wrap(trainer_cls, "_setup", make_setup)
    _wrap(trainer_cls, "fit", make_fit)
    _wrap(trainer_cls, "_compute_metrics", make_metrics)
    _wrap(trainer_cls, "_compute_advantage", make_advantage)
    _wrap(trainer_cls, "_log_rollout_data", make_log)
    _wrap(trainer_cls, "_dump_generations", make_dump)


def _mismatch_metrics(batch=None, reason: str = "") -> dict[str, float]:
    """Return the mismatch metrics of verl's padded batch; they report a failure as missing and never raise."""
    from ...monitor.mismatch import Mismatch, mismatch

    try:
        if reason:
            found = Mismatch(missing=reason)
        else:
            responses = batch["responses"].shape[1]
            mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"]
            found = mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask[:, -responses:])
    except Exception as error:  # a metric must not stop a training run
        found = Mismatch(missing=f"{type(error).__name__}: {error}")
    if found.missing:
        _say(f"mismatch metrics missing: {found.missing}")
    return {f"{KEY}/{name}": value for name, value in found.values().items()}


def _say(line: str) -> None:
    """Print a line once in a run."""
    if line not in _Trainer.said:
        _Trainer.said.add(line)
        print(f"rounding_align: {line}", flush=True)


def _clip_range(config) -> tuple[float, float]:
    """Return verl's (clip_ratio_low, clip_ratio_high), each falling back to clip_ratio as verl's losses do.

    Raises:
        ValueError: the policy loss has no range for a token's ratio.
    """
    actor = config.actor_rollout_ref.actor
    loss = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    if loss not in CLIPPED:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss!r} has no clip range for a token's ratio "
            f"({', '.join(CLIPPED)} have)"
        )
    sides = (actor.get("clip_ratio_low"), actor.get("clip_ratio_high"))
    low, high = (actor.clip_ratio if side is None else side for side in sides)
    return float(low), float(high)


def _phantom_metrics(module, config, batch) -> dict[str, float]:
    """Return phantom clipping of a step's batch; it reports a failure as missing and never raises.

    Everything is read here, after the update and before verl empties its queue (the advantages do not exist yet where
    verl compares log-probs): one transfer of four fields. The mask is the loss's, since clipping acts on its tokens: without
    what verl's rollout correction has rejected, which the mismatch metrics count.
    """
    from ...monitor.phantom import Phantom, phantom

    try:
        reason = _metrics_obstacle(config)
        if reason:  # said for the mismatch metrics
            return {f"{KEY}/{name}": value for name, value in Phantom(missing=reason).values().items()}
        low, high = _clip_range(config)
        fields = ["old_log_probs", "rollout_log_probs", "response_mask", "advantages"]
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data = data.to_padded_tensor()
        advantages = data["advantages"] if "advantages" in data.keys() else None  # noqa: SIM118 - a TensorDict
        found = phantom(*(data[name] for name in fields[:3]), advantages, low, high)
    except Exception as error:  # a metric must not stop a training run
        found = Phantom(missing=_brief(error))
    if found.missing:
        _say(f"phantom clipping missing: {found.missing}")
    return {f"{KEY}/{name}": value for name, value in found.values().items()}


def _begin_trend(trainer) -> None:
    """Start the trend alarm, with the history of the run that this one resumes where there is one; never raises."""
    from ...monitor.trend import Detector

    _Trainer.detector, _Trainer.history = Detector(), None
    step = getattr(trainer, "global_steps", 0)  # of the checkpoint that was loaded
    try:
        config = trainer.config.trainer
        if config.get("save_freq", -1) > 0:
            _Trainer.history = os.path.join(config.default_local_dir, HISTORY)
        if step == 0:
            return
        folder = config.default_local_dir
        if config.get("resume_mode") == "resume_path":
            folder = os.path.dirname(config.resume_from_path.rstrip("/"))
        file = os.path.join(folder, HISTORY)
        with open(file) as f:
            _Trainer.detector = Detector.restore(json.load(f), step)
        _say(f"trend of mismatch_k3: resumed at step {step} with {len(_Trainer.detector.steps)} steps of {file}")
    except Exception as error:
        _say(f"trend of mismatch_k3: starts anew at step {step}, a jump at this resume cannot be seen: {_brief(error)}")


def _trend_metrics(step: int, value: float) -> dict[str, float]:
    """Take a step's mismatch_k3, warn once, keep the history; it reports a failure as missing and never raises."""
    from ...monitor.trend import NAN, Detector, Reading

    try:
        if _Trainer.detector is None:
            _Trainer.detector = Detector()
        reading = _Trainer.detector.update(step, float(value))
        if reading.warning:
            _say(
                f"WARNING: step {step}: mismatch_k3 {reading.warning}. To see where it comes from: `verl-rounding-align "
                "triage` on a rollout dump (trainer.rollout_data_dir), `verl-rounding-align gap` on fixed weights"
            )
        found = reading.values()
    except Exception as error:  # a metric must not stop a training run
        _say(f"trend of mismatch_k3 missing: {_brief(error)}")
        found = Reading(alarm=NAN).values()
    try:
        if _Trainer.history is not None and _Trainer.detector is not None:
            _write_json(_Trainer.history, _Trainer.detector.state())
    except Exception as error:
        _say(f"trend of mismatch_k3: its history is not kept for a resume: {_brief(error)}")
    return {f"{KEY}/{name}": number for name, number in found.items()}


def _write_json(file: str, value) -> None:
    """Write a JSON file whole or not at all."""
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(f"{file}.{os.getpid()}", "w") as f:
        json.dump(value, f)
    os.replace(f.name, file)


def _keep_masks(module, batch) -> None:
    """Remember the response masks as verl compares log-probs, before its rollout correction rejects tokens; never raises.

    One transfer of one field, in runs that dump rollouts only: rejection overwrites it in verl's queue.
    """
    try:
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        _Trainer.masks |= {
            key: row.tolist() for key, row in zip(batch.keys, data["response_mask"].unbind(), strict=True)
        }
    except Exception as error:
        _say(f"the dump's response_mask is the loss's, after rejection: {_brief(error)}")


def _dump_columns(module, config, batch) -> dict | None:
    """Return key of a sequence -> {column: value} for verl's rollout dump; None, and why said once, where that fails.

    The dump's schema, per line: `rollout_log_probs`, `trainer_log_probs` (floats, one a response token; the trainer's
    before the update), `response_mask` (0 or 1; of the tokens that the mismatch metrics count), `loss_mask` (the loss's:
    without what verl's rollout correction has rejected), `response_ids`, `prompt_length` (tokens), `advantages`. A value that
    is not finite is written as Python's json writes it (NaN, Infinity).
    """
    try:
        reason = _metrics_obstacle(config)
        if reason:
            raise ValueError(reason)
        names = {
            "rollout_log_probs": "rollout_log_probs",
            "old_log_probs": "trainer_log_probs",
            "response_mask": "loss_mask",
            "responses": "response_ids",
            "advantages": "advantages",
        }
        fields = [*names, "prompts"]
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {name: [row.tolist() for row in data[field].unbind()] for field, name in names.items()}
        kept = [_Trainer.masks.get(key, own) for key, own in zip(batch.keys, rows["loss_mask"], strict=True)]
        for name, masks in (("response_mask", kept), ("loss_mask", rows["loss_mask"])):
            rows[name] = [[int(flag) for flag in row] for row in masks]
        rows["prompt_length"] = [len(row) for row in data["prompts"].unbind()]
        columns = {}
        for i, key in enumerate(batch.keys):
            columns[key] = {name: values[i] for name, values in rows.items()}
            lengths = {name: len(values) for name, values in columns[key].items() if name != "prompt_length"}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"the fields of sequence {key} differ in length: {lengths}")
        return columns
    except Exception as error:
        _say(f"no log-probs in verl's rollout dump: {_brief(error)}")
        return None


def _with_columns(infos: Mapping) -> Mapping:
    """Return verl's columns of a rollout dump with this package's, or as they are where its rows are not known."""
    unknown = [key for key in infos.get("uid", [None]) if key not in _Trainer.columns]
    if unknown:
        _say(f"no log-probs in verl's rollout dump: its rows are not the batch's sequences: {unknown[0]}")
        return infos
    rows = [_Trainer.columns[key] for key in infos["uid"]]
    return {**infos, **{name: [row[name] for row in rows] for name in (rows[0] if rows else ())}}


def _on_metrics(module) -> None:
    """verl.utils.debug.metrics: verl's comparison of trainer and rollout log-probs, with this package's beside it."""

    def make(original):
        def calculate_debug_metrics(data):
            result = original(data)
            if _Trainer.metrics:
                result = {**result, **_mismatch_metrics(data.batch)}
            return result

        return calculate_debug_metrics

    _wrap(module, "calculate_debug_metrics", make)


HOOKS = {
    "verl.utils.config": _on_config,
    "verl.workers.engine_workers": _on_workers,
    "verl.trainer.ppo.v1.trainer_base": _on_trainer,
    "verl.utils.debug.metrics": _on_metrics,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _on_server,
}
