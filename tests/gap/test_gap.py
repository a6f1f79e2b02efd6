"""Contract of the gap: per-token differences become k1, k3, mean and max |d| as defined; intervals resample whole
sequences and comparisons are paired; the trainer's scores do not depend on how sequences are laid out beyond rounding; an
interrupted run resumes; an engine that *is* the aligned trainer has a gap of exactly zero to it, sampled and over the whole
vocabulary; and a report holds all that was measured, as its schema says."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from tiny import VOCAB, tiny, tokens
from typer.testing import CliRunner

from verl_rounding_align import align, cli, parse_plan
from verl_rounding_align.engines import ENGINES, process
from verl_rounding_align.engines.presets import get
from verl_rounding_align.gap import arms
from verl_rounding_align.gap import measure as gap
from verl_rounding_align.gap import rollouts as rollout
from verl_rounding_align.gap import run as run_gap
from verl_rounding_align.gap.rollouts import NextTokens, Rollouts, make
from verl_rounding_align.gap.score import LAYOUTS, score
from verl_rounding_align.logprobs.tally import VERSION, gap_row
from verl_rounding_align.report import pages as gap_report
from verl_rounding_align.report import progress as bars
from verl_rounding_align.report import rows as report
from verl_rounding_align.triage import detect as triage
from verl_rounding_align.triage.run import read_gap, run_triage

FLOORS = [title for layout, title in gap.FLOORS.items() if layout != "batched"]  # of a trainer in that layout


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
    return replace(empty, log_probs=score(model, empty)["log_probs"])


def test_estimators_are_as_defined():
    d = np.array([0.1, -0.2, 0.0, 0.3])
    row = gap_row("x", "y", d, 2 * d, np.array([0, 3, 4]))
    assert row.tokens == 4 and row.sequences == 2
    assert row.k1[0] == pytest.approx(0.05)
    ratio = np.exp(-d)  # trainer over rollout probability
    assert row.k3[0] == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    assert row.abs_mean[0] == pytest.approx(0.15) and row.abs_max == 0.3
    base = np.exp(-2 * d)
    assert row.k3_change[0] == pytest.approx(row.k3[0] - (base - 1 - np.log(base)).mean())
    assert row.k3_ratio[0] == pytest.approx(row.k3[0] / (base - 1 - np.log(base)).mean())
    assert (row.k1_change[0], row.abs_change[0]) == (pytest.approx(-0.05), pytest.approx(-0.15))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_the_models_own_log_probs(rollouts, layout):
    model = tiny("qwen3").eval()
    scores = score(model, rollouts, layout, batch_tokens=60)["log_probs"]
    for i in range(len(rollouts)):
        ids = rollouts.sequence(i)
        log_probs = model(ids[None]).logits[0].float().log_softmax(-1)
        expected = torch.stack([log_probs[t - 1, ids[t]] for t in range(4, len(ids))])
        start, end = rollouts.response_offsets[i : i + 2]
        # the same forward, with a mask: SDPA's masked kernel sums in another order, which moves logits by bf16 steps;
        # half a step of a logit between 4 and 8 is 2^-6. Packed is an observation, not a bound: the block mask's kernel was
        # seen to move one by two such steps
        assert torch.allclose(scores[start:end], expected, atol=2**-6 * (4 if layout == "packed" else 1), rtol=0)
    shifted = torch.roll(scores, 1)
    assert (shifted - scores).abs().max() > 0.1  # the tolerance above sees a one-token shift


def test_packed_sequences_do_not_see_each_other(rollouts):
    """The control for the layout: without position_ids the row is one long sequence, and scores move by far more."""
    model = tiny("qwen3").eval()
    apart = score(model, rollouts, "single")["log_probs"]

    class Forgetful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, position_ids=None, **inputs):
            return self.inner(**inputs)

    together = score(Forgetful(), rollouts, "packed")["log_probs"]
    assert (together - apart).abs().max() > 0.1


def trainer(checkpoint, rollouts, folder, progress=lambda arm, n: None, layout="batched"):
    return gap.Trainer(checkpoint, rollouts, folder, "eager", "cpu", progress, layout)


def test_an_engine_that_is_the_aligned_trainer_has_no_gap_to_it(checkpoint, rollouts, tmp_path):
    rows = gap.measure(trainer(checkpoint, rollouts, tmp_path), ["rope", "all"], "vllm_compiled", list(gap.FLOORS))
    none, rope, everything, *floors = rows
    assert [r.arm for r in rows] == ["none", "rope", "all", *FLOORS]
    assert everything.k3 == (0, 0, 0) and everything.abs_max == 0 and everything.k3_ratio == (0, 0, 0)
    assert none.k3[0] > 0 and none.k3_ratio == (1, 1, 1) and none.k3_change == (0, 0, 0)
    assert rope.k3[0] > 0 and rope.kind == "gap"
    assert all(row.kind == "floor" and row.k3[0] < none.k3[0] for row in floors)


def test_the_exact_divergence_is_that_of_the_two_distributions(checkpoint, rollouts, tmp_path):
    """The whole distributions of an engine that is the aligned trainer: zero to it, and to the unaligned one the sum over
    the vocabulary by its definition."""
    at = torch.arange(0, len(rollouts.log_probs), 5)
    offsets = torch.from_numpy(rollouts.response_offsets)
    aligned, plain = tiny("qwen3").eval(), tiny("qwen3").eval()
    align(aligned, "all", engine="vllm_compiled", backend="eager")
    owner = (torch.searchsorted(offsets, at, right=True) - 1).tolist()

    def distribution(model, n):  # as Trainer scores them: the whole batch, right-padded
        found = {}
        score(Recorder(model, found), rollouts, whole=None)
        i = owner[n]
        return found[tuple(rollouts.sequence(i).tolist())][int(at[n] - offsets[i]) + int(rollouts.prompts[i]) - 1]

    class Recorder(torch.nn.Module):
        def __init__(self, inner, found):
            super().__init__()
            self.inner, self.found = inner, found

        def forward(self, input_ids, attention_mask, **more):
            out = self.inner(input_ids, attention_mask=attention_mask, **more)
            for row, ids, mask in zip(out.logits, input_ids, attention_mask, strict=True):
                self.found[tuple(ids[mask.bool()].tolist())] = row.float().log_softmax(-1)
            return out

    with torch.no_grad():
        engine = torch.stack([distribution(aligned, n) for n in range(len(at))])
        other = torch.stack([distribution(plain, n) for n in range(len(at))])
    rollout.save(tmp_path / "next_tokens.safetensors", vars(NextTokens(at, engine)))
    none, everything = gap.exact(trainer(checkpoint, rollouts, tmp_path), ["all"], "vllm_compiled")
    assert everything.kl == (0, 0, 0) and everything.total_variation == (0, 0, 0) and everything.kl_ratio == (0, 0, 0)
    p, q = engine.double().log_softmax(-1), other.double().log_softmax(-1)  # sums of exactly 1
    assert none.kl[0] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    assert none.kl_reverse[0] == pytest.approx(float((q.exp() * (q - p)).sum(-1).mean()), rel=1e-5)
    p, q = engine.double(), other.double()  # the control: fp32 log-probs as they are are off by more
    assert none.kl[0] != pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    assert none.kl[0] > 0 and none.positions == len(at)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_arms_are_scored_in_the_layout_that_is_asked_for(checkpoint, tmp_path, layout):
    """An engine that is the unaligned trainer in a layout has no gap to it there, and has one in ``batched``, which is
    then the floor; the floor of the layout itself is left out. Whole distributions are compared in that layout too."""
    lengths, prompts = list(range(20, 44, 2)), [3 + i % 5 for i in range(12)]
    offsets, log_probs = torch.tensor([0, *np.cumsum(lengths)]), torch.zeros(sum(lengths) - sum(prompts))
    sequences = torch.cat([tokens(1, n, seed=n)[0] for n in lengths])
    rollouts = Rollouts(sequences, offsets, torch.tensor(prompts), log_probs, {"response_tokens": len(log_probs)})
    at = torch.arange(0, len(log_probs), 5)
    noise = torch.randn(len(at), VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rollout.save(tmp_path / "next_tokens.safetensors", vars(NextTokens(at, noise)))
    engine = replace(rollouts, log_probs=score(tiny("qwen3").eval(), rollouts, layout)["log_probs"])
    same = trainer(checkpoint, engine, tmp_path, layout=layout)
    none, everything, *floors = gap.measure(same, ["all"], "vllm_compiled", list(gap.FLOORS))
    assert none.k3 == (0, 0, 0) and none.abs_max == 0 and everything.k3[0] > 0
    assert [r.arm for r in floors] == [title for name, title in gap.FLOORS.items() if name != layout]
    other, *_ = gap.measure(trainer(checkpoint, engine, tmp_path), [], "vllm_compiled", [])
    assert other.k3[0] > 0 and other.abs_max == floors[0].abs_max  # the control
    here, there = (
        gap.exact(trainer(checkpoint, engine, tmp_path, layout=name), [], "vllm_compiled")[0]
        for name in (layout, "batched")
    )
    assert here.k3 == (0, 0, 0) != there.k3 and here.kl != there.kl


def test_an_interrupted_measurement_resumes(checkpoint, rollouts, tmp_path):
    first = gap.measure(trainer(checkpoint, rollouts, tmp_path), ["rope"], "vllm_compiled")
    scored = []
    it = trainer(checkpoint, rollouts, tmp_path, lambda arm, n: scored.append(arm))
    again = gap.measure(it, ["rope", "carry"], "vllm_compiled")
    assert set(scored) == {"carry"}
    assert again[:2] == first[:2]


def test_a_score_is_kept_for_what_it_was_made_of_only(checkpoint, rollouts, tmp_path):
    """Another checkpoint in the same folder, other rollouts, another backend, other points under a preset's name: each is
    scored again; the same once more is not."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    folder = tmp_path / "scores"
    folder.mkdir()

    def scored(rollouts=rollouts, backend="eager", preset="vllm_compiled") -> tuple[set, float]:
        arms_scored: set = set()
        it = gap.Trainer(str(model), rollouts, folder, backend, "cpu", lambda arm, n: arms_scored.add(arm))
        return arms_scored, gap.measure(it, ["rope"], preset, [])[1].k3[0]

    first, k3 = scored()
    assert first == {"none", "rope"} and scored() == (set(), k3)
    shorter = replace(rollouts, tokens=rollouts.tokens.flip(0))
    assert scored(rollouts=shorter)[0] == {"none", "rope"}
    scored()
    points = get("vllm_compiled").points | {"attention": frozenset({"cos_sin", "product"})}
    assert scored(preset=replace(get("vllm_compiled"), points=points))[0] == {"rope"}
    scored()
    tiny("qwen3", seed=1).save_pretrained(model)
    again, other = scored()
    assert again == {"none", "rope"} and other != k3


