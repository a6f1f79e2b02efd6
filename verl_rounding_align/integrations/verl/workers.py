"""The workers: the model is aligned where verl builds it, and the worker reports what it has patched."""

import functools
import inspect
import os

from . import KEY, ROLES, TESTED, VERL
from .config import plans, take
from .methods import wrap


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
                f"{VERL} (python -m verl.trainer.main_ppo) where verl_rounding_align is installed for every process"
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
                f"{KEY} was tested with verl {TESTED}, where {base.__name__}.{name} takes {parameters}; here it takes {found}"
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


def on_workers(module) -> list[str]:
    """verl.workers.engine_workers: the worker reads the key, and answers what it has patched."""
    worker = getattr(module, "ActorRolloutRefWorker", None)
    if worker is None:
        return ["ActorRolloutRefWorker"]

    def make(original):
        def init_model(self, *args, **kwargs):
            asked = plans(self.config)
            take(self.config)  # verl's own dataclasses do not know the key
            for role, plan in asked.items():
                name = f"{role}_worker_cls"
                setattr(self, name, functools.partial(_build_worker, getattr(self, name), role, plan))
            result = original(self, *args, **kwargs)
            for role in asked:
                built = getattr(self, role)
                if built is not None and getattr(built.engine, "rounding_alignment", None) is None:
                    raise RuntimeError(
                        f"actor_rollout_ref.{role}.{KEY} was asked for and {type(built.engine).__name__} built its model "
                        f"without it (tested with verl {TESTED})"
                    )
            return result

        return init_model

    def rounding_align_report(self) -> dict:
        """Return what is patched in this process: role -> plan, sites, forwards so far, sites not reached yet."""
        return {role: _report(getattr(self, role).engine) for role in ROLES if getattr(self, role) is not None}

    absent = wrap(worker, "init_model", make)
    absent += [name for name in ("register", "Dispatch") if not hasattr(module, name)]
    if not absent:
        worker.rounding_align_report = module.register(dispatch_mode=module.Dispatch.ONE_TO_ALL)(rounding_align_report)
    return absent


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
