"""Contract of the rooms: a region, a model family, an engine and a framework are each added from outside, in at most 40 lines,
through public tables alone, and are then found wherever the package names such things: plans, probe, measurements, overlays,
messages and generated docs. Nothing else is edited. Without the rows none of it is there.

The rows are in the four functions whose names begin with ``add_``; a test counts their lines."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny, tokens
from typer.testing import CliRunner

from verl_rounding_align import align, cli, engines, families, integrations, parse_plan, plan
from verl_rounding_align.engines import presets, probe
from verl_rounding_align.engines.auto import Rollout
from verl_rounding_align.engines.fingerprint import Fingerprint
from verl_rounding_align.engines.probe.run import run_probe
from verl_rounding_align.gap import arms
from verl_rounding_align.regions import GROUPS, KINDS, REGIONS, Group, Region, add_rms_norm, rope, swiglu
from verl_rounding_align.rounding import Rounding, up
from verl_rounding_align.trainers import sites


def add_region(add) -> None:
    """A region that scales embeddings: one point, one site kind, one group."""

    def gain(x, rnd: Rounding):
        return rnd.store(rnd("gained", up(x) * 1.1, x.dtype) * 0.9, x.dtype)

    points, kinds = {"gained": "the embedding times 1.1"}, {"embedding": "the token embedding"}
    groups = {"gain": Group("gain", frozenset(points), "scaled embeddings")}
    add(REGIONS, Region("gain", gain, points, kinds, groups))

    def forward(rnd, context):
        def scaled(self, ids):
            context.count()
            x = torch.nn.functional.embedding(ids, self.weight)
            return context.run(gain, {"x": x}, rnd)

        return scaled

    def place(stack, layer):
        if layer is None:
            yield stack.site("embedding", "embed_tokens", stack.module.embed_tokens, "torch", forward)

    add(sites.PLACES, place, "embedding")

    def question(engine):
        def rows(case):
            return probe.random_rows(case, 64, engine.spec.dtype)

        def candidates(case):
            for points in probe.subsets(REGIONS["gain"].points):
                yield points, "", (probe.candidate(engine, gain, {"x": rows(case)}, points),)

        return probe.Site("embedding", ("x",), lambda case: (engine.gain(rows(case)),), candidates)

    add(probe.QUESTIONS, question, "embedding")


def add_engine(add) -> None:
    """An engine that runs the regions themselves, with the points of its preset stored, and gain's where it is there."""
    stores = {kind: frozenset() for kind in KINDS} | {"attention": frozenset({"cos_sin"}), "mlp": frozenset({"act"})}
    known = (stores, dict.fromkeys(GROUPS, presets.BITWISE), "tests", "toy", "cpu", True)
    add(presets.PRESETS, presets.Preset("toy_eager", *known))

    class Layers:
        name, compiled, device = "toy 1.0", False, "cpu"

        def __init__(self, spec, mode, compilation):
            self.spec, self.mode, draw = spec, mode, torch.Generator().manual_seed(0)
            self.fingerprint, self.qk_weights = Fingerprint("toy", "1.0", "cpu", mode), (None, None)
            self.norm_weights = [1 + torch.rand(spec.hidden_size, generator=draw).to(spec.dtype) for _ in probe.ADDS]

        def run(self, kind, function, *args, **kwargs):
            return function(*args, rnd=Rounding(stores[kind]), **kwargs)

        def cos_sin(self, positions):
            angles = positions[:, None] * 1e4 ** -torch.linspace(0, 1, self.spec.head_dim)
            return angles.cos(), angles.sin()

        def rope(self, positions, qkv):
            heads = [self.spec.heads, self.spec.kv_heads, self.spec.kv_heads]
            q, k, _ = qkv.view(len(qkv), -1, self.spec.head_dim).split(heads, 1)
            return self.run("attention", rope.rope, q, k, *(x[:, None] for x in self.cos_sin(positions)))

        def swiglu(self, gate_up):
            return self.run("mlp", swiglu.swiglu, *gate_up.chunk(2, -1))

        def stream(self, residual, *deltas):
            out, residual = [], residual.float()
            for kind, delta, weight in zip(probe.ADDS, deltas, self.norm_weights, strict=True):
                normed, residual = self.run(kind, add_rms_norm.add_rms_norm, delta, residual, weight, self.spec.eps)
                out.append(normed)
            return out

        def gain(self, x):
            return self.run("embedding", REGIONS["gain"].function, x)

    add(engines.ENGINES, engines.Engine("toy", ("pytest",), Layers))


