"""The contract: a preset's points, put into our regions, give vLLM's own layer outputs bit for bit.

Oracle: the installed vLLM's RMSNorm, rotary embedding, SiluAndMul and fused-experts kernel, in vLLM's own mode, dispatch
and lowering (``engines/vllm/layers.py``). Compiled is compared with compiled, eager with eager.

The order in which a norm's mean is summed is no rounding point, and it is Inductor's choice, made per kernel: with bf16
inputs it keeps 32 partial sums, with an fp32 input 16 (AVX-512), and whether a kernel reads the stream in fp32 depends on
what is fused around it. So the norms' inputs are integers whose squares sum exactly in fp32 in any order; on inputs
without that property a few elements in a million differ by one bf16 step, which a test of its own bounds.

Every equality has its control: toggling any one point of the preset makes the outputs differ.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from verl_rounding_align import backend as backends
from verl_rounding_align import releases
from verl_rounding_align.engines import presets
from verl_rounding_align.engines.spec import ModelSpec
from verl_rounding_align.regions import KINDS, REGIONS
from verl_rounding_align.regions.add_rms_norm import add, add_rms_norm, rms_norm
from verl_rounding_align.regions.rope import rope
from verl_rounding_align.regions.swiglu import swiglu
from verl_rounding_align.rounding import Rounding

pytestmark = pytest.mark.vllm
vllm_layers = pytest.importorskip("verl_rounding_align.engines.vllm.layers")

LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPECS = {
    "qwen3": ModelSpec("qwen3", 96, 128, 4, 2, 64, 1e-6, json.dumps({"rope_theta": 1e6, "rope_type": "default"}), 512,
                       qk_norm=True, expert_size=64),
    "odd": ModelSpec("qwen3", 101, 77, 3, 1, 48, 1e-5, json.dumps({"rope_theta": 1e4, "rope_type": "default"}), 300,
                     qk_norm=True),
    "llama3": ModelSpec("llama", 96, 128, 4, 2, 64, 1e-5,
                        json.dumps(LLAMA3 | {"original_max_position_embeddings": 128}), 1024),
}  # fmt: skip
MODES = {"compiled": "vllm_compiled", "eager": "vllm_cpu"}
SPLIT = "split"  # vLLM's piecewise backend, on CPU Inductor
ADDS = ("mlp_add", "attn_add", "final")  # in the order of the stream
CASES = [(tokens, seed, scale) for tokens in (7, 33, 130) for seed in (0, 1) for scale in (0.05, 1.0, 20.0)]


@functools.cache
def layers(name: str, mode: str):
    if mode == SPLIT:
        return vllm_layers.VllmLayers(SPECS[name], "compiled", config=vllm_layers.engine_config("compiled", split=True))
    return vllm_layers.VllmLayers(SPECS[name], mode)


def draw(case, *width: int) -> list[torch.Tensor]:
    tokens, seed, scale = case
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(tokens, n, generator=generator)).bfloat16() for n in width]


def exact_rows(case, hidden_size: int) -> list[torch.Tensor]:
    """Return (residual, three deltas) whose running sums are integers with an exact sum of squares.

    Twelve columns hold up to 255 in each tensor, the others up to 1: a sum is at most 1020 or 4, and
    12 * 1020^2 + 4^2 * hidden_size < 2^24. A power of two scales them.
    """
    tokens, seed, scale = case
    generator = torch.Generator().manual_seed(seed)
    top = torch.ones(hidden_size)
    top[torch.randperm(hidden_size, generator=generator)[:12]] = 255
    power = 2.0 ** round(math.log2(scale))
    rows = [(2 * torch.rand(tokens, hidden_size, generator=generator) - 1) * (top + 0.49) for _ in range(4)]
    return [(power * row.round()).bfloat16() for row in rows]


def run(function, rows, rnd, mode, **kwargs):
    """Call a region as training does."""
    with torch.no_grad():
        return backends.run(function, rows, rnd, "eager" if mode == "eager" else "compile", **kwargs)


@functools.cache
def engine_output(kind: str, name: str, mode: str, case) -> tuple[torch.Tensor, ...]:
    engine, spec = layers(name, mode), SPECS[name]
    if kind == "attention":
        positions, (qkv,) = rope_inputs(spec, case)
        return engine.rope(positions, qkv)
    if kind == "mlp":
        return (engine.swiglu(*draw(case, 2 * spec.intermediate_size)),)
    return engine.stream(*exact_rows(case, spec.hidden_size))


def rope_inputs(spec, case):
    positions = torch.randint(0, spec.max_position, (case[0],), generator=torch.Generator().manual_seed(case[1]))
    return positions, draw(case, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)


def region_output(kind: str, name: str, mode: str, case, roundings: dict[str, Rounding]) -> tuple[torch.Tensor, ...]:
    engine, spec = layers(name, mode), SPECS[name]
    if kind == "attention":
        positions, (qkv,) = rope_inputs(spec, case)
        q, k, _ = qkv.view(case[0], -1, spec.head_dim).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        cos, sin = (x.unsqueeze(1) for x in engine.cos_sin(positions))
        rows = dict(q=q.contiguous(), k=k.contiguous(), cos=cos, sin=sin)
        params = dict(zip(("q_weight", "k_weight"), engine.qk_weights, strict=True)) if spec.qk_norm else {}
        return run(rope, rows, roundings[kind], mode, params=params, eps=spec.eps)
    if kind == "mlp":
        gate, up_ = draw(case, 2 * spec.intermediate_size)[0].chunk(2, dim=-1)
        return (run(swiglu, dict(gate=gate.contiguous(), up_=up_.contiguous()), roundings[kind], mode),)
    return stream_output(engine, mode, roundings, *exact_rows(case, spec.hidden_size))


def stream_output(engine, mode: str, roundings: dict[str, Rounding], residual, *deltas) -> tuple[torch.Tensor, ...]:
    outputs = []
    for kind, delta, weight in zip(ADDS, deltas, engine.norm_weights, strict=True):
        rows = dict(delta=delta, residual=residual.float())  # the same values; one graph for a stored and a kept carry
        params = dict(weight=weight)
        out, residual = run(add_rms_norm, rows, roundings[kind], mode, params=params, eps=engine.spec.eps)
        outputs.append(out)
    return tuple(outputs)


def differing(kind: str, name: str, mode: str, points: dict[str, frozenset[str]]) -> int:
    """Return how many output elements of all cases differ between vLLM and our region with ``points``."""
    roundings = {k: Rounding(v) for k, v in points.items()}
    return sum(
        int((a != b).sum())
        for case in CASES
        for a, b in zip(
            engine_output(kind, name, mode, case), region_output(kind, name, mode, case, roundings), strict=True
        )
    )


@pytest.mark.parametrize("kind", ["attention", "mlp", "attn_add"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mode", MODES)
def test_region_with_the_presets_points_equals_vllms_layers_bitwise(mode, name, kind):
    assert differing(kind, name, mode, presets.get(MODES[mode]).points) == 0


# carry of the final add is read by nothing
TOGGLES = [(kind, point) for kind in ("attention", "mlp", *ADDS) for point in REGIONS[KINDS[kind]].points]
TOGGLES.remove(("final", "carry"))


@pytest.mark.parametrize(("kind", "point"), TOGGLES)
@pytest.mark.parametrize("mode", MODES)
def test_toggling_any_one_point_of_the_preset_differs_from_vllm(mode, kind, point):
    points = presets.get(MODES[mode]).points
    toggled = {**points, kind: points[kind] ^ {point}}
    assert differing(kind, "qwen3", mode, toggled) > 0


def test_graph_split_at_attention_stores_the_stream_after_the_mlp_only():
    """Inside a piece the sum after attention is never stored; the sum after the MLP leaves the piece in bf16."""
    points = presets.get("vllm_compiled_split").points
    assert differing("attn_add", "qwen3", SPLIT, points) == 0
    for kind in ("attn_add", "mlp_add"):
        assert differing("attn_add", "qwen3", SPLIT, {**points, kind: points[kind] ^ {"carry"}}) > 0


def test_training_splits_the_add_from_the_norm_and_still_equals_vllm():
    """The add after the MLP crosses a layer boundary: a kernel for the sum, a kernel for the norm that reads it."""
    engine, none = layers("qwen3", "compiled"), Rounding()
    for case in CASES:
        residual, delta, *_ = exact_rows(case, 96)
        total = run(add, dict(delta=delta, residual=residual), none, "compiled")
        options = dict(params=dict(weight=engine.norm_weights[0]), eps=engine.spec.eps, dtype=delta.dtype)
        out = run(rms_norm, dict(total=total), none, "compiled", **options)
        assert torch.equal(out, engine_output("mlp_add", "qwen3", "compiled", case)[0])


def test_on_random_rows_only_the_order_of_the_mean_is_left():
    """Reordering a sum of n squares moves the mean by at most n * 2^-24 relative, the output by half of that.

    An output then crosses a bf16 rounding boundary with probability at most 96 * 2^-24 / 2 / 2^-9 < 1.5e-3, and by one
    step only, which is at most 2^-7 of its value.
    """
    engine, points = layers("qwen3", "compiled"), presets.get("vllm_compiled").points
    different = total = 0
    for case in CASES:
        rows = draw(case, *[96] * 4)
        want = stream_output(engine, "compiled", {kind: Rounding(points[kind]) for kind in ADDS}, *rows)
        for a, b in zip(engine.stream(*rows), want, strict=True):
            different, total = different + int((a != b).sum()), total + a.numel()
            assert ((a - b).abs().float() <= 2**-7 * b.abs().float()).all()
    assert different < 1.5e-3 * total


def test_ir_op_left_opaque_rounds_like_the_eager_layer():
    """What ``vllm_layers`` must avoid: torch.compile around vLLM's IR op as one operator, not lowered."""
    config = vllm_layers.engine_config("compiled")
    config.compilation_config.ir_enable_torch_wrap = True
    opaque = vllm_layers.VllmLayers(SPECS["qwen3"], "compiled", config=config)
    case = CASES[1]
    got = opaque.stream(*exact_rows(case, 96))
    assert not torch.equal(got[0], engine_output("attn_add", "qwen3", "compiled", case)[0])
    assert all(map(torch.equal, got, engine_output("attn_add", "qwen3", "eager", case)))


