"""Contract of the tokens that detectors look at: places are those in the response, whatever is masked, and a context that
several answers share is one observation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from triage_cases import CLEAN, calibrate, case

from verl_rounding_align.logprobs.pairs import Pairs
from verl_rounding_align.triage.detect import triage
from verl_rounding_align.triage.detectors import function, identities, place
from verl_rounding_align.triage.facts import Facts
from verl_rounding_align.triage.rows import ROUNDING
from verl_rounding_align.triage.sample import Sample, first_of_context

# ---- masked tokens: positions are those in the response


def masked(pairs, at):
    """A span that does not count (tool output) in every response from position ``at`` on, as long as a response is."""
    return replace(pairs, mask=(pairs.positions < at) | (pairs.positions >= at + 100))


def test_tokens_on_both_sides_of_a_masked_span_are_no_neighbours():
    """One token in five counts, and the trainer's are those of the next that counts: five further in the response, not one."""
    shifted = case("one-token-shift", "every sequence, by +1").pairs
    assert [f.cause for f in triage(masked(shifted, 20))] == ["one-token-shift"]
    five = replace(CLEAN, trainer=CLEAN.trainer.copy(), mask=CLEAN.positions % 5 == 0)
    kept = np.flatnonzero(five.mask)
    five.trainer[kept[1:]] = CLEAN.trainer[kept[:-1]]
    assert identities.shift(Sample(five), Facts()) is None
    short = Pairs.of(five.rollout[kept], five.trainer[kept], Sample(five).offsets)  # control: without positions
    assert "trainer[t+1]" in identities.shift(Sample(short), Facts()).evidence


def test_a_masked_span_leaves_positions_as_they_are():
    sample = Sample(masked(CLEAN, 20))
    whole = CLEAN.positions[sample.whole.mask]
    assert (sample.pairs.positions == whole).all() and (sample.from_start == whole).all()
    tail = np.repeat(np.diff(CLEAN.offsets), np.diff(CLEAN.offsets))[sample.whole.mask] - 1 - whole
    assert (
        sample.from_end[tail < 20] == tail[tail < 20]
    ).mean() > 0.5  # responses that end inside the span end earlier
    rest = sample.without(sample.from_start == 0)
    assert (rest.from_start == sample.from_start[sample.from_start > 0]).all() and rest.from_start.min() == 1
    assert (rest.pairs.positions == sample.pairs.positions[sample.from_start > 0]).all()


# ---- answers of one group begin alike


def grouped(prefix):
    """Eight answers to each of two prompts: clean tokens, the first ``prefix`` of each group's the same in all eight."""
    one = np.concatenate(
        [[125 * (8 * g + i * (t >= prefix)) + t for g in range(2) for i in range(8) for t in range(125)]]
    )
    base = replace(
        CLEAN,
        offsets=np.arange(0, 2001, 125),
        **{n: getattr(CLEAN, n)[:2000] for n in ("rollout", "trainer", "mask", "ids")},
    )
    return replace(base, prompts=None, **{n: getattr(base, n)[one] for n in ("rollout", "trainer", "ids")})


@pytest.mark.parametrize("prefix", [0, 5, 20])
def test_a_shared_beginning_is_one_observation(prefix):
    assert triage(grouped(prefix))[0].cause == ROUNDING
    sample = Sample(grouped(prefix))
    assert 0 <= 2000 - 2 * 7 * prefix - sample.first.sum() <= 5  # few begin alike by chance
    sample.first[:] = True  # control: counted eight times, they agree with each other
    rho, _ = function._same_token(sample)
    assert (rho > function.SAME_TOKEN) == (prefix > 0)


def test_a_context_is_the_tokens_before_and_their_places():
    pairs = Pairs.of(-np.ones(9), -np.ones(9), [0, 3, 6, 9], ids=np.array([5, 6, 7, 5, 6, 8, 6, 5, 7]))
    assert first_of_context(pairs).tolist() == [True, True, True, False, False, True, True, True, True]
    prompts = replace(pairs, prompts=np.array([4, 4, 4]))
    assert first_of_context(prompts).tolist() == first_of_context(pairs).tolist()
    assert first_of_context(replace(pairs, prompts=np.array([4, 3, 4]))).all()  # another prompt
    masked = replace(pairs, mask=np.arange(9) != 0)  # what does not count is context all the same
    assert first_of_context(masked).tolist() == [True, True, True, False, True, True, True, True]


def test_growth_needs_long_answers():
    """Eight tokens are no range of positions, whatever the first one's context does."""
    growing = case("growth-with-position", "the trainer sees 64 tokens back").pairs
    assert place.growth(Sample(growing), Facts()) is not None
    assert place.growth(Sample(calibrate.head(growing, 30)), Facts()) is None
