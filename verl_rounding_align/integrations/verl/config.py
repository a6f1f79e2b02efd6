"""The package's keys in verl's config: read, taken out before verl's own dataclasses see them.

Standard library only at import: every worker imports this file.
"""

from . import KEY, ROLES


def plain(value):
    """Return a config value as plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def take(section) -> dict:
    """Remove the key from actor and ref of ``section`` (verl's actor_rollout_ref) and return role -> value."""
    from omegaconf import open_dict

    found = [role for role in ROLES if section.get(role) is not None and KEY in section[role]]
    values = {role: plain(section[role].get(KEY)) for role in found}  # read before removing: ref may refer to actor
    for role in found:
        with open_dict(section[role]):
            del section[role][KEY]
    return values


def metrics_obstacle(config) -> str | None:
    """Return the setting that leaves a step without trainer or rollout log-probs, or None."""
    if not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
        return "actor_rollout_ref.rollout.calculate_log_probs=False: the rollout engine returns no log-probs"
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
        return "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own"
    return None
