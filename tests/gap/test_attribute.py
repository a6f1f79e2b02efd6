"""Contract of the attribution: Shapley values as defined (hand-worked games, symmetry, dummy, additivity, efficiency),
paired intervals over sequences, no share of a reduction that is not there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.gap.attribute import attribute, coalitions, interaction, shapley
from verl_rounding_align.regions import GROUPS

PLAYERS = ("a", "b", "c")
SETS = coalitions(PLAYERS)
games = st.lists(st.integers(-1000, 1000), min_size=7, max_size=7).map(
    lambda values: dict(zip(SETS, [0.0, *map(float, values)], strict=True))
)
GAME = settings(max_examples=40, deadline=None)


def of(game, players=PLAYERS):
    return {p: shapley(game, players, p) for p in players}


def test_a_game_worked_by_hand():
    """v(a)=1, v(b)=2, v(c)=0, v(ab)=4, v(ac)=3, v(bc)=2, v(abc)=6. In the orders abc, acb, bac, bca, cab, cba, a brings
    1, 1, 2, 4, 3, 4 (mean 15/6), b 3, 3, 2, 2, 3, 2 (15/6), c 2, 2, 2, 0, 0, 0 (1)."""
    game = dict(zip(SETS, map(float, (0, 1, 2, 0, 4, 3, 2, 6)), strict=True))
    assert of(game) == pytest.approx({"a": 15 / 6, "b": 15 / 6, "c": 1.0})
    # a with b: without c 4 - 1 - 2 + 0 = 1, with c 6 - 3 - 2 + 0 = 1, each with weight 1/2
    assert interaction(game, PLAYERS, ("a", "b")) == pytest.approx(1.0)
    # a with c: without b 3 - 1 - 0 + 0 = 2, with b 6 - 4 - 2 + 2 = 2
    assert interaction(game, PLAYERS, ("a", "c")) == pytest.approx(2.0)


@GAME
@given(games)
def test_values_sum_to_the_whole(game):
    assert sum(of(game).values()) == pytest.approx(game[frozenset(PLAYERS)])


@GAME
@given(games)
def test_players_who_are_alike_get_alike(game):
    swap = {"a": "b", "b": "a", "c": "c"}
    symmetric = {s: game[s] + game[frozenset(swap[p] for p in s)] for s in SETS}
    values = of(symmetric)
    assert values["a"] == pytest.approx(values["b"])


@GAME
@given(games, st.integers(-1000, 1000))
def test_a_dummy_gets_what_it_brings_alone_and_interacts_with_nobody(game, alone):
    dummy = {s: game[s - {"c"}] + alone * ("c" in s) for s in SETS}
    assert of(dummy)["c"] == pytest.approx(alone)
    assert interaction(dummy, PLAYERS, ("a", "c")) == pytest.approx(0)


@GAME
@given(games, games)
def test_values_of_a_sum_are_sums_of_values(one, other):
    both = of({s: one[s] + other[s] for s in SETS})
    assert both == pytest.approx({p: of(one)[p] + of(other)[p] for p in PLAYERS})


def sums(reductions, noise=0.0, sequences=40, seed=0):
    """Return (k3 sums per sequence, tokens): k3 of 10 nats per token less each set's reduction."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 20, sequences).astype(float)
    return {s: tokens * (10 - r) + noise * rng.normal(size=sequences) for s, r in reductions.items()}, tokens


def test_without_noise_the_intervals_are_points_and_shares_sum_to_one():
    reductions = dict(zip(SETS, map(float, (0, 1, 2, 0, 4, 3, 2, 6)), strict=True))
    whole, rows, pairs = attribute(*sums(reductions), PLAYERS)
    assert whole.value == pytest.approx((6, 6, 6))
    assert [row.value for row in rows] == [pytest.approx((v, v, v)) for v in (2.5, 2.5, 1)]
    assert sum(row.share for row in rows) == pytest.approx(100)
    assert {row.players: row.value[0] for row in pairs}["a", "b"] == pytest.approx(1)


def test_a_reduction_that_may_be_zero_has_no_shares():
    whole, rows, _ = attribute(*sums(dict.fromkeys(SETS, 0.0), noise=5.0), PLAYERS)
    assert whole.value[1] < 0 < whole.value[2] and [row.share for row in rows] == [None] * 3


def test_common_noise_cancels_because_draws_are_paired():
    """Every sequence's level moves by far more than the reductions differ; paired, the intervals stay points."""
    reductions = dict(zip(SETS, map(float, (0, 1, 2, 0, 4, 3, 2, 6)), strict=True))
    k3, tokens = sums(reductions)
    level = 1000 * np.random.default_rng(1).normal(size=len(tokens))
    whole, *_ = attribute({s: x + level for s, x in k3.items()}, tokens, PLAYERS)
    assert whole.value == pytest.approx((6, 6, 6), rel=1e-6)


