"""Phantom clipping: tokens that PPO's clip range would cut because of the mismatch alone, before any update.

r = exp(trainer - rollout log-prob). Both log-probs are of the weights that the rollout was made with, so r differs from
1 by the mismatch alone. PPO's clip stops a token's gradient only where its advantage is positive and r lies above the
range, or its advantage is negative and r lies below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .mismatch import NAN, check_shapes


@dataclass(frozen=True)
class Phantom:
    """Phantom clipping of one batch, as shares of its tokens. A share that cannot be computed is NaN.

    Args:
        phantom_clip: share of tokens whose r lies outside the clip range.
        phantom_clip_positive: share whose r lies above it with a positive advantage. Their push upwards would be cut.
        phantom_clip_negative: share whose r lies below it with a negative advantage. Their push downwards would be cut.
        missing: why a share is NaN. It is empty where none is.
    """

    phantom_clip: float = NAN
    phantom_clip_positive: float = NAN
    phantom_clip_negative: float = NAN
    missing: str = ""

    def values(self) -> dict[str, float]:
        """Return name -> number. ``missing`` becomes ``phantom_missing``, 1 or 0."""
        found = {name: value for name, value in vars(self).items() if name != "missing"}
        return found | {"phantom_missing": int(bool(self.missing))}


def phantom(
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor | None,
    low: float,
    high: float,
) -> Phantom:
    """Return how many tokens lie outside PPO's clip range [1 - low, 1 + high] before any update.

    verl clips r against `old_log_probs`. By default those are the trainer's own, computed before the update. Then the
    mismatch clips nothing by itself, and the shares say what clipping against the rollout's log-probs would do. With
    `algorithm.rollout_correction.bypass_mode=True` verl's loss takes the rollout's log-probs as the old ones, so it does
    just that. The trainer then computes none before its update, and verl's `actor/pg_clipfrac` is the place to look.

    For a negative advantage verl's dual clip also acts at r > `clip_ratio_c`, which is 3 by default. That is verl's
    `pg_clipfrac_lower`, and it is not counted here.

    Args:
        trainer: (sequences, tokens), log-probs under the trainer before the update (verl: `old_log_probs`).
        rollout: (sequences, tokens), log-probs that the engine returned (verl: `rollout_log_probs`).
        mask: (sequences, tokens), non-zero on the tokens of the loss (verl: `response_mask`).
        advantages: (sequences, tokens), of which the sign is used, or None where there are none.
        low, high: verl's `clip_ratio_low` and `clip_ratio_high`.

    Raises:
        ValueError: the shapes differ.

    Mirrors: verl 0.9.1 `core_algos.compute_policy_loss_vanilla`. Positive plus negative is its `pg_clipfrac` with
    `old_log_prob=rollout`.
    """
    check_shapes(trainer, rollout, mask)
    if advantages is not None and advantages.shape != mask.shape:
        raise ValueError(f"advantages {tuple(advantages.shape)} must have the mask's shape {tuple(mask.shape)}")
    log_r = trainer.double() - rollout.double()
    finite = mask.bool() & log_r.isfinite()
    if not finite.any():
        return Phantom(missing="the batch has no response tokens with two finite log-probs")
    r = log_r[finite].exp()
    above, below = r > 1 + high, r < 1 - low
    outside = (above | below).double().mean().item()
    if advantages is None:
        return Phantom(phantom_clip=outside, missing="the batch has no advantages")
    sign = advantages[finite].sign()
    positive, negative = (above & (sign > 0)).double().mean().item(), (below & (sign < 0)).double().mean().item()
    return Phantom(outside, positive, negative)