@pytest.mark.parametrize(("kind", "point"), [("mlp", "act"), ("attention", "cos_sin"), ("attn_add", "sum")])
def test_inductor_keeps_a_stored_point_only_when_told_to(kind, point, monkeypatch):
    """Without ``emulate_precision_casts`` the compiled region with the point is the compiled region without it."""

    def outputs(*points: str) -> list[torch.Tensor]:
        roundings = dict.fromkeys((kind, *ADDS), Rounding(points))
        return [x for case in CASES for x in region_output(kind, "qwen3", "compiled", case, roundings)]

    without, kept = outputs(), outputs(point)
    backends.compiled.cache_clear()
    monkeypatch.setattr(backends, "OPTIONS", {})
    try:
        lost = outputs(point)
    finally:
        backends.compiled.cache_clear()
    assert not all(map(torch.equal, kept, without))
    assert all(map(torch.equal, lost, without))


@pytest.mark.parametrize("preset", MODES.values())
def test_experts_kernel_on_cpu_keeps_silu_in_fp32(preset):
    """The fused-experts kernel is opaque to the compiler and the same in both modes.

    It approximates exp (``fast_exp``), so it can be off by one bf16 step where the exact value lies next to a rounding
    boundary; storing silu instead moves about a quarter of the elements.
    """
    engine, points = layers("qwen3", "eager"), presets.get(preset).points["experts"]
    share = {}
    for stored in (points, points ^ {"act"}):
        equal = total = 0
        for case in CASES:
            (gate_up,) = draw(case, 128)
            gate, up_ = gate_up.chunk(2, dim=-1)
            got, want = engine.experts(gate_up), swiglu(gate, up_, Rounding(stored))
            equal, total = equal + int((got == want).sum()), total + got.numel()
            if stored == points:  # one step of bf16 is at most 2^-7 of the value
                assert ((got - want).abs().float() <= 2**-7 * want.abs().float() + 2**-126).all()
        share[stored] = equal / total
    assert share[points] > 0.999
    assert share[points ^ {"act"}] < 0.9


