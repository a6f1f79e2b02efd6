"""Mismatch estimators: hand-computed values, verl's own numbers on the same batch, and honest gaps.

Contract: estimates are over the tokens of the mask that have two finite log-probs; what cannot be computed is NaN and
says why; nothing outside the mask has a part in them.
"""

import math

import pytest
import torch

from verl_rounding_align.monitor.mismatch import Mismatch, clustered, mismatch

# Two sequences, three response tokens; d = rollout - trainer is 0.5, -0.25 in the first and 0.25 in the second.
TRAINER = torch.tensor([[-1.0, -2.0, -7.0], [-3.0, -9.0, -9.0]])
ROLLOUT = torch.tensor([[-0.5, -2.25, -1.0], [-2.75, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def batch(sequences=64, length=50, gap=1e-2, seed=0):
    """Return (trainer, rollout, mask) fp32, with ragged responses and junk behind them."""
    g = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(sequences, length, generator=g)
    rollout = trainer + gap * torch.randn(sequences, length, generator=g)
    mask = torch.arange(length) < torch.randint(1, length, (sequences, 1), generator=g)
    return trainer, torch.where(mask, rollout, 1e3), mask


def test_hand_computed_values():
    found = mismatch(TRAINER, ROLLOUT, MASK)
    # m = 0.5 / 3; S = (0.25, 0.25), n = (2, 1): residuals -1/12, +1/12; 2 * (2 / 144) / 9
    k3 = [math.exp(-d) + d - 1 for d in (0.5, -0.25, 0.25)]
    m3 = sum(k3) / 3
    residuals = (k3[0] + k3[1] - 2 * m3, k3[2] - m3)
    assert found.mismatch_kl == pytest.approx(0.5 / 3, rel=1e-15, abs=0)
    assert found.mismatch_kl_se == pytest.approx(math.sqrt(2 * (2 / 144) / 9), rel=1e-14, abs=0)
    assert found.mismatch_k3 == pytest.approx(m3, rel=1e-14, abs=0)
    k3_se = math.sqrt(2 * (residuals[0] ** 2 + residuals[1] ** 2) / 9)
    assert found.mismatch_k3_se == pytest.approx(k3_se, rel=1e-14, abs=0)
    assert found.abs_diff_mean == pytest.approx(1 / 3, rel=1e-15, abs=0)
    assert (found.abs_diff_max, found.tokens, found.nonfinite, found.missing) == (0.5, 3, 0, "")


def test_the_mask_decides_what_counts():
    """Negative control of the hand-computed values: one more masked token changes every mean."""
    wider = MASK.clone()
    wider[0, 2] = 1
    found, other = mismatch(TRAINER, ROLLOUT, MASK), mismatch(TRAINER, ROLLOUT, wider)
    assert found.mismatch_kl != other.mismatch_kl and found.mismatch_k3 != other.mismatch_k3
    assert (other.abs_diff_max, other.tokens) == (6.0, 4)


@pytest.mark.verl
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_verls_rollout_corr(seed):
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    trainer, rollout, mask = batch(seed=seed)
    theirs = compute_offpolicy_metrics(trainer, rollout, mask.float())
    found = mismatch(trainer, rollout, mask)
    # verl sums fp32 terms: each d is exact to eps/2 * |d|, each k3 to about eps (exp and the subtraction round near 1),
    # and a tree sum of N terms adds about log2(N) eps/2 of the terms' mean size
    eps = torch.finfo(torch.float32).eps
    depth = math.log2(found.tokens)
    assert theirs["kl"] == pytest.approx(found.mismatch_kl, abs=eps * depth * found.abs_diff_mean)
    assert theirs["k3_kl"] == pytest.approx(found.mismatch_k3, abs=2 * eps)
    assert theirs["kl"] != pytest.approx(mismatch(rollout, trainer, mask).mismatch_kl, abs=1e-5)  # control: the sign
    uncorrected = trainer.double() - rollout.double()
    assert theirs["k3_kl"] != pytest.approx((uncorrected**2)[mask].mean().item(), abs=2 * eps)  # control: k3, not k2


def test_standard_error_is_the_spread_of_the_estimate_over_batches():
    """Sequences with an effect of their own: the clustered error covers it, the error over tokens does not."""
    g = torch.Generator().manual_seed(0)
    sequences, length, batches = 40, 30, 400
    means, errors = [], []
    mask = torch.arange(length) < torch.randint(1, length, (sequences, 1), generator=g)
    for _ in range(batches):
        own = torch.randn(sequences, 1, generator=g, dtype=torch.float64)
        mean, error = clustered(own + torch.randn(sequences, length, generator=g, dtype=torch.float64), mask)
        means.append(mean)
        errors.append(error)
    spread, error = torch.tensor(means).std().item(), torch.tensor(errors).mean().item()
    naive = math.sqrt(2 / mask.sum().item())  # variance 2 of a token, taken as independent
    # spread is known to 1/sqrt(2 * 400) = 3.5 %; linearisation with 40 clusters is biased low by a few per cent
    assert error == pytest.approx(spread, rel=0.15)
    assert naive < 0.5 * spread


def test_small_gaps_are_not_lost_in_fp32():
    """k3 of a gap of 1e-5 is 5e-11, below one fp32 rounding of r: fp64 keeps it."""
    trainer, rollout, mask = batch(gap=1e-5)
    found = mismatch(trainer, rollout, mask)
    half_square = ((rollout.double() - trainer.double())[mask] ** 2).mean().item() / 2
    assert found.mismatch_k3 == pytest.approx(half_square, rel=1e-4, abs=0)  # next term: d / 3 of it
    log_ratio = (trainer - rollout)[mask]
    in_fp32 = (log_ratio.exp() - log_ratio - 1).mean().item()
    assert in_fp32 != pytest.approx(half_square, rel=1e-2, abs=0)  # control


def test_no_response_tokens():
    found = mismatch(TRAINER, ROLLOUT, torch.zeros_like(MASK))
    assert found.missing == "the batch has no response tokens"
    assert found.tokens == 0 and math.isnan(found.mismatch_kl) and math.isnan(found.abs_diff_max)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nonfinite_log_probs_are_left_out_and_counted(bad):
    rollout = ROLLOUT.clone()
    rollout[0, 1] = bad
    found, without = mismatch(TRAINER, rollout, MASK), MASK.clone()
    without[0, 1] = 0
    expected = mismatch(TRAINER, ROLLOUT, without)
    assert found == Mismatch(**{**vars(expected), "nonfinite": 1})
    assert found.mismatch_kl != mismatch(TRAINER, ROLLOUT, MASK).mismatch_kl  # control


def test_nan_outside_the_mask_changes_nothing():
    rollout = torch.where(MASK.bool(), ROLLOUT, math.nan)
    assert mismatch(TRAINER, rollout, MASK) == mismatch(TRAINER, ROLLOUT, MASK)


def test_only_nonfinite_log_probs():
    found = mismatch(TRAINER, torch.full_like(ROLLOUT, math.nan), MASK)
    assert found.missing == "none of 3 response tokens has two finite log-probs"
    assert (found.tokens, found.nonfinite) == (0, 3) and math.isnan(found.mismatch_k3)


def test_one_sequence_has_no_standard_error():
    found = mismatch(TRAINER[:1], ROLLOUT[:1], MASK[:1])
    assert found.mismatch_kl == 0.125 and math.isnan(found.mismatch_kl_se) and found.missing == ""


def test_shapes_must_agree():
    with pytest.raises(ValueError) as error:
        mismatch(TRAINER, ROLLOUT[:, :2], MASK)
    assert str(error.value) == (
        "trainer (2, 3), rollout (2, 2) and mask (2, 3) must have one shape (sequences, tokens)"
    )


def test_values_are_numbers_for_any_logger():
    for found in (mismatch(TRAINER, ROLLOUT, MASK), Mismatch(missing="a reason")):
        assert all(isinstance(value, int | float) for value in found.values().values())
    assert Mismatch(missing="a reason").values()["missing"] == 1
    assert mismatch(TRAINER, ROLLOUT, MASK).values()["missing"] == 0