def test_triage_reads_scores_of_the_folders_own_rollouts_only(checkpoint, rollouts, tmp_path):
    made_by = {"checkpoint": rollout.checkpoint_digest(Path(checkpoint))}
    own = replace(rollouts, meta={**rollouts.meta, **made_by})
    own.save(tmp_path)
    assert read_gap(tmp_path) is None  # no scores yet
    trainer(checkpoint, rollouts, tmp_path).scores("none", get("vllm_compiled"))
    pairs, meta = read_gap(tmp_path)
    assert meta == own.meta and len(pairs.trainer) == 102
    for other, what in (
        (replace(own, tokens=own.tokens.flip(0)), "rollouts"),
        (replace(own, meta={**own.meta, "checkpoint": "another"}), "checkpoint"),
    ):
        other.save(tmp_path)
        with pytest.raises(ValueError, match=f"scores of other {what} than the folder's; run `verl-rounding-align gap"):
            read_gap(tmp_path)


def test_arms_that_move_the_same_points_are_scored_once(checkpoint, rollouts, tmp_path):
    scored = []
    it = trainer(checkpoint, rollouts, tmp_path, lambda arm, n: scored.append(arm))
    rows = gap.measure(it, ["all", "rope+swiglu+add_rms_norm+carry", "sum+normed", "add_rms_norm"], "vllm_compiled", [])
    assert set(scored) == {"none", "all", "sum+normed"}
    assert rows[1].k3 == rows[2].k3 != rows[3].k3 == rows[4].k3


