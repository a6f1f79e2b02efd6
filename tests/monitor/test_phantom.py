"""Phantom clipping: hand-computed shares, the clip fraction of verl's own loss on the same batch, and honest gaps.

Contract: shares are over the tokens of the mask that have two finite log-probs; what cannot be computed is NaN and says
why; nothing outside the mask has a part in them.
"""

import math

import pytest
import torch
from test_mismatch import MASK, ROLLOUT, TRAINER, batch

from verl_rounding_align.monitor.phantom import Phantom, phantom

# log r = trainer - rollout: r = e^-0.5 = 0.61, e^0.25 = 1.28 | e^-0.25 = 0.78; three response tokens
UP, DOWN = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])


@pytest.mark.parametrize(
    "advantages, low, high, expected",
    [
        (UP, 0.2, 0.2, (1, 1 / 3, 0)),  # 1.28 is cut
        (DOWN, 0.2, 0.2, (1, 0, 2 / 3)),  # 0.61 and 0.78 are
        (0 * UP, 0.2, 0.2, (1, 0, 0)),  # no gradient, none to cut
        (UP, 0.2, 0.28, (1, 1 / 3, 0)),
        (UP, 0.2, 0.29, (2 / 3, 0, 0)),  # high is the range's own
        (DOWN, 0.3, 0.2, (2 / 3, 0, 1 / 3)),  # and low is
    ],
)
def test_phantom_by_hand(advantages, low, high, expected):
    found = phantom(TRAINER, ROLLOUT, MASK, advantages, low, high)
    shares = (found.phantom_clip, found.phantom_clip_positive, found.phantom_clip_negative)
    assert shares == pytest.approx(expected, rel=1e-15, abs=0) and found.missing == ""


@pytest.mark.verl
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.28)])
def test_phantom_is_the_clip_fraction_of_verls_loss_on_the_rollouts_log_probs(low, high):
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    trainer, rollout, mask = batch(gap=0.2)
    advantages = torch.randn(trainer.shape, generator=torch.Generator().manual_seed(1))
    options = dict(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config = ActorConfig(clip_ratio=0.5, clip_ratio_low=low, clip_ratio_high=high, **options)
    clean = torch.where(mask, rollout, trainer)  # the junk behind the responses, which verl multiplies by 0

    def theirs(old):
        _, metrics = compute_policy_loss_vanilla(old, trainer, advantages, mask.float(), config=config)
        return metrics["actor/pg_clipfrac"]

    found = phantom(trainer, rollout, mask, advantages, low, high)
    cut = found.phantom_clip_positive + found.phantom_clip_negative
    # a mean of N zeros and ones in fp32, times 1/N; no r lies within fp32 of a limit here
    assert theirs(clean) == pytest.approx(cut, rel=1e-6) and 0.1 < cut < found.phantom_clip
    assert theirs(trainer) == 0  # verl's default, old = the trainer's own: the mismatch cuts nothing
    other = phantom(trainer, rollout, mask, -advantages, low, high)
    assert theirs(clean) != pytest.approx(
        other.phantom_clip_positive + other.phantom_clip_negative, rel=1e-6
    )  # control


def test_phantom_leaves_out_what_is_not_finite_and_what_the_mask_does():
    rollout = torch.where(MASK.bool(), ROLLOUT, math.nan)
    assert phantom(TRAINER, rollout, MASK, UP, 0.2, 0.2) == phantom(TRAINER, ROLLOUT, MASK, UP, 0.2, 0.2)
    rollout[0, 1] = math.inf
    assert phantom(TRAINER, rollout, MASK, UP, 0.2, 0.2).phantom_clip_positive == 0


def test_phantom_without_advantages_or_tokens():
    found = phantom(TRAINER, ROLLOUT, MASK, None, 0.2, 0.29)
    assert found.phantom_clip == pytest.approx(2 / 3) and math.isnan(found.phantom_clip_positive)
    assert found.missing == "the batch has no advantages" and found.values()["phantom_missing"] == 1
    found = phantom(TRAINER, ROLLOUT, 0 * MASK, UP, 0.2, 0.2)
    assert found.missing == "the batch has no response tokens with two finite log-probs"
    assert math.isnan(found.phantom_clip)
    assert all(isinstance(value, int | float) for value in Phantom(missing="a reason").values().values())


def test_phantom_shapes_must_agree():
    with pytest.raises(ValueError) as error:
        phantom(TRAINER, ROLLOUT, MASK[:, :2], UP, 0.2, 0.2)
    assert str(error.value) == (
        "trainer (2, 3), rollout (2, 3) and mask (2, 2) must have one shape (sequences, tokens)"
    )
    with pytest.raises(ValueError) as error:
        phantom(TRAINER, ROLLOUT, MASK, UP[:1], 0.2, 0.2)
    assert str(error.value) == "advantages (1, 3) must have the mask's shape (2, 3)"
