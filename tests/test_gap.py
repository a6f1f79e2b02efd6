"""Contract of the gap: per-token differences become k1, k3, mean and max |d| as defined; intervals resample whole
sequences and comparisons are paired; the trainer's scores do not depend on padding beyond rounding; an interrupted run
resumes; and an engine that *is* the aligned trainer has a gap of exactly zero to it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny, tokens

from verl_rounding_align import align
from verl_rounding_align.measure import gap
from verl_rounding_align.measure.rollout import Rollouts, make
from verl_rounding_align.measure.stats import bootstrap, per_sequence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rollouts():
    """Twelve sequences of 4 prompt tokens and 3 to 14 responses, as if an aligned trainer had been the engine."""
    lengths = list(range(7, 19))
    sequences = [tokens(1, n, seed=n)[0] for n in lengths]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    empty = Rollouts(
        torch.cat(sequences), offsets, torch.full((12,), 4), torch.zeros(sum(lengths) - 48), {"response_tokens": 102}
    )
    model = tiny("qwen3").eval()
    align(model, "all", engine="vllm_compiled", backend="eager")
    return replace(empty, log_probs=gap.score(model, empty))


def test_a_bootstrap_interval_resamples_sequences():
    x, n = np.array([1.0, 5.0]), np.array([1.0, 1.0])
    value, low, high = bootstrap(lambda x, n: x / n, x, n)
    assert (value, low, high) == (3.0, 1.0, 5.0)  # draws of two: (1,1), (1,5), (5,5) with shares 1/4, 1/2, 1/4
    assert bootstrap(lambda x, y: x / y, 3 * x, x) == (3.0, 3.0, 3.0)  # paired: the same draws for both


def test_interval_covers_at_its_level_on_clustered_data():
    """60 sequences of 5 to 20 tokens that share a component: 95 % intervals cover in 190 +- 3 s.d. of 200 data sets, with
    the undercoverage of a percentile bootstrap at 60 clusters (about 1 %) allowed; ignoring clusters covers far less."""
    rng, covered, naive = np.random.default_rng(0), 0, 0
    for i in range(200):
        lengths = rng.integers(5, 21, 60)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = np.repeat(rng.normal(size=60), lengths) + rng.normal(size=lengths.sum())
        n = per_sequence(np.ones(len(values)), offsets)
        _, low, high = bootstrap(lambda x, n: x / n, per_sequence(values, offsets), n, draws=500, seed=i)
        covered += low <= 0 <= high
        half = 1.96 * values.std() / np.sqrt(len(values))
        naive += abs(values.mean()) <= half
    assert 176 <= covered <= 199
    assert naive < 150


def test_estimators_are_as_defined():
    d = np.array([0.1, -0.2, 0.0, 0.3])
    row = gap.gap_row("x", "y", d, 2 * d, np.array([0, 3, 4]))
    assert row.tokens == 4 and row.sequences == 2
    assert row.k1[0] == pytest.approx(0.05)
    ratio = np.exp(-d)  # trainer over rollout probability
    assert row.k3[0] == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    assert row.abs_mean[0] == pytest.approx(0.15) and row.abs_max == 0.3
    base = np.exp(-2 * d)
    assert row.k3_change[0] == pytest.approx(row.k3[0] - (base - 1 - np.log(base)).mean())
    assert row.k3_ratio[0] == pytest.approx(row.k3[0] / (base - 1 - np.log(base)).mean())


def test_scores_are_the_models_own_log_probs(rollouts):
    model = tiny("qwen3").eval()
    scores = gap.score(model, rollouts, batch_tokens=1)
    for i in range(len(rollouts)):
        ids = rollouts.sequence(i)
        log_probs = model(ids[None]).logits[0].float().log_softmax(-1)
        expected = torch.stack([log_probs[t - 1, ids[t]] for t in range(4, len(ids))])
        start, end = rollouts.response_offsets[i : i + 2]
        # the same forward, with an attention mask of ones: SDPA's masked kernel sums in another order, which moves logits
        # by a bf16 step; half a step of a logit between 4 and 8 is 2^-6
        assert torch.allclose(scores[start:end], expected, atol=2**-6, rtol=0)
    shifted = torch.roll(scores, 1)
    assert (shifted - scores).abs().max() > 0.1  # the tolerance above sees a one-token shift


def test_an_engine_that_is_the_aligned_trainer_has_no_gap_to_it(checkpoint, rollouts, tmp_path):
    rows = gap.measure(checkpoint, rollouts, ["rope", "all"], "vllm_compiled", tmp_path, backend="eager")
    none, rope, everything, itself = rows
    assert [r.arm for r in rows] == ["none", "rope", "all", gap.SELF]
    assert everything.k3 == (0, 0, 0) and everything.abs_max == 0 and everything.k3_ratio == (0, 0, 0)
    assert none.k3[0] > 0 and none.k3_ratio == (1, 1, 1) and none.k3_change == (0, 0, 0)
    assert rope.k3[0] > 0 and itself.k3[0] < none.k3[0]
    assert json.loads(json.dumps(gap.as_json(rows)))[0]["tokens"] == 102


def test_an_interrupted_measurement_resumes(checkpoint, rollouts, tmp_path):
    first = gap.measure(checkpoint, rollouts, ["rope"], "vllm_compiled", tmp_path, backend="eager")
    scored = []
    again = gap.measure(
        checkpoint, rollouts, ["rope", "carry"], "vllm_compiled", tmp_path, "eager", lambda arm, n: scored.append(arm)
    )
    assert set(scored) == {"carry"}
    assert again[:2] == first[:2]


def test_rollouts_survive_saving_and_a_wrong_folder_is_an_error(rollouts, tmp_path):
    stored = replace(rollouts, meta={"model": "m", "mode": "eager", "response_tokens": 102})
    stored.save(tmp_path)
    loaded = make(tmp_path, "m", ["unused"], 100, eager=True)
    assert torch.equal(loaded.tokens, rollouts.tokens) and torch.equal(loaded.log_probs, rollouts.log_probs)
    with pytest.raises(ValueError) as error:
        make(tmp_path, "m", ["unused"], 100, eager=False)
    assert str(error.value) == (
        f"{tmp_path} holds 102 response tokens made with {{'mode': 'eager'}}, asked for 100 with {{'model': 'm', "
        "'mode': 'compiled'}; choose another folder"
    )
    with pytest.raises(ValueError, match="holds 102 response tokens made with these options, asked for 500"):
        make(tmp_path, "m", ["unused"], 500, eager=True)


def test_arrays_that_do_not_fit_are_an_error(rollouts, tmp_path):
    replace(rollouts, log_probs=rollouts.log_probs[1:]).save(tmp_path)
    with pytest.raises(ValueError, match="101 log_probs for 102 response tokens"):
        Rollouts.load(tmp_path)


def test_every_subset_is_a_legal_value():
    from verl_rounding_align import parse_plan

    assert len({parse_plan(value).groups for value in gap.every_subset()}) == 15
