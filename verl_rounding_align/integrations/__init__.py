"""Training frameworks: one room each, and one row each in ``FRAMEWORKS``. Only these rooms import a framework.

verl/            the key in verl: driver, workers, trainer, running engines, a platform for CPUs
hydra_plugins/   lets ``+rounding_align=rope`` be written in any Hydra application

A new framework is a row here, and a room with its hooks: where its driver checks the key before a GPU is used, where its
workers align the model before it is wrapped, and where its trainer hands a step's log-probs to ``monitor.Monitor``.

Standard library only: every process of a training run imports this file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """A training framework, as users switch alignment on in it.

    Args:
        name: the framework's name.
        key: the config key of the actor.
        metrics: the config key that switches the metrics.
        releases: releases that its hooks are written for; ``tested``: those that were run.
        trainer: the preset that describes what its trainer stores when nothing is patched.
        start: what a user adds to a command line to align RoPE.
        ran: what was run, on what, in one phrase.
        group: the Hydra group whose overlays set the key, "" if there is none.
        overlay: value -> the config that its overlay sets.
        read_rollout: (file, device, probed) -> the rollout engine that a config file describes, or ``module:function`` of it;
            None if config files cannot be read.
    """

    name: str
    key: str
    metrics: str
    releases: str
    tested: tuple[str, ...]
    trainer: str
    start: str
    ran: str
    group: str = ""
    overlay: Callable[[str], Mapping] | None = None
    read_rollout: Callable | str | None = None

    def rollout(self, file, device: str, probed: bool):
        """Return the ``engines.auto.Rollout`` that a config file of the framework describes.

        Raises:
            ValueError: its config files cannot be read, or this one cannot.
        """
        read = self.read_rollout
        if read is None:
            raise ValueError(
                f"framework={self.name!r}: its config files cannot be read; describe the engine by options"
            )
        if isinstance(read, str):
            read = pkgutil.resolve_name(read)
        return read(file, device, probed)


def _verl_overlay(value: str) -> dict:
    actor = {"rounding_align": value}
    return {
        "actor_rollout_ref": {"actor": actor, "ref": {"rounding_align": "${actor_rollout_ref.actor.rounding_align}"}}
    }


FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="verl",
            key="actor_rollout_ref.actor.rounding_align",
            metrics="trainer.rounding_align_metrics",
            releases=">=0.9,<0.10",
            tested=("0.9.1",),
            trainer="hf_eager",
            start="+actor_rollout_ref.actor.rounding_align=rope",
            ran="GRPO with FSDP2, Ray and vLLM on a CPU; not run on a GPU",
            group="rounding_align",
            overlay=_verl_overlay,
            read_rollout="verl_rounding_align.engines.vllm.settings:read_rollout",
        ),
    )
}


def get(name: str, key: str = "framework") -> Framework:
    """Return a framework's row.

    Raises:
        ValueError: unknown name, with the legal ones.

    >>> get("trlx")
    Traceback (most recent call last):
    ...
    ValueError: framework='trlx': unknown framework 'trlx'; choose from verl
    """
    if name not in FRAMEWORKS:
        raise ValueError(f"{key}={name!r}: unknown framework {name!r}; choose from {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


def overlays(group: str) -> dict[str, Mapping]:
    """Return value -> config for the overlays of a Hydra group, one for each legal value of the key; empty for another group.

    >>> list(overlays("rounding_align"))
    ['none', 'rope', 'swiglu', 'add_rms_norm', 'carry', 'paper', 'all', 'auto']
    """
    found = next((row for row in FRAMEWORKS.values() if group and row.group == group and row.overlay), None)
    if found is None:
        return {}
    from ..plan import choices

    return {value: found.overlay(value) for value in choices()}
