"""Which of verl's modules is followed by which hook. Each hook waits for verl's module (`postimport`).

Standard library only: every process of a run imports this file.
"""

from .methods import ABSENT


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