def test_a_set_that_was_not_measured_is_named():
    k3, tokens = sums(dict.fromkeys(SETS, 0.0))
    del k3[frozenset("ab")]
    with pytest.raises(ValueError) as error:
        attribute(k3, tokens, PLAYERS)
    assert str(error.value) == "no k3 for 1 of 8 sets, a+b first"


# ---- the command


@pytest.fixture
def measured(tmp_path):
    """A folder as ``gap --regions subsets`` leaves it: every aligned group halves the distance to the engine."""
    import torch

    from verl_rounding_align.engines.presets import get
    from verl_rounding_align.gap.arms import live, points
    from verl_rounding_align.gap.rollouts import Rollouts, save

    lengths = torch.tensor([9, 12, 15, 11, 8, 10, 14] * 2)
    rollout = -torch.rand(int(lengths.sum()) - 56, generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.long)
    out, meta = tmp_path / "compiled", {"response_tokens": len(rollout)}
    Rollouts(tokens, offsets, torch.full((14,), 4), rollout, meta).save(out)
    (out / "preset.json").write_text(json.dumps({"device": "cpu", "preset": get("vllm_compiled").as_dict()}))
    every = "+".join(sorted(live(get("vllm_compiled"))))
    for groups in coalitions(list(GROUPS)):
        chosen = points("+".join(groups), get("vllm_compiled")) & live(get("vllm_compiled")) if groups else ()
        moved = "+".join(sorted(chosen))
        scores = {"log_probs": rollout - 0.1 * 0.5 ** len(groups)}
        how = {"points": moved, "preset": "vllm_compiled" if groups else "none", "live": every if groups else ""}
        save(out / f"trainer.{moved or 'none'}.{how['preset']}.batched.safetensors", scores, how)
    return tmp_path


def test_the_command_attributes_what_gap_has_kept(measured):
    done = CliRunner().invoke(cli.app, ["attribute", str(measured), "--json", str(measured / "a.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((measured / "a.json").read_text())["modes"]["compiled"]
    assert found == json.loads((measured / "attribution.json").read_text())["modes"]["compiled"]
    k3 = [np.expm1(-0.1 * 0.5**n) + 0.1 * 0.5**n for n in (0, 4)]
    assert found["whole"]["value"] == pytest.approx([k3[0] - k3[1]] * 3, rel=1e-4)
    assert [row["share"] for row in found["players"]] == pytest.approx([25] * 4, rel=1e-4)
    assert "compiled, vllm_compiled" in done.output and "102 tokens in 14 sequences" in done.output
    assert "25 %" in done.output


def test_a_folder_without_every_subset_says_what_to_run(measured):
    (measured / "compiled" / "trainer.carry+product+qk_norm+qk_normed.vllm_compiled.batched.safetensors").unlink()
    done = CliRunner().invoke(cli.app, ["attribute", str(measured)])
    assert str(done.exception) == (
        f"{measured / 'compiled'}, vllm_compiled: no k3 for 1 of 16 sets, carry+rope first; "
        f"run `verl-rounding-align gap --out {measured} --regions subsets ...`"
    )


def test_a_group_that_was_never_moved_is_missing_not_zero(measured):
    for file in (measured / "compiled").glob("trainer.*carry*.safetensors"):
        file.unlink()
    done = CliRunner().invoke(cli.app, ["attribute", str(measured)])
    assert str(done.exception) == (
        f"{measured / 'compiled'}, vllm_compiled: no k3 for 8 of 16 sets, carry first; "
        f"run `verl-rounding-align gap --out {measured} --regions subsets ...`"
    )


def test_scores_of_another_checkpoint_or_release_are_not_mixed_in(measured):
    """A set that was scored with anything else than the unaligned trainer was is missing, unless only rounding differs."""
    from safetensors import safe_open

    from verl_rounding_align.gap.rollouts import save

    def set_depends(file, depends):
        with safe_open(file, "pt") as kept:
            how, scores = kept.metadata(), {"log_probs": kept.get_tensor("log_probs")}
        save(file, scores, {**how, "depends": json.dumps(depends)})

    def attributed():
        return CliRunner().invoke(cli.app, ["attribute", str(measured)])

    basis = {"checkpoint": "a", "backend": "eager", "torch": "2.13"}
    for i, file in enumerate(sorted((measured / "compiled").glob("trainer.*.safetensors"))):
        set_depends(file, {**basis, "roundings": {"mlp": str(i)}})
    assert attributed().exit_code == 0
    for changed in ({"checkpoint": "b"}, {"backend": "compile"}, {"torch": "2.14"}):
        set_depends(file, {**basis, **changed, "roundings": {}})
        assert "no k3 for 1 of 16 sets, " in str(attributed().exception)
    set_depends(file, {**basis, "roundings": {}})
    assert attributed().exit_code == 0


def test_a_folder_that_is_no_gap_is_refused(tmp_path):
    done = CliRunner().invoke(cli.app, ["attribute", str(tmp_path)])
    assert str(done.exception) == f"{tmp_path}: no rollouts of `verl-rounding-align gap` in it"