def add_family(add) -> None:
    """A family whose code is Llama's."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

    class ToyConfig(LlamaConfig):
        model_type = "toy_llama"

    class ToyForCausalLM(LlamaForCausalLM):
        config_class = ToyConfig

    add(CONFIG_MAPPING._extra_content, ToyConfig, "toy_llama")
    add(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, ToyForCausalLM, ToyConfig)
    add(
        families.FAMILIES,
        families.Family("toy_llama", "Llama", source="transformers.models.llama.modeling_llama"),
        "toy_llama",
    )


def add_framework(add) -> None:
    """A framework of three lines: its config is JSON, its key is ``align``, its loop hands log-probs to the monitor."""

    def read_rollout(file, device, probed):
        found = json.loads(Path(file).read_text())
        return Rollout(found["release"], device, found["eager"])

    row = integrations.Framework(
        name="toy",
        key="align",
        metrics="metrics",
        releases=">=1,<2",
        tested=("1.0",),
        trainer="hf_eager",
        start="align=rope",
        ran="in this test",
        group="toy_align",
        overlay=lambda value: {"align": value},
        read_rollout=read_rollout,
    )
    add(integrations.FRAMEWORKS, row)


@pytest.fixture
def add(monkeypatch):
    """Add a row to a table, under its own name if no other is given, until the test ends."""
    return lambda table, row, name=None: monkeypatch.setitem(table, name or row.name, row)


@pytest.mark.parametrize("function", [add_region, add_engine, add_family, add_framework])
def test_each_takes_at_most_forty_lines(function):
    assert len(inspect.getsource(function).splitlines()) <= 40


def said(call, *args, **kwargs) -> str:
    """Return the message of the ValueError that a call raises."""
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    return str(error.value)


def run(*args) -> str:
    """Return what the command line prints."""
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args], catch_exceptions=False)
    return result.output


def composed(group: str, value: str):
    """Return the config of a Hydra application with one overlay."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"+{group}={value}"])


# ---- a region


def test_a_region_is_in_every_plan(add):
    preset = presets.get("fp32")
    assert "gain" not in plan.choices() and "unknown region 'gain'" in said(parse_plan, "gain")
    add_region(add)
    assert "gain" in plan.choices() and "gain" in plan.arms() and plan.meanings()["gain"] == "scaled embeddings"
    assert parse_plan("gain", preset).rounding("embedding").points == frozenset()
    assert parse_plan("all", preset).groups == ("rope", "swiglu", "add_rms_norm", "carry")  # nothing shows it: unproven
    assert "choose from none, rope, swiglu, add_rms_norm, carry, gain, paper, all, auto" in said(parse_plan, "gian")


def test_a_preset_that_does_not_know_the_region_refuses_it(add):
    add_region(add)
    assert said(parse_plan, "gain", "vllm_compiled") == (
        "rounding_align='gain': preset vllm_compiled says nothing about 'gain'; choose from rope, swiglu, add_rms_norm, carry"
    )


def test_a_region_runs_in_a_model_and_its_point_is_what_moves(add):
    add_region(add)
    model, ids = tiny("llama").eval(), tokens()
    logits = {}
    for engine in ("hf_eager", "fp32"):
        with align(model, "gain", engine=engine, backend="eager") as alignment:
            logits[engine] = model(ids).logits
            assert [(s.fqn, s.kind) for s in alignment.sites] == [("model.embed_tokens", "embedding")]
            assert alignment.idle() == []
    assert not torch.equal(logits["hf_eager"], logits["fp32"])


def test_a_site_kind_without_a_place_is_refused(add):
    add_region(add)
    del sites.PLACES["embedding"]
    assert said(align, tiny("llama"), "gain", engine="fp32") == (
        "rounding_align='gain': site kind 'embedding' has no place in a Hugging Face model here; choose from mlp_add, "
        "attention, attn_add, mlp, experts, final"
    )


def test_a_region_is_an_arm_of_every_measurement(add):
    add_region(add)
    preset = presets.get("fp32")
    assert "gain" in arms.expand(["subsets"]) and "rope+gain" in arms.expand(["subsets"])
    assert arms.plan("gain", preset) == parse_plan("gain", preset)
    assert arms.plan("gained+act", preset).rounding("embedding").points == frozenset()
    assert "gained" in arms.live(preset)
    from verl_rounding_align.overhead.arms import plans

    assert "gain" in plans()


def test_a_region_has_an_overlay(add):
    add_region(add)
    assert composed("rounding_align", "gain").actor_rollout_ref.actor.rounding_align == "gain"


# ---- an engine


@pytest.fixture
def toy(add):
    add_region(add)
    add_engine(add)