def test_a_score_that_fails_leaves_the_model_as_it_was(checkpoint, rollouts, tmp_path, monkeypatch):
    """It had stayed aligned: the next arm was refused, or scored on top of it."""
    it, preset = trainer(checkpoint, rollouts, tmp_path), get("vllm_compiled")
    none = it.scores("none", preset)["log_probs"]
    real = gap.score

    def fail(model, *args, **kwargs):
        assert not np.array_equal(real(model, *args, **kwargs)["log_probs"].double().numpy(), none)  # it is aligned
        raise KeyboardInterrupt

    monkeypatch.setattr(gap, "score", fail)
    with pytest.raises(KeyboardInterrupt):
        it.scores("all", preset)
    monkeypatch.setattr(gap, "score", real)
    (tmp_path / "trainer.none.none.batched.safetensors").unlink()
    assert np.array_equal(it.scores("none", preset)["log_probs"], none)


def test_a_model_whose_forward_does_not_reach_what_was_aligned_is_refused(checkpoint, rollouts, tmp_path, monkeypatch):
    it = trainer(checkpoint, rollouts, tmp_path)
    monkeypatch.setattr(gap, "score", lambda *args, **kwargs: {"log_probs": rollouts.log_probs})
    with pytest.raises(ValueError) as error:
        it.scores("rope", get("vllm_compiled"))
    assert str(error.value) == (
        f"model={checkpoint!r}: the forward pass did not reach 3 modules that were aligned, model.layers.0.self_attn first; "
        "its log-probs are not those of the aligned model"
    )
    assert list(tmp_path.glob("trainer.*")) == []


def test_a_damaged_score_is_made_again(checkpoint, rollouts, tmp_path):
    first = gap.measure(trainer(checkpoint, rollouts, tmp_path), ["rope"], "vllm_compiled", [])
    (file,) = tmp_path.glob("trainer.*.vllm_compiled.batched.safetensors")
    file.write_bytes(b"damaged")
    scored = []
    again = gap.measure(
        trainer(checkpoint, rollouts, tmp_path, lambda arm, n: scored.append(arm)), ["rope"], "vllm_compiled", []
    )
    assert set(scored) == {"rope"} and again == first


# ---- arms


def test_every_subset_is_a_legal_value():
    assert len({parse_plan(value).groups for value in arms.expand(["subsets"])}) == 15


@pytest.mark.parametrize("engine", ["vllm_compiled", "vllm_compiled_split", "vllm_cpu"])
def test_a_point_moves_itself_and_nothing_else(engine):
    """At every site kind, the Rounding of a single point's arm is the trainer's but for that point."""
    from verl_rounding_align.regions import KINDS

    for point in arms.POINTS:
        found = arms.plan(point, get(engine))
        for kind in KINDS:
            before, after = get("hf_eager").points[kind], get(engine).points[kind]
            want = (before - {point}) | (after & {point})
            assert found.rounding(kind) is None if point not in before | after else found.rounding(kind).points == want
    together = arms.plan("+".join(arms.POINTS), get(engine))
    assert {k: r.points for k, r in together.roundings} == {k: get(engine).points[k] for k in KINDS}


def test_an_arm_is_refused_where_the_preset_says_nothing_about_its_points():
    """And is left alone at the site kinds that the preset does not know."""
    known = {kind: points for kind, points in get("vllm_compiled").points.items() if kind not in ("mlp", "final")}
    dense, silent = replace(get("vllm_compiled"), points=known), dict(known)
    del silent["experts"]
    assert [kind for kind, _ in arms.plan("act+carry", dense).roundings] == ["experts", "attn_add", "mlp_add"]
    assert "mlp" in dict(arms.plan("act", get("vllm_compiled")).roundings)
    with pytest.raises(ValueError) as error:
        arms.plan("act+carry", replace(dense, points=silent))
    assert str(error.value) == "regions='act': preset vllm_compiled says nothing about the swiglu region"


def test_an_unknown_arm_is_an_error_that_lists_the_legal_ones():
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m", "--out", "o", "--regions", "rope+silu"])
    assert str(done.exception) == (
        "regions='silu': choose from none, rope, swiglu, add_rms_norm, carry, paper, all, qk_normed, qk_norm, cos_sin, "
        "product, act, sum, normed, subsets (join with +)"
    )
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m", "--out", "o", "--mode", "fast"])
    assert str(done.exception) == "mode='fast': unknown mode 'fast'; choose from compiled, eager, both"
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m", "--out", "o", "--device", "tpu"])
    assert str(done.exception) == "device='tpu': unknown device 'tpu'; choose from cpu, cuda"
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m", "--out", "o", "--device", "cpu", "--length", "0"])
    assert str(done.exception) == "length=0: a response has at least 1 token"
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m", "--out", "o", "--layout", "flat"])
    assert str(done.exception) == ("layout='flat': unknown layout 'flat'; choose from batched, single, padded, packed")
    done = CliRunner().invoke(cli.app, ["gap", "--model", "m"])
    assert str(done.exception) == ("gap: --model and --out are needed; or a subcommand: score, report (see --help)")


# ---- rollouts


