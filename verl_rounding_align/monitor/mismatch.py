"""Mismatch estimators: how far the trainer's log-probs are from the rollout engine's, over response tokens.

For token t of sequence i: d = rollout - trainer log-prob, log r = -d, and

    mismatch_kl   = mean(d)                  verl's `rollout_corr/kl` (k1)
    mismatch_k3   = mean(r - log r - 1)      verl's `rollout_corr/k3_kl`; never negative
    abs_diff_mean = mean(|d|), abs_diff_max = max(|d|)

Means are over tokens. Tokens of one sequence are not independent, so standard errors are clustered by sequence: the
mean is a ratio of two sums over sequences, m = sum_i S_i / sum_i n_i, with S_i the sum over the n_i tokens of sequence
i, and its linearised variance over the G sequences that have tokens is

    se(m)^2 = G / (G - 1) * sum_i (S_i - m n_i)^2 / (sum_i n_i)^2

(the cluster-robust variance of a mean). All in fp64, so that a mean of 1e-6 is not the rounding of its terms.

Phantom clipping: tokens that PPO's clip range would cut because of the mismatch alone, before any update; see `phantom`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")


@dataclass(frozen=True)
class Mismatch:
    """Mismatch of one batch; a quantity that cannot be computed is NaN, and ``missing`` says why.

    Args:
        tokens: response tokens with two finite log-probs, over which the estimates are.
        nonfinite: response tokens left out because a log-prob is NaN or infinite.
        missing: why there is no estimate at all; empty where there is one.
    """

    mismatch_kl: float = NAN
    mismatch_kl_se: float = NAN
    mismatch_k3: float = NAN
    mismatch_k3_se: float = NAN
    abs_diff_mean: float = NAN
    abs_diff_max: float = NAN
    tokens: int = 0
    nonfinite: int = 0
    missing: str = ""

    def values(self) -> dict[str, float]:
        """Return name -> number for a logger; ``missing`` becomes 1 or 0."""
        return {**vars(self), "missing": int(bool(self.missing))}


def clustered(x: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """Return (mean of ``x`` over ``mask``, its standard error clustered by row); NaN with fewer than two rows.

    Args:
        x: (sequences, tokens), fp64; anything outside ``mask``.
        mask: (sequences, tokens), bool, at least one True.

    >>> x = torch.tensor([[1.0, 3.0], [5.0, 9.0]], dtype=torch.float64)
    >>> clustered(x, torch.tensor([[True, True], [True, False]]))
    (3.0, 1.3333333333333333)
    """
    n = mask.sum(1).double()
    sums = torch.where(mask, x, 0.0).sum(1)
    mean = sums.sum() / n.sum()
    groups = int((n > 0).sum())
    if groups < 2:
        return mean.item(), NAN
    variance = groups / (groups - 1) * ((sums - mean * n) ** 2).sum() / n.sum() ** 2
    return mean.item(), variance.sqrt().item()


def mismatch(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Return the mismatch between the trainer's and the rollout engine's log-probs of the same tokens.

    Args:
        trainer: (sequences, tokens), log-probs under the trainer (verl: `old_log_probs`), any floating dtype.
        rollout: (sequences, tokens), log-probs that the engine returned (verl: `rollout_log_probs`).
        mask: (sequences, tokens), non-zero on response tokens (verl: `response_mask`).

    Raises:
        ValueError: the shapes differ.

    Mirrors: verl 0.9.1 `rollout_corr_helper.compute_offpolicy_metrics`.
    """
    if not trainer.shape == rollout.shape == mask.shape or trainer.dim() != 2:
        raise ValueError(
            f"trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} "
            "must have one shape (sequences, tokens)"
        )
    mask = mask.bool()
    if not mask.any():
        return Mismatch(missing="the batch has no response tokens")
    d = rollout.double() - trainer.double()
    finite = mask & d.isfinite()
    nonfinite = int((mask & ~finite).sum())
    if not finite.any():
        return Mismatch(nonfinite=nonfinite, missing=f"none of {nonfinite} response tokens has two finite log-probs")
    kl, kl_se = clustered(d, finite)
    k3, k3_se = clustered(torch.expm1(-d) + d, finite)
    size = d[finite].abs()
    return Mismatch(
        mismatch_kl=kl,
        mismatch_kl_se=kl_se,
        mismatch_k3=k3,
        mismatch_k3_se=k3_se,
        abs_diff_mean=size.mean().item(),
        abs_diff_max=size.max().item(),
        tokens=int(finite.sum()),
        nonfinite=nonfinite,
    )


@dataclass(frozen=True)
class Phantom:
    """Phantom clipping of one batch, as shares of its tokens; a share that cannot be computed is NaN.

    Args:
        phantom_clip: share of tokens with r outside the clip range.
        phantom_clip_positive: share with r above it and a positive advantage: their push upwards would be cut.
        phantom_clip_negative: share with r below it and a negative advantage: their push downwards would be cut.
        missing: why a share is NaN; empty where none is.
    """

    phantom_clip: float = NAN
    phantom_clip_positive: float = NAN
    phantom_clip_negative: float = NAN
    missing: str = ""

    def values(self) -> dict[str, float]:
        """Return name -> number for a logger; ``missing`` becomes ``phantom_missing``, 1 or 0."""
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

    r = exp(trainer - rollout log-prob), both of the weights that the rollout was made with, so r differs from 1 by the
    mismatch alone. PPO's clip stops a token's gradient only where its advantage is positive and r above the range, or
    its advantage negative and r below it. (For a negative advantage verl's dual clip also acts at r > `clip_ratio_c`, 3
    by default; that is verl's `pg_clipfrac_lower` and is not counted here.)

    verl clips r against `old_log_probs`. By default those are the trainer's own, computed before the update: then the
    mismatch clips nothing by itself, and the shares are what clipping against the rollout's log-probs would do. With
    `algorithm.rollout_correction.bypass_mode=True` verl's loss takes the rollout's as the old ones, so it does just that;
    the trainer then computes none before its update, and verl's `actor/pg_clipfrac` is the place to look.

    Args:
        trainer: (sequences, tokens), log-probs under the trainer before the update (verl: `old_log_probs`).
        rollout: (sequences, tokens), log-probs that the engine returned (verl: `rollout_log_probs`).
        mask: (sequences, tokens), non-zero on the tokens of the loss (verl: `response_mask`).
        advantages: (sequences, tokens), of which the sign is used; None where there are none.
        low, high: verl's `clip_ratio_low` and `clip_ratio_high`.

    Raises:
        ValueError: the shapes differ.

    Mirrors: verl 0.9.1 `core_algos.compute_policy_loss_vanilla`; positive plus negative is its `pg_clipfrac` with
    `old_log_prob=rollout`.
    """
    if not trainer.shape == rollout.shape == mask.shape or trainer.dim() != 2:
        raise ValueError(
            f"trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} "
            "must have one shape (sequences, tokens)"
        )
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
