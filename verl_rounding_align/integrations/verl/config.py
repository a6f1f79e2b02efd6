"""The package's keys in verl's config: read, found where the user set them, taken out before verl's dataclasses see them.

Standard library only at import: every worker imports this file.
"""

import re
from collections.abc import Mapping

from . import KEY, METRICS, ROLES

OFF, FREE, FULL = 0, 1, 2  # metrics: none; from what verl computes anyway; every one


def plain(value):
    """Return a config value as plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def origin(config, key: str) -> str:
    """Return the key that the user sets to change what stands under ``key``, which may refer to another key.

    >>> from omegaconf import OmegaConf
    >>> origin(OmegaConf.create({"a": {"x": 1}, "b": "${a}", "c": {"y": "${oc.select:b.x,2}"}}), "c.y")
    'a.x'
    """
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    if parent:
        parent = origin(config, parent)
        section = OmegaConf.select(config, parent)
        key = f"{parent}.{name}"
    else:
        section = config
    if not OmegaConf.is_dict(section) or name not in section or not OmegaConf.is_interpolation(section, name):
        return key
    written = str(OmegaConf.to_container(section, resolve=False)[name])
    for target in re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", written.replace("oc.select", "")):
        if OmegaConf.select(config, target, default=None) is not None:
            return origin(config, target)
    return key


def asked(config) -> bool:
    """Return whether the key stands in the config, also as ``none``."""
    return any(
        config.actor_rollout_ref.get(role) is not None and KEY in config.actor_rollout_ref[role] for role in ROLES
    )


def metrics(config) -> int:
    """Return which metrics a run logs: ``OFF``, ``FREE`` or ``FULL``."""
    value = config.trainer.get(METRICS)
    if value is not None:
        return FULL if value else OFF
    return FULL if asked(config) else FREE


def plans(section) -> dict:
    """Return role -> Plan of the roles that are aligned, from ``actor_rollout_ref`` as the driver wrote it.

    Raises:
        RuntimeError: the driver has not checked a value.
        ValueError: a plan of another release of this package.
    """
    from ...plan import Plan

    found = {}
    for role in ROLES:
        value = plain(section[role].get(KEY)) if section.get(role) is not None else None
        if value in (None, "none"):
            continue
        if not isinstance(value, Mapping) or "plan" not in value:
            raise RuntimeError(
                f"actor_rollout_ref.{role}.{KEY}={value!r} was not checked by the driver: verl_rounding_align must be installed "
                "where verl.trainer.main_ppo runs, and VERL_USE_EXTERNAL_PLUGINS must not exclude it"
            )
        found[role] = Plan.from_dict(value, f"actor_rollout_ref.{role}.{KEY}")
    return found


def take(section) -> dict:
    """Remove the key from actor and ref of ``section`` (verl's actor_rollout_ref) and return role -> value."""
    from omegaconf import open_dict

    found = [role for role in ROLES if section.get(role) is not None and KEY in section[role]]
    values = {role: plain(section[role].get(KEY)) for role in found}  # read before removing: ref may refer to actor
    for role in found:
        with open_dict(section[role]):
            del section[role][KEY]
    return values


def compute_dtype(section) -> tuple[str, object]:
    """Return (the dtype by torch's name that a role computes in, what its config says): verl's FSDP mixed precision."""
    from verl.utils.torch_dtypes import PrecisionType

    given = (section.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    return str(PrecisionType.to_dtype(given)).removeprefix("torch."), given


def metrics_obstacle(config) -> str:
    """Return the setting that leaves a step without trainer or rollout log-probs, or an empty string."""
    if not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
        return "actor_rollout_ref.rollout.calculate_log_probs=False: the rollout engine returns no log-probs"
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
        return "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own"
    return ""