def test_the_common_prefix_ends_at_the_first_token_that_differs(rollouts):
    other = replace(rollouts, tokens=rollouts.tokens.clone(), log_probs=rollouts.log_probs + 0.5)
    start = int(rollouts.offsets[1])
    other.tokens[start + 4] = (other.tokens[start + 4] + 1) % VOCAB  # the first response token of sequence 1
    other.tokens[int(rollouts.offsets[2]) + 6] += 1  # the third of sequence 2
    d, offsets, at = gap.common(rollouts, other)
    lengths = np.diff(rollouts.response_offsets)
    assert np.diff(offsets).tolist() == [lengths[0], 2, *lengths[3:]]
    assert d == pytest.approx(np.full(len(at), -0.5), abs=1e-6)
    assert at[lengths[0]] == rollouts.response_offsets[2]


def test_rollouts_of_other_prompts_are_not_compared(rollouts):
    other = replace(rollouts, tokens=rollouts.tokens.clone())
    other.tokens[int(rollouts.offsets[3])] += 1
    with pytest.raises(ValueError, match="sequence 3 has another prompt: these rollouts do not belong together"):
        gap.common(rollouts, other)


def test_the_engine_against_itself_is_a_floor(checkpoint, rollouts, tmp_path):
    rollouts.save(tmp_path)
    rollout.save(tmp_path / "prefill.safetensors", {"log_probs": rollouts.log_probs + 0.01})
    replace(rollouts, log_probs=rollouts.log_probs - 0.02).save(tmp_path / "scheduling")
    rows = gap.measure(trainer(checkpoint, rollouts, tmp_path), [], "vllm_compiled", [])
    prefill, scheduling = rows[1:]
    assert (prefill.arm, scheduling.arm) == (gap.PREFILL_ROW, gap.VARIANTS["scheduling"][0])
    assert prefill.k1[0] == pytest.approx(-0.01, rel=1e-3) and scheduling.k1[0] == pytest.approx(0.02, rel=1e-3)
    assert {prefill.kind, scheduling.kind} == {"floor"}


def test_rollouts_survive_saving_and_a_wrong_folder_is_an_error(checkpoint, rollouts, tmp_path):
    made_by = rollout.checkpoint_digest(Path(checkpoint))
    meta = {"checkpoint": made_by, "mode": "eager", "response_tokens": 102, "prompts": rollout.digest(["unused"])}
    stored = replace(rollouts, meta=meta)
    stored.save(tmp_path)
    loaded = make(tmp_path, checkpoint, ["unused"], 100, eager=True)
    assert torch.equal(loaded.tokens, rollouts.tokens) and torch.equal(loaded.log_probs, rollouts.log_probs)
    with pytest.raises(ValueError) as error:
        make(tmp_path, checkpoint, ["unused"], 100, eager=False)
    assert str(error.value) == (
        f"{tmp_path} holds 102 response tokens made with {{'mode': 'eager'}}, asked for 100 with "
        f"{{'mode': 'compiled', 'prompts': '{rollout.digest(['unused'])}'}}; choose another folder"
    )
    with pytest.raises(ValueError, match="made with {'prompts': "):
        make(tmp_path, checkpoint, ["others"], 100, eager=True)
    with pytest.raises(ValueError, match="holds 102 response tokens made with these options, asked for 500"):
        make(tmp_path, checkpoint, ["unused"], 500, eager=True)