def test_head_dim_that_crashes_vllms_cpu_kernel_is_refused():
    with pytest.raises(ValueError) as error:
        vllm_layers.VllmLayers(replace(SPECS["qwen3"], head_dim=40), "eager")
    assert str(error.value) == (
        "head_dim=40: vLLM's rotary kernel for CPU (mode='eager') reads past the end of heads that are no multiple of 16"
    )


def test_vllm_rounds_fp16_at_the_same_points():
    engine = vllm_layers.VllmLayers(replace(SPECS["qwen3"], dtype=torch.float16), "eager")
    roundings = {kind: Rounding(presets.get("vllm_cpu").points[kind]) for kind in ADDS}
    for case in CASES:
        rows = [row.half() for row in draw(case, *[96] * 4)]
        assert all(map(torch.equal, engine.stream(*rows), stream_output(engine, "eager", roundings, *rows)))


@pytest.mark.parametrize("command", ["probe --family llama --mode eager", "probe --family qwen3"])
def test_an_untested_release_is_one_sentence_and_status_2(monkeypatch, capsys, command):
    """It was an ImportError's traceback, and status 1, which the probe gives for an answer that is not exact."""
    from verl_rounding_align import cli

    monkeypatch.setattr(vllm_layers.vllm, "__version__", "0.99.0+cpu")
    monkeypatch.setattr(sys, "argv", ["verl-rounding-align", *command.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err.strip()) == (
        2,
        "error: the probe works with vllm >=0.28,<0.33 (tested with 0.28.0 to 0.32.0); vllm 0.99.0+cpu is installed",
    )


def test_the_module_itself_refuses_an_untested_release(monkeypatch):
    """Before it imports names that another release may lack."""
    monkeypatch.setattr(vllm_layers.vllm, "__version__", "0.27.9")
    with pytest.raises(releases.UntestedRelease, match=r"^the probe works with vllm .*; vllm 0\.27\.9 is installed$"):
        vllm_layers.__spec__.loader.exec_module(importlib.util.module_from_spec(vllm_layers.__spec__))
