"""Which of verl's modules is followed by which hook, and how a method of verl is wrapped.

Each hook waits for verl's module (`postimport`) and does nothing in a run without the key, except for the mismatch metrics.

Standard library only at import: every process of a run imports this file.
"""

import functools


def wrap(owner, name, make) -> None:
    """Replace ``owner.name`` by ``make(original)``; where verl has no such name, its run stops at the key itself."""
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "_rounding_align"):
        wrapper = functools.wraps(original)(make(original))
        wrapper._rounding_align = True
        setattr(owner, name, wrapper)


def _driver(module) -> None:
    from .driver import on_config

    on_config(module)


def _workers(module) -> None:
    from .workers import on_workers

    on_workers(module)


def _trainer(module) -> None:
    from .trainer import on_trainer

    on_trainer(module)


def _metrics(module) -> None:
    from .trainer import on_metrics

    on_metrics(module)


def _server(module) -> None:
    from .running import on_server

    on_server(module)


HOOKS = {
    "verl.utils.config": _driver,
    "verl.workers.engine_workers": _workers,
    "verl.trainer.ppo.v1.trainer_base": _trainer,
    "verl.utils.debug.metrics": _metrics,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _server,
}
