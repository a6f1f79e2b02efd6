"""What is known about a run beside its log-probs: from verl's config, a model's config, or a rollout file's ``meta``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path

from ..files import read_yaml

KNOWN_STRATEGIES = ("fsdp", "fsdp2")  # whose trainers this package aligns
SEQUENCE_RS = ("seq_sum_k1", "seq_sum_k2", "seq_sum_k3")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Facts:
    """What is known about a run; a field is None where nothing is known.

    Args:
        temperature, top_p, top_k: what the rollout samples with; top_k 0 means all tokens.
        trainer_temperature: what the trainer divides logits by.
        logprobs_mode: vLLM's setting, ``raw_logprobs`` or ``processed_logprobs``.
        calculate_log_probs: whether the rollout returns log-probs.
        bypass: whether the trainer takes the rollout's log-probs for its own.
        sequence_ratio: the setting that multiplies ratios over a whole sequence, "" if none does.
        experts: number of experts, 0 for a dense model.
        routing_replay: whether the trainer takes the rollout's routing.
        strategy: verl's name of the training backend.
        lr: learning rate.
    """

    temperature: float | None = None
    trainer_temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs_mode: str | None = None
    calculate_log_probs: bool | None = None
    bypass: bool | None = None
    sequence_ratio: str | None = None
    experts: int | None = None
    routing_replay: bool | None = None
    strategy: str | None = None
    lr: float | None = None

    def __or__(self, other: Facts) -> Facts:
        """Return these facts, with what ``other`` knows in their place."""
        return replace(self, **{f.name: v for f in fields(other) if (v := getattr(other, f.name)) is not None})


def of_rollouts(meta: Mapping) -> Facts:
    """Return what a rollout file of ``verl-rounding-align gap`` says; its trainer scores at temperature 1."""
    return Facts(
        temperature=meta.get("temperature"),
        trainer_temperature=meta.get("trainer_temperature", 1.0),
        top_p=meta.get("top_p"),
        top_k=meta.get("top_k"),
        logprobs_mode=meta.get("logprobs_mode"),
    )


def of_model(config) -> Facts:
    """Return what a model's config says.

    Args:
        config: a ``PretrainedConfig``, a mapping as in config.json, or the model's folder.
    """
    if not isinstance(config, Mapping):
        from transformers import PretrainedConfig

        folder = isinstance(config, str | Path)
        config = PretrainedConfig.get_config_dict(config)[0] if folder else config.to_dict()
    return Facts(experts=next((config[key] for key in EXPERT_KEYS if config.get(key)), 0))


def of_verl(config: Mapping) -> Facts:
    """Return what verl's trainer config says; keys that it lacks stay unknown.

    verl's actor divides logits by the *rollout's* temperature (0.9.1: ``trainer_base._compute_old_log_prob`` puts
    ``rollout.temperature`` into the batch), so one setting gives both temperatures here.

    Args:
        config: a mapping, of OmegaConf or plain. It is the whole config, or a part of it from the root on.

    Raises:
        ValueError: none of verl's sections is in it, or a setting that should be a number is none.
    """
    try:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(config):
            config = OmegaConf.to_container(config, resolve=False)
    except ImportError:
        pass
    if not isinstance(config, Mapping) or not {"actor_rollout_ref", "algorithm"} & set(config):
        raise ValueError("expected verl's config, with actor_rollout_ref or algorithm at its root")

    def get(path: str):
        value = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if isinstance(value, str) and value.startswith("${") else value

    def number(path: str):
        value = get(path)
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            raise ValueError(f"{path}={value!r}: expected a number")
        return value

    rollout, actor, correction = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "algorithm.rollout_correction"
    ratio = None
    if get("algorithm") is not None:
        modes = str(get(f"{correction}.rollout_rs") or "").replace(" ", "").split(",")
        products = [f"{correction}.rollout_rs={mode}" for mode in modes if mode in SEQUENCE_RS]
        if get(f"{correction}.rollout_is") == "sequence":
            products.insert(0, f"{correction}.rollout_is=sequence")
        ratio = " and ".join(products)
    mode = get(f"{rollout}.engine_kwargs.vllm.logprobs_mode") or get(f"{rollout}.logprobs_mode")
    replay = get(f"{rollout}.enable_rollout_routing_replay")
    top_k = number(f"{rollout}.top_k")
    return Facts(
        temperature=number(f"{rollout}.temperature"),
        trainer_temperature=number(f"{rollout}.temperature"),
        top_p=number(f"{rollout}.top_p"),
        top_k=None if top_k is None else max(0, top_k),
        logprobs_mode=mode,
        calculate_log_probs=get(f"{rollout}.calculate_log_probs"),
        bypass=get(f"{correction}.bypass_mode"),
        sequence_ratio=ratio,
        routing_replay=replay,
        strategy=get(f"{actor}.strategy"),
        lr=number(f"{actor}.optim.lr"),
    )


def of_yaml(file: str | Path) -> Facts:
    """Return what a YAML file with verl's config says.

    Raises:
        ValueError: it cannot be read, is not YAML, or is no config of verl.
    """
    config = read_yaml(file, "config")
    try:
        return of_verl(config)
    except ValueError as error:
        raise ValueError(f"config={str(file)!r}: {error}") from error
