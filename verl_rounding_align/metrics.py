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