def test_an_engine_is_probed_at_every_site_and_its_preset_stands(toy):
    found = run_probe(family="llama", engine="toy", mode="eager", cases=probe.CASES[:3])
    rows = {row.kind: row for row in found.rows}
    assert set(rows) == set(KINDS) - {"experts"}
    assert {row.verdict for row in found.rows} == {probe.EXACT} and rows["embedding"].points == frozenset()
    assert rows["embedding"].runner_up == {"gained"} and rows["embedding"].runner_up_share < 1
    assert probe.refute(found.rows, presets.get("toy_eager")) == []
    wrong = replace(
        presets.get("toy_eager"), points={**presets.get("toy_eager").points, "embedding": frozenset({"gained"})}
    )
    assert len(probe.refute(found.rows, wrong)) == 1


def test_an_engine_is_named_and_resolved(toy):
    assert said(engines.get, "sglang") == "engine='sglang': unknown engine 'sglang'; choose from vllm, toy"
    assert presets.resolve("toy", "1.0", "cpu", eager=True).name == "toy_eager"
    assert "toy_eager" in said(presets.get, "nobody")
    assert parse_plan("all", "toy_eager").groups == ("rope", "swiglu", "add_rms_norm", "carry", "gain")
    assert "toy_eager" in run("presets")


def test_an_engine_is_what_gap_and_overhead_align_to(toy):
    from verl_rounding_align.overhead.arms import aligned

    live = arms.live(presets.get("toy_eager"))
    assert "product" in live and "cos_sin" not in live  # what its row moves, and what it stores as the trainer does
    assert arms.plan("rope+gain", presets.get("toy_eager")).engine == "toy_eager"
    assert aligned("rope", "toy_eager", "eager").plan == "rope: hf_eager -> toy_eager"
    assert "choose from" in said(aligned, "rope", "toy_eagre", "eager"), "negative control"


# ---- a family


def test_a_family_is_aligned_planned_probed_and_named(add, tmp_path):
    assert "choose from llama, mistral, qwen2, qwen3, qwen3_moe" in said(families.get, "gemma2")
    add_family(add)
    assert said(families.get, "gemma2").endswith("qwen3_moe, toy_llama")
    model, ids = tiny("toy_llama").eval(), tokens()
    plain = model(ids).logits
    with align(model, "rope", backend="eager") as alignment:
        assert str(alignment).startswith("rounding_align: toy_llama, 3 layers, rope 3 sites")
        assert not torch.equal(model(ids).logits, plain)
    model.config.save_pretrained(tmp_path)
    assert "toy_llama, 3 layers, rope 3 sites" in run("plan", "--model", tmp_path, "--engine", "vllm_cpu")
    add_region(add)
    add_engine(add)
    found = run_probe(model=str(tmp_path), engine="toy", mode="eager", cases=probe.CASES[:1])
    assert found.spec.model_type == "toy_llama" and len(found.rows) == 6


def test_a_family_has_the_sizes_that_overhead_measures(add):
    from verl_rounding_align.overhead.models import shape_config

    add_family(add)
    assert shape_config("qwen3-0.6b", "toy_llama", 1).model_type == "toy_llama"


# ---- a framework


def test_a_framework_has_an_overlay_reads_its_config_and_is_named(add, tmp_path):
    assert said(integrations.get, "trlx") == "framework='trlx': unknown framework 'trlx'; choose from verl"
    add_framework(add)
    assert said(integrations.get, "trlx").endswith("choose from verl, toy")
    assert composed("toy_align", "rope").align == "rope"
    config, model = tmp_path / "toy.json", tmp_path / "model"
    config.write_text(json.dumps({"release": "0.30.0", "eager": True}))
    tiny("llama").config.save_pretrained(model)
    options = ("plan", "--model", model, "--rollout-config", config, "--framework", "toy", "--device", "cpu")
    assert "hf_eager -> vllm_cpu" in run(*options)


def test_a_frameworks_loop_gets_its_metrics_from_the_monitor():
    from verl_rounding_align.monitor import Batch, Monitor

    draw, monitor = torch.Generator().manual_seed(0), Monitor(prefix="toy", say=lambda line: None)
    rollout = -torch.rand(4, 8, generator=draw)
    metrics = monitor.observe(1, Batch(rollout + 0.01, rollout, torch.ones(4, 8)))
    assert metrics["toy/mismatch_kl"] == pytest.approx(
        -0.01, rel=1e-5, abs=0
    )  # fp32 log-probs below 1: off by 6e-8 each
    assert metrics["toy/tokens_total"] == 32


# ---- generated docs


def test_every_row_is_in_the_generated_docs(add):
    from docs_tables import tables

    before = "\n".join(tables().values())
    for row in (add_region, add_engine, add_family, add_framework):
        row(add)
    after = "\n".join(tables().values())
    for name in ("gained", "toy_eager", "toy_llama", "in this test"):
        assert after.count(name) > before.count(name), name  # some pages show this file
