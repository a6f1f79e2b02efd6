"""Which of verl's modules is followed by which hook, and how a method of verl is wrapped.

Each hook waits for verl's module (`postimport`). A method that a hook does not find is remembered in ``ABSENT``: a run that
asked for nothing goes on as it is, one that asked for something stops.

Standard library only: every process of a run imports this file.
"""

import functools
import importlib

from . import TESTED, VERL, NotApplied

ABSENT: dict[str, list[str]] = {}  # verl's module -> names that its hook looked for and did not find


def wrap(owner, name: str, make) -> list[str]:
    """Replace ``owner.name`` by ``make(original)``, once.

    Returns:
        The name if ``owner`` has none of that name, else an empty list.
    """
    original = getattr(owner, name, None)
    if original is None:
        return [f"{owner.__name__}.{name}" if isinstance(owner, type) else name]
    if not hasattr(original, "_rounding_align"):
        wrapper = functools.wraps(original)(make(original))
        wrapper._rounding_align = True
        setattr(owner, name, wrapper)
    return []


def check(asked: str, absent: list[str] = (), modules: tuple[str, ...] = ()) -> None:
    """Stop a run that asked for something if a hook did not find what it extends.

    Args:
        asked: the config key that asks.
        absent: names that are known to be absent.
        modules: modules of verl to import first, so that their hooks have run. One that cannot be imported here is left to
            the process that needs it.

    Raises:
        NotApplied: names, and the releases of verl that have them.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
    every = [*absent, *(f"{module}.{name}" for module, names in ABSENT.items() for name in names)]
    if every:
        import verl

        raise NotApplied(
            f"{asked}: verl {verl.__version__} has no {', '.join(dict.fromkeys(every))}, which this package extends; it works "
            f"with verl {VERL} (tested with {TESTED})"
        )


def _driver(module) -> None:
    from .driver import on_config

    ABSENT[module.__name__] = on_config(module)


def _workers(module) -> None:
    from .workers import on_workers

    ABSENT[module.__name__] = on_workers(module)


def _trainer(module) -> None:
    from .trainer import on_trainer

    ABSENT[module.__name__] = on_trainer(module)


def _server(module) -> None:
    from .running import on_server

    on_server(module)  # an engine that cannot be asked is said by the trainer, and is no reason to stop


HOOKS = {
    "verl.utils.config": _driver,
    "verl.workers.engine_workers": _workers,
    "verl.trainer.ppo.v1.trainer_base": _trainer,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _server,
}