def test_rollouts_belong_to_the_checkpoint_that_made_them(checkpoint, rollouts, tmp_path, monkeypatch):
    """Wherever it lies, under whatever name; other weights under its name are another checkpoint, for ``gap`` and for
    ``gap score``, and so is one that is not known."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(checkpoint, model)
    meta = {"model": str(model), "mode": "eager", "response_tokens": 102, "prompts": rollout.digest(["unused"])}
    made_by = rollout.checkpoint_digest(model)
    replace(rollouts, meta=meta | {"checkpoint": made_by, "versions": {}}).save(out / "eager")
    preset = {"device": "cpu", "preset": get("vllm_cpu").as_dict()}
    (out / "eager" / run_gap.PRESET).write_text(json.dumps(preset))

    def both(model: str) -> None:
        make(out / "eager", model, ["unused"], 100, eager=True)
        run_gap.rescore(out, model, ["none"], "eager", None, noise=False)

    both(str(model))
    both(checkpoint)  # the same weights elsewhere
    monkeypatch.chdir(tmp_path)
    both("model")
    tiny("qwen3", seed=1).save_pretrained(model)
    said = (
        f"{out / 'eager'}: its rollouts were made by checkpoint {made_by} \\(a digest of config and weights\\), model="
    )
    with pytest.raises(ValueError, match=said):
        make(out / "eager", str(model), ["unused"], 100, eager=True)
    with pytest.raises(ValueError, match=said):
        run_gap.rescore(out, None, ["none"], "eager", None, noise=False)
    replace(rollouts, meta=meta).save(out / "eager")
    said = "do not say which checkpoint made them .* another folder as --out"
    with pytest.raises(ValueError, match=said):
        make(out / "eager", checkpoint, ["unused"], 100, eager=True)
    with pytest.raises(ValueError, match=said):
        run_gap.rescore(out, checkpoint, ["none"], "eager", None, noise=False)
    with pytest.raises(ValueError, match="model='nowhere': no folder with a config.json"):
        make(tmp_path / "new", "nowhere", ["unused"], 100, eager=True)


def test_arrays_that_do_not_fit_are_an_error(rollouts, tmp_path):
    replace(rollouts, log_probs=rollouts.log_probs[1:]).save(tmp_path)
    with pytest.raises(ValueError, match="101 log_probs for 102 response tokens"):
        Rollouts.load(tmp_path)
    replace(rollouts, offsets=rollouts.offsets[1:]).save(tmp_path)
    with pytest.raises(ValueError, match="12 offsets for 12 sequences"):
        Rollouts.load(tmp_path)
    rollout.save(tmp_path / "rollouts.safetensors", {"tokens": rollouts.tokens})
    with pytest.raises(ValueError, match="expected the arrays tokens, offsets, prompts, log_probs, found tokens"):
        Rollouts.load(tmp_path)


# ---- the report


@pytest.fixture(scope="module")
def measured(checkpoint, rollouts, tmp_path_factory):
    """A folder as ``gap --mode both`` leaves it, but for the engine: the compiled one is the aligned trainer, the eager one
    the unaligned trainer with another bf16 rounding of one log-prob in ten."""
    out = tmp_path_factory.mktemp("gap")
    versions = {"vllm": "0.30.0"}
    plain = score(tiny("qwen3").eval(), rollouts)["log_probs"]
    noisy = torch.where(torch.arange(len(plain)) % 10 == 0, plain.bfloat16().float(), plain)
    for mode, log_probs in (("compiled", rollouts.log_probs), ("eager", noisy)):
        meta = {"model": checkpoint, "checkpoint": rollout.checkpoint_digest(Path(checkpoint))}
        meta |= {"response_tokens": 102, "versions": versions, "temperature": 1.0}
        replace(rollouts, log_probs=log_probs, meta=meta).save(out / mode)
        preset = get({"compiled": "vllm_compiled", "eager": "vllm_cpu"}[mode])
        (out / mode / run_gap.PRESET).write_text(json.dumps({"device": "cpu", "preset": preset.as_dict()}))
    at = torch.arange(0, 102, 5)
    noise = torch.randn(len(at), VOCAB, generator=torch.Generator().manual_seed(0))
    rollout.save(out / "compiled" / "next_tokens.safetensors", vars(NextTokens(at, noise.log_softmax(-1))))
    done = CliRunner().invoke(cli.app, ["gap", "score", str(out), "--backend", "eager"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out, done.output


def schema(name: str) -> dict:
    return json.loads((resources.files(gap.__package__) / f"{name}.schema.json").read_text())


def test_the_json_is_as_its_schema_says(measured):
    found = json.loads((measured[0] / "gap.json").read_text())
    jsonschema.validate(found, schema("gap"))
    assert found["schema_version"] == VERSION
    for broken in ({**found, "modes": {}}, {**found, "schema_version": 99}, {**found, "device": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema("gap"))
    del found["modes"]["compiled"]["rows"][0]["k3"]
    with pytest.raises(jsonschema.ValidationError, match="'k3' is a required property"):
        jsonschema.validate(found, schema("gap"))


def test_kept_rollouts_are_scored_again_without_an_engine(measured):
    found = json.loads((measured[0] / "gap.json").read_text())
    compiled, eager = (found["modes"][mode] for mode in ("compiled", "eager"))
    assert (compiled["preset"], eager["preset"]) == ("vllm_compiled", "vllm_cpu")
    assert {r["arm"]: r["k3"][0] for r in compiled["rows"]}["all"] == 0
    assert "vLLM compiled" in measured[1] and "Noise floor" in measured[1]


def test_two_by_two_crosses_engines_and_trainers(measured):
    modes = json.loads((measured[0] / "gap.json").read_text())["modes"]
    table = gap_report.two_by_two(modes)
    assert table.columns == ("vLLM", "trainer unaligned", "trainer aligned to compiled", "trainer aligned to eager")
    k3 = {row[0]: [float(cell.split()[0]) for cell in row[1:]] for row in table.rows}
    assert k3["compiled"][1] == 0 < min(k3["compiled"][0], k3["compiled"][2])  # the compiled engine is that trainer
    assert k3["eager"][0] < k3["eager"][1]  # aligned to the wrong engine is worse than unaligned
    assert gap_report.two_by_two({"compiled": modes["compiled"]}) is None


def test_a_report_is_one_page_with_every_table_and_picture(measured):
    out, _ = measured
    assert CliRunner().invoke(cli.app, ["attribute", str(out)], catch_exceptions=False).exit_code == 0
    done = CliRunner().invoke(cli.app, ["gap", "report", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for section in gap_report.sections(out):
        assert section.title in page and section.title in text
        for figure in section.figures:
            assert f"report.{figure.name}.svg" in text and (out / f"report.{figure.name}.svg").exists()
    assert page.count("<img ") == text.count("![") >= 8
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # self-contained
    titles = [section.title for section in gap_report.sections(out)]
    assert titles[0].startswith("Two by two") and any(t.startswith("Exact KL") for t in titles)
    assert any(t.startswith("Attribution") for t in titles)


def test_attribution_over_points_takes_the_same_scores(measured):
    """Groups are sets of points: rope's three are one player of this model whichever way they are named."""
    out, _ = measured
    wanted = "rope,swiglu,add_rms_norm,carry"
    done = CliRunner().invoke(cli.app, ["attribute", str(out), "--players", wanted], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads((out / "attribution.json").read_text())
    jsonschema.validate(found, schema("attribution"))
    modes = found["modes"]["compiled"]
    assert sum(p["value"][0] for p in modes["players"]) == pytest.approx(modes["whole"]["value"][0], rel=1e-12, abs=0)
    done = CliRunner().invoke(cli.app, ["attribute", str(out), "--players", "act,carry"], catch_exceptions=False)
    assert {
        p["players"][0] for p in json.loads((out / "attribution.json").read_text())["modes"]["compiled"]["players"]
    } == {
        "act",
        "carry",
    }
    done = CliRunner().invoke(cli.app, ["attribute", str(out), "--players", "silu"])
    assert str(done.exception) == (
        "players='silu': choose from rope, swiglu, add_rms_norm, carry, qk_normed, qk_norm, cos_sin, product, act, sum, normed"
    )
    done = CliRunner().invoke(cli.app, ["attribute", str(out), "--players", "sum,normed"], catch_exceptions=False)
    # the eager engine stores normed as the trainer does, so that these two points' sets are among its scores
    assert list(json.loads((out / "attribution.json").read_text())["modes"]) == ["eager"]
    said = f"not attributed: {out / 'compiled'}, vllm_compiled: no k3 for 2 of 4 sets, sum first"
    assert said in " ".join(done.output.split())


def test_the_report_and_the_attribution_are_of_the_layout_scored_last(measured, tmp_path):
    out = tmp_path / "gap"
    shutil.copytree(measured[0], out)

    def run(*arguments):
        done = CliRunner().invoke(cli.app, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return {name: json.loads((out / f"{name}.json").read_text()) for name in ("gap", "attribution")}

    before = run("attribute", str(out))
    title = "Gap: vLLM compiled, aligned to vllm_compiled"
    assert title in [section.title for section in gap_report.sections(out)]
    run("gap", "score", str(out), "--backend", "eager", "--layout", "single", "--no-noise")
    after = run("attribute", str(out))
    for name, found in after.items():
        jsonschema.validate(found, schema(name))
        assert {m["layout"] for m in found["modes"].values()} == {"single"}
        assert {m["layout"] for m in before[name]["modes"].values()} == {"batched"}
    k3 = {r["arm"]: r["k3"][0] for r in after["gap"]["modes"]["compiled"]["rows"]}
    whole = after["attribution"]["modes"]["compiled"]["whole"]["value"][0]
    assert whole == pytest.approx(k3["none"] - k3["all"], rel=1e-9, abs=0)
    assert whole != pytest.approx(before["attribution"]["modes"]["compiled"]["whole"]["value"][0], rel=1e-9, abs=0)
    titles = [section.title for section in gap_report.sections(out)]
    assert f"{title}, trainer single" in titles and "Triage: vLLM compiled, trainer single, unaligned" in titles
    assert read_gap(out / "compiled")[0].trainer == pytest.approx(
        load_file(out / "compiled" / "trainer.none.none.single.safetensors")["log_probs"].double().numpy()
    )
    run("gap", "score", str(out), "--backend", "eager", "--layout", "padded", "--no-noise", "--regions", "none")
    done = CliRunner().invoke(cli.app, ["attribute", str(out)])
    assert re.search("no scores for .*, padded; run .* --regions subsets --layout padded ", str(done.exception))
    run("gap", "score", str(out), "--backend", "eager", "--no-noise")
    assert run("attribute", str(out))["attribution"]["modes"] == before["attribution"]["modes"]


def test_the_triage_of_a_gap_knows_the_models_experts(measured, tmp_path, monkeypatch):
    """None here, as its config says: ``gap`` and ``triage`` on its folder have read it."""
    out, known, real = tmp_path / "gap", [], triage.triage
    shutil.copytree(measured[0], out)

    def spy(sample, facts, *more):
        known.append(facts.experts)
        return real(sample, facts, *more)

    monkeypatch.setattr(triage, "triage", spy)
    run_gap.rescore(out, None, ["none"], "eager", None, noise=False)
    run_triage(out / "compiled")
    assert known == [0, 0, 0]  # compiled, eager, and the command
    triage.triage_rollouts(*read_gap(out / "compiled"))
    assert known[3:] == [None]  # the control


UNREADABLE = "no safetensors in it (Error while deserializing header: header too small)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rollouts.json",
            "{",
            "no JSON in it (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        ("rollouts.json", "[]", "expected a mapping in it, found list"),
        ("rollouts.safetensors", "x", UNREADABLE),
        ("preset.json", "x", "no JSON in it (Expecting value: line 1 column 1 (char 0))"),
        ("preset.json", "{}", "not written by this command (KeyError: 'device'); run `gap` again"),
        (
            "preset.json",
            '{"device": "cpu", "preset": {}}',
            "not written by this command (KeyError: 'name'); run `gap` again",
        ),
        ("preset.json", None, "not there, and it says what the scores are aligned to; run `gap` again"),
        ("next_tokens.safetensors", "x", UNREADABLE),
    ],
)
@pytest.mark.parametrize("command", ["gap score", "attribute"])
def test_a_damaged_file_of_a_gap_is_one_sentence(
    measured, tmp_path, monkeypatch, capsys, name, content, message, command
):
    out = tmp_path / "gap"
    shutil.copytree(measured[0], out)
    file = out / "compiled" / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    if command == "attribute" and name == "next_tokens.safetensors":
        file = out / "compiled" / "trainer.none.none.batched.safetensors"  # what it reads in its place
        file.write_text(content)
        message = f"{message}; remove it"
    monkeypatch.setattr(sys, "argv", ["verl-rounding-align", *command.split(), str(out)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err.strip()) == (2, f"error: {file}: {message}")


def test_rollouts_that_do_not_say_what_made_them_ask_for_it(measured, tmp_path):
    out = tmp_path / "gap"
    shutil.copytree(measured[0], out)
    meta = json.loads((out / "compiled" / "rollouts.json").read_text())
    del meta["model"]
    (out / "compiled" / "rollouts.json").write_text(json.dumps(meta))
    done = CliRunner().invoke(cli.app, ["gap", "score", str(out)])
    assert str(done.exception) == "model=None: no such folder; give the checkpoint that made the rollouts as --model"


def test_log_probs_of_other_responses_are_no_floor(checkpoint, rollouts, tmp_path):
    rollout.save(tmp_path / "prefill.safetensors", {"log_probs": rollouts.log_probs[1:]})
    with pytest.raises(ValueError) as error:
        gap.measure(trainer(checkpoint, rollouts, tmp_path), [], "vllm_compiled", [])
    assert str(error.value) == f"{tmp_path}: 101 log_probs in prefill.safetensors for 102 response tokens"


def test_a_folder_without_a_gap_says_what_to_run(tmp_path):
    done = CliRunner().invoke(cli.app, ["gap", "report", str(tmp_path)])
    assert str(done.exception) == (
        f"{tmp_path}: no gap.json, attribution.json, score.json, landing.json, triage.json; "
        f"run `verl-rounding-align gap --out {tmp_path} ...`"
    )


FINDING = dict(cause="rounding-sized", confidence="likely", evidence="", next_step="")
NOTHING = {
    "triage.json": {"findings": [FINDING]},
    "attribution.json": {"modes": {}},
    "gap.json": {"modes": {}, "model": "tiny"},
}


@pytest.mark.parametrize(
    ("versions", "title", "made"),
    [
        ({"triage.json": {"torch": "1"}}, "folder", "torch 1"),
        ({"attribution.json": {"torch": "1"}, "triage.json": {"torch": "1"}}, "folder", "torch 1"),
        (
            {
                "gap.json": {"torch": "1", "vllm": "3"},
                "attribution.json": {"torch": "1"},
                "triage.json": {"torch": "2"},
            },
            "tiny",
            "torch 1 (gap.json, attribution.json) and 2 (triage.json), vllm 3 (gap.json)",
        ),
    ],
)
def test_a_report_names_what_there_is_and_the_versions_of_each_file(tmp_path, versions, title, made):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, of in versions.items():
        payload = {**NOTHING[name], "schema_version": VERSION, "versions": of}
        (folder / name).write_text(json.dumps(payload))
    gap_report.write(folder)
    for page in ("report.md", "report.html"):
        text = html.unescape((folder / page).read_text())
        assert f"{title}: where the trainer's log-probs differ from the engine's" in text and made in text
        assert "None" not in text


# ---- a real engine


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command_measures_a_real_engine(tmp_path):
    """vLLM, eager, on a tiny random model: rollouts of independent sequences, prompts longer together than one batch of
    the engine (a split prompt with a seed would end it), every floor and the exact divergence, from one command."""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, str(root / "recipes/quickstart/make_assets.py"), str(tmp_path)], check=True)
    prompts = [f"{'abcdefgh' * 9}{i % 10}" for i in range(30)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    out = tmp_path / "out"
    options = ["--mode", "eager", "--regions", "all", "--tokens", "1", "--full-vocab", "40", "--backend", "eager"]
    options += ["--prompts", str(tmp_path / "prompts.txt")]
    command = [
        sys.executable,
        "-m",
        "verl_rounding_align",
        "gap",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(out),
    ]
    subprocess.run([*command, *options], check=True, cwd=root)
    found = json.loads((out / "gap.json").read_text())
    jsonschema.validate(found, schema("gap"))
    eager = found["modes"]["eager"]
    arms_found = [r["arm"] for r in eager["rows"]]
    variants = [title for title, _ in gap.VARIANTS.values()]
    assert arms_found == ["none", "all", *FLOORS, gap.PREFILL_ROW, *variants]
    none, everything = eager["exact"]
    assert none["positions"] == 40 and none["kl"][0] > everything["kl"][0] > 0  # alignment helps, exactly measured
    rollouts = Rollouts.load(out / "eager")
    again = Rollouts.load(out / "eager" / "scheduling")
    d, _, at = gap.common(rollouts, again)
    assert len(again) == run_gap.NOISE_PROMPTS and len(at) > 0.5 * len(again.log_probs)  # the same seeds draw alike
    other = [rollouts.sequence(i)[int(rollouts.prompts[i]) :].tolist() for i in (0, 10, 20)]  # one prompt, three seeds
    assert prompts[0] == prompts[10] == prompts[20] and len({tuple(o) for o in other}) == 3
    whole = NextTokens.load(out / "eager")
    # fp32 log-probs of size 5: each probability is off by 2^-24 * 5 of itself and a few roundings, the sum of 32 by 32 more
    assert torch.allclose(whole.log_probs.exp().sum(-1), torch.ones(40), atol=64 * 2**-24, rtol=0)
    chosen_all = torch.cat([rollouts.sequence(i)[int(rollouts.prompts[i]) :] for i in range(len(rollouts))])
    chosen = chosen_all[whole.at]
    there = whole.log_probs.gather(1, chosen[:, None])[:, 0]
    # prefill against decoding moves a logit by a bf16 step at most, 2^-6 between 2 and 4; the next position is the control
    assert torch.allclose(there, rollouts.log_probs[whole.at], atol=2**-6, rtol=0)
    assert not torch.allclose(there, rollouts.log_probs[(whole.at + 1) % len(chosen_all)], atol=2**-6, rtol=0)


# ---- progress


def test_the_bar_is_never_full_before_the_last_token():
    """In tokens, of whole rounds; a round is as long as those before, the first one as long as it may be."""
    assert rollout._expected(0, 0, 0.5, 20_000, 48, 256) == (6144, 2 * 48 * 256)
    assert rollout._expected(9600, 48, 0.5, 20_000, 48, 256) == (9600 + 4800, 3 * 9600)
    assert rollout._expected(9600, 48, 1.0, 10_000, 48, 256) == (0.99 * 19200, 19200)
    for kept, share in ((0, 1.0), (19_000, 1.0), (25_000, 0.0), (25_000, 1.0)):
        done, total = rollout._expected(kept, kept // 100, share, 20_000, 48, 256)
        assert kept * 0.99 <= done <= 0.99 * total


def test_what_follows_the_last_token_is_a_bar_of_its_own():
    progress = Progress(disable=True)
    with bars.follow(progress, "generates", "is asked") as tell:
        tell(60, 100)
        assert [(t.completed, t.total) for t in progress.tasks] == [(60, 100)]
        tell(100, 100)
        tell(100, 100)
        assert [(t.description, t.total) for t in progress.tasks] == [("generates", 100), ("is asked", None)]
    assert progress.finished


def test_who_asks_while_rollouts_are_written_finds_whole_ones(rollouts, tmp_path, monkeypatch):
    """The parent polls ``rollouts.json``: what stands there is replaced at once, never rewritten in place."""
    rollouts.save(tmp_path)
    before = (tmp_path / "rollouts.json").stat().st_ino
    found = []
    replaced = Path.replace

    def replace_and_look(file, to):
        found.append(rollout._meta(tmp_path))
        return replaced(file, to)

    monkeypatch.setattr(Path, "replace", replace_and_look)
    replace(rollouts, meta={"response_tokens": 7}).save(tmp_path)
    assert found[0] == rollouts.meta and rollout._meta(tmp_path) == {"response_tokens": 7}
    assert (tmp_path / "rollouts.json").stat().st_ino != before
    assert rollout._meta(tmp_path / "nothing") == {}


@pytest.fixture
def vllm(monkeypatch):
    """Return a stand-in for vLLM's process: ``steps`` are what it does between two looks, with its folder and its log."""
    state = SimpleNamespace(steps=[], requests=[], status=0)

    def run(module, arguments, *, log, limit, silence, environment, tell):
        assert (module, limit, silence) == (ENGINES["vllm"].generate, rollout.SILENCE, True)
        folder = Path(arguments[0])
        state.requests.append(json.loads((folder / "request.json").read_text()))
        log.write_bytes(b"")
        for step in state.steps:
            step(folder, log)
            tell(1.0)
        return state.status

    monkeypatch.setattr(process, "run", run)
    return state


def test_make_tells_how_far_a_process_is(checkpoint, rollouts, tmp_path, vllm):
    """What it logs and keeps is what is told, and a round's last line is not counted for the next one."""

    def half(folder, log):
        log.write_bytes(b"Processed prompts:  50%|#####     | 1/2 [00:01<00:01]\n")

    def kept(folder, log):
        (folder / "partial").mkdir()
        (folder / "partial" / "rollouts.json").write_text(json.dumps({"response_tokens": 40, "sequences": 2}))
        log.write_bytes(b"Processed prompts: 100%|##########| 2/2 [00:01<00:01]\n")

    def done(folder, log):
        rollouts.save(folder)

    vllm.steps, told = [half, kept, done], []
    make(tmp_path, checkpoint, ["a", "b"], 100, eager=True, progress=lambda *x: told.append(x), length=50)
    assert told == [(50, 100), (40, 120), (102, 102)]


def test_a_process_that_fails_is_one_sentence(checkpoint, tmp_path, vllm):
    vllm.steps, vllm.status = [lambda folder, log: log.write_text("ValueError: no kernel\n")], 1
    with pytest.raises(process.EngineFailed) as error:
        make(tmp_path, checkpoint, ["a"], 1, eager=True)
    assert str(error.value) == f"vLLM ended with status 1: ValueError: no kernel; see {tmp_path / 'rollouts.log'}"


# ---- going on after an interruption


@pytest.fixture
def interrupted(checkpoint, rollouts, tmp_path, vllm):
    """Return a function that makes rollouts in a folder in which a run was interrupted after its first round, and says
    (whether the round was still there when vLLM was started, what was said)."""
    found = []

    def interrupt(folder, log):
        meta = {"versions": vllm.requests[-1]["versions"], "response_tokens": 102}
        replace(rollouts, meta=meta).save(folder / "partial")

    def look(folder, log):
        found.append((folder / "partial").exists())
        rollouts.save(folder)

    def again(change=lambda folder: None, **options):
        said = []
        vllm.steps, vllm.status = [interrupt], 1
        with pytest.raises(process.EngineFailed):
            make(tmp_path, checkpoint, ["a"], 100, eager=True)
        change(tmp_path)
        vllm.steps, vllm.status = [look], 0
        make(tmp_path, checkpoint, ["a"], 100, eager=True, say=said.append, **options)
        return found[-1], said

    return again


def test_an_interrupted_run_goes_on(interrupted):
    assert interrupted() == (True, [])


def test_it_goes_on_with_another_release_of_what_samples_nothing(interrupted, monkeypatch):
    now = report.versions()
    monkeypatch.setattr(report, "versions", lambda: {**now, "verl": "0.0.1", "machine": "other"})
    assert interrupted(lambda folder: monkeypatch.setattr(report, "versions", lambda: now)) == (True, [])


@pytest.mark.parametrize("package", ["vllm", "torch", "transformers"])
def test_it_does_not_go_on_under_another_release(interrupted, monkeypatch, tmp_path, package):
    """Rounds of two engines would stand in one file."""
    now = {**report.versions(), package: "2.0"}
    monkeypatch.setattr(report, "versions", lambda: now)
    there, said = interrupted(lambda folder: monkeypatch.setattr(report, "versions", lambda: {**now, package: "2.1"}))
    assert not there
    assert said == [f"{tmp_path}: begins anew, what there was so far was made with {package} 2.0, not 2.1"]


def test_it_does_not_go_on_where_nobody_knows_what_made_it(interrupted, tmp_path):
    def forget(folder):
        (folder / "partial" / "rollouts.json").write_text("{}")

    there, said = interrupted(forget)
    assert not there and said[0].startswith(f"{tmp_path}: begins anew, what there was so far was made with vllm")
    assert "of an unknown release, not " in said[0]


def test_it_does_not_go_on_with_other_options(interrupted, tmp_path):
    assert interrupted(length=17) == (
        False,
        [f"{tmp_path}: begins anew, what there was so far was sampled in another way"],
    )


def test_an_engine_of_another_release_is_not_asked_more_about_rollouts(
    checkpoint, rollouts, tmp_path, vllm, monkeypatch
):
    versions = {**report.versions(), "vllm": "0.1"}
    made_by = rollout.checkpoint_digest(Path(checkpoint))
    meta = {"checkpoint": made_by, "mode": "eager", "prompts": rollout.digest(["a"]), "versions": versions}
    replace(rollouts, meta=meta).save(tmp_path)
    assert len(make(tmp_path, checkpoint, ["a"], 100, eager=True)) == len(rollouts)  # they are read all the same
    monkeypatch.setattr(report, "versions", lambda: {**versions, "vllm": "0.2"})
    with pytest.raises(ValueError) as error:
        make(tmp_path, checkpoint, ["a"], 100, eager=True, extras={"prefill": 1})
    assert str(error.value) == (
        f"{tmp_path}: its rollouts were made with vllm 0.1, not 0.2, so that the engine that is here cannot be asked more "
        "about them; measure anew, with another folder as --out"
    )
    assert vllm.requests == []
    monkeypatch.setattr(report, "versions", lambda: versions)
    make(tmp_path, checkpoint, ["a"], 100, eager=True, extras={"prefill": 1})
    assert [request["extras"] for request in vllm.requests] == [{"prefill": 1}]
