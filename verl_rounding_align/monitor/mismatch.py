"""Mismatch estimators: how far the trainer's log-probs are from the rollout engine's, over response tokens.

For token t of sequence i let d = rollout - trainer log-prob and log r = -d. Then

    mismatch_kl   = mean(d)                  verl's `rollout_corr/kl` (k1)
    mismatch_k3   = mean(r - log r - 1)      verl's `rollout_corr/k3_kl`; never negative
    abs_diff_mean = mean(|d|), abs_diff_max = max(|d|)

Means are over tokens. The tokens of one sequence are not independent, so standard errors are clustered by sequence. The
mean is a ratio of two sums over sequences, m = sum_i S_i / sum_i n_i, where S_i is the sum over the n_i tokens of
sequence i. Its linearised variance over the G sequences that have tokens is

    se(m)^2 = G / (G - 1) * sum_i (S_i - m n_i)^2 / (sum_i n_i)^2

which is the cluster-robust variance of a mean. All sums are in fp64, so that a mean of 1e-6 is not the rounding of its
terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")


@dataclass(frozen=True)
class Mismatch:
    """The mismatch of one batch. A quantity that cannot be computed is NaN.

    Args:
        mismatch_kl: mean of rollout minus trainer log-prob (nats).
        mismatch_kl_se: its standard error, clustered by sequence (nats).
        mismatch_k3: mean of r - log r - 1 (nats).
        mismatch_k3_se: its standard error, clustered by sequence (nats).
        abs_diff_mean: mean absolute difference of the log-probs (nats).
        abs_diff_max: largest absolute difference of the log-probs (nats).
        tokens: response tokens with two finite log-probs. The estimates are over these.
        nonfinite: response tokens that are left out because a log-prob is NaN or infinite.
        missing: why there is no estimate at all. It is empty where there is one.
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
        """Return name -> number. ``missing`` becomes 1 or 0."""
        return {**vars(self), "missing": int(bool(self.missing))}


def clustered(x: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """Return the mean of ``x`` over ``mask`` and its standard error, clustered by row.

    The error is NaN with fewer than two rows.

    Args:
        x: (sequences, tokens), fp64. What lies outside ``mask`` has no part in the result.
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


def check_shapes(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> None:
    """Check that the three tensors have one shape (sequences, tokens).

    Raises:
        ValueError: they do not.
    """
    if not trainer.shape == rollout.shape == mask.shape or trainer.dim() != 2:
        raise ValueError(
            f"trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} "
            "must have one shape (sequences, tokens)"
        )


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
    check_shapes(trainer, rollout, mask)
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
