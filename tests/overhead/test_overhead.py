"""Contract of the overhead tool: statistics that can be checked by hand, a refusal where the spread hides the effect,
exact byte counts, a row for every arm, scope and phase, and a GPU script whose logic runs on a CPU. Nothing here asserts
on a measured time."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet
from tiny import tiny, tokens
from transformers import AutoModelForCausalLM

from verl_rounding_align.overhead import alternatives, arms, measure, models, render, run, shares
from verl_rounding_align.overhead.compare import compare
from verl_rounding_align.overhead.memory import peak_bytes, saved_bytes
from verl_rounding_align.overhead.run import run_overhead
from verl_rounding_align.regions import REGIONS, Group, Region
from verl_rounding_align.report import rows as report

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "overhead"


# statistics


def test_the_estimate_is_the_median_of_paired_ratios_not_the_ratio_of_medians():
    """Ratios 2, 2, 2, 1.1, 1.1: median 2, though the medians are 10 and 11. Medians of resampled pairs are 1.1 or 2, each
    in more than 2.5 % of resamples, so the interval is 1.1-2."""
    c = compare([1, 1, 10, 10, 10], [2, 2, 20, 11, 11])
    assert (c.baseline_s, c.variant_s, c.ratio) == (10, 11, 2)
    assert (c.low, c.high) == (1.1, 2) and c.spread == 2 - 1.1
    assert c.verdict == "2.000x (95 %: 1.100-2.000)"


def test_a_refused_ratio_says_effect_and_spread():
    """Ratios 2, 1, 1, 1, 2: median 1; medians of resamples are 1 or 2."""
    c = compare([1, 2, 3, 4, 5], [2, 2, 3, 4, 10])
    assert (c.ratio, c.low, c.high, c.spread) == (None, 1, 2, 1)
    assert c.verdict == "no ratio: effect 0.0 % is within the spread 100.0 % (95 %: 1.000-2.000)"


def test_spread_of_samples_is_their_interquartile_range_over_their_median():
    c = compare([1, 2, 3, 4, 5], [10, 10, 10, 10, 10])
    assert c.baseline_iqr == (4 - 2) / 3 and c.variant_iqr == 0


@pytest.mark.parametrize(
    "ratios, seen",
    [
        ([0.90, 0.91, 0.92, 0.91, 0.90], True),
        ([1.10, 1.11, 1.12, 1.11, 1.10], True),
        ([0.90, 0.99, 1.05, 0.97, 1.01], False),  # on both sides of 1
        ([0.70, 0.98, 0.98, 0.98, 0.99], False),  # on one side, but the interval is longer than the effect
    ],
)
def test_a_ratio_is_given_only_where_the_effect_exceeds_the_spread(ratios, seen):
    c = compare([1.0] * 5, ratios)
    assert (c.ratio is not None) is seen
    assert (abs(sorted(ratios)[2] - 1) > c.spread) is seen
    assert c.verdict.startswith("no ratio: effect ") is not seen
    assert c.low <= sorted(ratios)[2] <= c.high
    assert (c.baseline_samples, c.variant_samples) == ((1.0,) * 5, tuple(ratios))


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    """200 experiments of 15 pairs with lognormal noise, true median ratio 0.9. A percentile interval of a median of 15
    covers 95 % nominally; 170 of 200 is five binomial standard deviations (3.1) below 190."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        noise = torch.exp(0.05 * torch.randn(2, 15, generator=generator, dtype=torch.float64))
        c = compare(noise[0].tolist(), (0.9 * noise[1]).tolist(), resamples=500)
        hits += c.low <= 0.9 <= c.high
    assert 170 < hits < 200


def test_too_few_pairs_are_refused():
    for call in (lambda: compare([1] * 4, [1] * 4), lambda: run_overhead(shape="qwen3-8b", pairs=4)):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == "pairs=4: at least 5 complete pairs are needed for an interval"


# memory


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    """y = (x w)^2 of x (8, 4), w (4, 4), fp32: matmul keeps x and w, the square keeps the product. x 128, w 64, product
    128 bytes; a second reader of x and a view of it add nothing."""
    x, w = torch.ones(8, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)

    def run():
        return (x @ w).pow(2).sum()

    assert saved_bytes(run) == 128 + 64 + 128
    assert saved_bytes(run, exclude=[w]) == 128 + 128
    assert saved_bytes(lambda: run() + x.pow(2).sum() + x[:2].pow(2).sum(), exclude=[w]) == 128 + 128
    assert saved_bytes(lambda: run() + x.exp().sum(), exclude=[w]) == 128 + 128 + 128
    with torch.no_grad():
        assert saved_bytes(run) == 0


def test_counting_saved_bytes_keeps_no_tensor_alive_and_leaves_gradients_right():
    x = torch.ones(8, requires_grad=True)
    outputs = []
    saved_bytes(lambda: outputs.append(x.exp()) or outputs[0])  # exp keeps its own output
    (outputs[0].sum()).backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_peak_bytes_is_the_highest_sum_of_live_allocations():
    """1000 + 2000 floats live together, then 2000 are freed before 500 more: peak 12000 bytes, not 14000, not 6000."""

    def run():
        a, b = torch.empty(1000), torch.empty(2000)
        del b
        return a, torch.empty(500)

    assert peak_bytes(run, "cpu") == 12000


# shapes


# total parameters as the model cards state them (safetensors index; tied heads once)
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
}


@pytest.mark.parametrize("shape", models.SHAPES)
def test_a_shape_has_the_published_number_of_parameters(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.shape_config(shape))
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[shape]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(shape="qwen"),
            "shape='qwen': unknown shape 'qwen'; choose from smollm2-135m, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, "
            "deepseek-r1-distill-qwen-1.5b",
        ),
        (
            dict(shape="qwen3-8b", family="qwen3_moe"),
            "family='qwen3_moe': shapes are dense; measure a mixture of experts with --model",
        ),
        (
            dict(shape="qwen3-8b", family="gemma2"),
            "family='gemma2': unsupported model family 'gemma2'; choose from llama, mistral, qwen2, qwen3, qwen3_moe",
        ),
        (dict(), "give either a model (folder or hub name) or a shape (with or without a family)"),
        (dict(model="m", shape="s"), "give either a model (folder or hub name) or a shape (with or without a family)"),
        (
            dict(shape="qwen3-8b", phases=["backward"]),
            "phase='backward': unknown phase 'backward'; choose from forward, forward_backward, step",
        ),
        (dict(shape="qwen3-8b", scopes=["mlp"]), "scope='mlp': unknown scope 'mlp'; choose from layers, model"),
        (
            dict(shape="qwen3-8b", region_backends=["triton"]),
            "backend='triton': unknown backend 'triton'; choose from compile, eager",
        ),
        (dict(shape="qwen3-8b", device="gpu"), "device='gpu': unknown device 'gpu'; choose from cpu, cuda"),
        (dict(shape="qwen3-8b", tokens=1), "tokens=1: expected 2 or more"),
        (dict(shape="qwen3-8b", layers=0), "layers=0: expected 1 or more"),
        (dict(shape="qwen3-8b", threads=0), "threads=0: expected 1 or more"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_choices(arguments, message):
    with pytest.raises(ValueError) as error:
        run_overhead(**arguments)
    assert str(error.value) == message


def test_without_plans_every_group_paper_and_all_are_measured(monkeypatch):
    """The arms follow the table of groups: a group that is added is measured too."""
    asked = []
    monkeypatch.setattr(run, "aligned", lambda regions, engine, how: asked.append(regions))
    monkeypatch.setattr(run, "build", lambda *args: ("tiny", None))
    monkeypatch.setattr(run, "measure", lambda *args, **kwargs: [])
    run_overhead(shape="qwen3-8b", region_backends=["eager"], device="cpu")
    assert asked == ["rope", "swiglu", "add_rms_norm", "carry", "paper", "all"]
    asked.clear()
    monkeypatch.setitem(REGIONS, "gain", Region("gain", None, {"g": ""}, {"x": ""}, {"gain": Group("gain", {"g"}, "")}))
    run_overhead(shape="qwen3-8b", region_backends=["eager"], device="cpu")
    assert asked == ["rope", "swiglu", "add_rms_norm", "carry", "gain", "paper", "all"]


def test_a_shape_runs_as_another_family_and_with_fewer_layers():
    config = models.shape_config("qwen3-0.6b", family="llama", layers=4)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 4, 1024)


# rows


ARMS = (("rope", "compile"), ("all", "compile"), ("all", "eager"))


@pytest.fixture(scope="module")
def rows():
    """Rows of a tiny model: two plans, both backends, both scopes, every phase."""
    ways = [arms.aligned(p, "vllm_compiled", b) for p, b in ARMS]
    model = tiny("qwen3", layers=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with measure.cpu_threads(1):  # two threads that spin for each other are slow on a busy machine
        out = measure.measure(model, "tiny", ways, tokens=48, pairs=5, warmup=1, progress=False)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not any("forward" in m.__dict__ for m in model.modules()), "the model was not given back its forwards"
    return out


def test_there_is_a_row_for_every_arm_scope_and_phase(rows):
    keys = {(r.arm, r.backend, r.scope, r.phase) for r in rows}
    assert len(keys) == len(rows) == len(ARMS) * 2 * 3
    for r in rows:
        assert len(r.timing.baseline_samples) == len(r.wall.variant_samples) == 5
        assert (r.clock, r.threads) == ("process", 1) and r.baseline == "none"
        assert (r.memory is None) == (r.phase != "forward_backward")
    assert {r.plan for r in rows} == {
        "rope: hf_eager -> vllm_compiled",
        "rope+swiglu+add_rms_norm+carry: hf_eager -> vllm_compiled",
    }


def test_compiled_regions_keep_less_for_backward_and_eager_ones_keep_more(rows):
    counted = [r for r in rows if r.phase == "forward_backward"]
    assert all((r.saved_ratio < 1) == (r.backend == "compile") for r in counted), [
        (r.arm, r.backend, r.scope, r.saved_ratio) for r in counted
    ]
    assert all((r.peak_ratio < 1) == (r.backend == "compile") for r in counted)


def test_rows_become_a_table_and_json(rows, tmp_path):
    table = render.render(rows)
    assert table.row_count == len(rows)
    report.write_json(tmp_path / "rows.json", {"rows": [r.as_dict() for r in rows]})
    read = json.loads((tmp_path / "rows.json").read_text())
    assert read["versions"]["torch"] == torch.__version__
    assert [r["verdict"] for r in read["rows"]] == [r.verdict for r in rows]
    assert [r["timing"]["ratio"] for r in read["rows"]] == [r.timing.ratio for r in rows]


def test_a_site_that_never_runs_is_an_error():
    arm, model = arms.aligned("rope", "vllm_compiled", "eager"), tiny("llama", layers=1)
    with pytest.raises(ValueError) as error, arm.enter(model, "model"):
        pass
    assert str(error.value) == (
        "plan='rope': these modules were patched but never ran, so their cost was not measured: model.layers.0.self_attn"
    )
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_fp32_head_multiplies_in_fp32():
    model = tiny("llama", layers=1)
    ids = torch.arange(7)[None]
    with arms.fp32_head().enter(model, "model") as call, torch.no_grad():
        out = call(ids)
        hidden = model.model(ids, use_cache=False).last_hidden_state
    assert out.dtype == torch.float32
    head = model.lm_head.weight.double().T
    # fp32 sums of 64 products: 64 additions and a product, each off by 2^-24 of what it adds up to at most
    bound = 65 * 2**-24 * (hidden.double().abs() @ head.abs())
    assert ((out.double() - hidden.double() @ head).abs() <= bound).all()
    assert not torch.equal(out, model(ids, use_cache=False).logits.float())


def test_an_fp32_head_over_an_aligned_model_multiplies_what_the_aligned_layers_give():
    model, ids = tiny("llama", layers=1), tokens()
    under = arms.aligned("all", "vllm_compiled", "eager")
    arm = arms.fp32_head(under)
    assert (arm.name, arm.plan, arm.backend) == ("all, and an fp32 LM head", under.plan, "eager")
    with torch.no_grad():
        with under.enter(model, "model"):
            hidden = model.model(ids, use_cache=False).last_hidden_state
        with arm.enter(model, "model") as call:
            out = call(ids)
        with arms.fp32_head().enter(model, "model") as call:
            plain = call(ids)
    assert torch.equal(out, hidden.float() @ model.lm_head.weight.float().T)
    assert not torch.equal(out, plain)


# where time goes


def test_every_operator_has_one_kind_and_the_unaligned_pass_is_100_percent(monkeypatch):
    """Compiled regions take time in the aligned pass, none in the unaligned one; attention and products do in both."""
    monkeypatch.setattr(shares, "build", lambda *args: ("tiny", tiny("llama", layers=1)))
    found = shares.shares(shape="tiny", plans=("swiglu",), tokens=64, threads=1, passes=2)
    none, aligned = found["shares"]["none"], found["shares"]["swiglu"]
    assert set(none) == set(aligned) == set(shares.KINDS) and sum(none.values()) == pytest.approx(100)
    for kind in ("matrix products", "attention", "loss", "other operators"):
        assert none[kind] > 0 and aligned[kind] > 0, kind
    for kind in ("compiled regions", "calling them"):
        assert none[kind] == 0 < aligned[kind], kind
    assert render.render_shares(found).row_count == len(shares.KINDS) + 2
    # swiglu: 64 tokens, two inputs and an output of the intermediate size, bf16; inputs are read and written thrice
    size = 64 * tiny("llama", layers=1).config.intermediate_size * 2
    expected = 100 * (3 * 2 + 2) * size / found["bandwidth"]
    assert found["floor"]["swiglu"] > 0 and found["floor"]["swiglu"] == pytest.approx(expected / found["seconds"])


# what a user would pick instead


@pytest.mark.slow
def test_alternatives_count_graphs_and_say_why_liger_was_not_measured(monkeypatch):
    """On tiny sizes: one aligned plan, whole-model compile with and without the flag, fp32 LM head, Liger. Graphs are
    Dynamo's own count; what they are compiled to does not matter here, so that nothing is (backend ``eager``)."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, fullgraph=False, options=None, **limit: compile_(f, backend="eager", fullgraph=fullgraph),
    )
    monkeypatch.setattr(alternatives, "build", lambda *args: ("tiny", tiny("llama", layers=1)))
    found = alternatives.run_alternatives(
        shape="tiny", plans=["rope"], tokens=32, lengths=3, device="cpu", threads=1, pairs=5, progress=False
    )
    names = [
        "rope",
        "torch.compile",
        "torch.compile, emulate_precision_casts",
        "fp32 LM head",
        "rope, and an fp32 LM head",
        "Liger",
    ]
    assert [r.arm for r in found] == names
    by_name = dict(zip(names, found, strict=True))
    assert by_name["Liger"].measured == "not measured: Liger's kernels are Triton kernels for a GPU"
    for name in names[:-1]:
        row = by_name[name]
        assert row.measured == "yes" and row.lengths == 3 and row.first_call_steps > 0
        assert [r.phase for r in row.rows] == ["forward", "forward_backward"]
    assert by_name["rope"].graphs_first == 1 and by_name["rope"].graphs_lengths == 0
    assert by_name["torch.compile"].graphs_first >= 1 and by_name["torch.compile"].graphs_lengths >= 1
    assert by_name["fp32 LM head"].graphs_first == by_name["fp32 LM head"].graphs_lengths == 0
    assert by_name["rope, and an fp32 LM head"].graphs_first == 1
    assert render.render_alternatives(found).row_count == 6


# the GPU script, on a CPU


def test_gpu_script_needs_no_rich():
    """It runs where there are torch, Triton and Transformers only; libraries for terminals and configs may be missing."""
    code = (
        "import sys, runpy; sys.modules.update(dict.fromkeys(['rich', 'typer', 'jinja2', 'matplotlib', 'omegaconf', 'hydra']));"
        f"runpy.run_path({str(RECIPE / 'gpu_check.py')!r}); from verl_rounding_align.report import progress;"
        "advance = progress.bar(progress.progress(False), 'x', 1); advance(); print('ran')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", RECIPE / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def payload(gpu_check, tmp_path_factory):
    """What the script writes with --device cpu --small, all parts."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    with measure.cpu_threads(1):
        code = gpu_check.main(["--device", "cpu", "--small", "--pairs", "5", "--layers", "1", "--out", str(out)])
    assert code == 0
    return json.loads(out.read_text())


def test_gpu_script_finds_the_roundings_of_the_piece_by_values_and_by_schedule(payload):
    found = payload["sites"]["small"]
    answers = {(r["add"], r["point"]): r["stored"] for r in found["rows"]}
    assert answers == {
        ("attn_add", "sum"): False,
        ("attn_add", "carry"): False,
        ("mlp_add", "sum"): False,
        ("mlp_add", "carry"): True,
    }
    assert found["observing_changed_nothing"] is True
    assert found["second_add_reads_first_sum_as"] == "recomputed"
    for r in found["rows"][:3]:  # the other candidate is refuted, not merely worse
        assert r["fractions"]["not stored"] > 0.999 and r["fractions"]["stored"] < 0.9


def test_gpu_script_would_see_a_carry_that_is_rounded(gpu_check, monkeypatch):
    """Negative control: with emulate_precision_casts Inductor keeps every rounding that the engine's formulas name."""
    options = {"emulate_precision_casts": True}
    monkeypatch.setattr(gpu_check.Engine, "options", staticmethod(lambda device: options))
    monkeypatch.setattr(gpu_check, "HOOK_TESTED", SpecifierSet("<2"))
    sizes = gpu_check.Sizes("small", 64, 112, 4, 2, 16)
    found = gpu_check.sites(sizes, 64, "cpu")
    answers = {(r["add"], r["point"]): r["stored"] for r in found["rows"]}
    assert answers["attn_add", "carry"] is True
    assert found["schedule"].startswith("refused: reading Inductor's schedule works with torch <2 ")


@pytest.mark.parametrize(
    "reads, dtype, answer",
    [
        (("mm0", "mm1", "arg0"), "bfloat16", "recomputed"),
        (("mm1", "sum0"), "bfloat16", "bfloat16"),
        (("mm1", "sum0"), "float32", "float32"),
    ],
)
def test_schedule_says_how_the_second_add_reads_the_first_sum(gpu_check, reads, dtype, answer):
    def stored(name, extern=False, dtype="bfloat16", reads=(), output=False):
        return gpu_check.Stored(0, extern, name, dtype, ("s0", "64"), reads, (), output)

    piece = [
        stored("mm0", True),
        stored("sum0", dtype=dtype),
        stored("mm1", True),
        stored("out", reads=reads, output=True),
    ]
    assert gpu_check.first_sum_by_schedule(piece, hidden=64) == answer


def test_gpu_script_refuses_to_read_the_schedule_of_an_untested_torch(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "HOOK_TESTED", SpecifierSet("==2.0.*"))
    with pytest.raises(ValueError) as error:
        gpu_check.schedule(None, ())
    assert str(error.value) == (
        "reading Inductor's schedule works with torch ==2.0.* (tested with 2.11.0, 2.13.0); "
        f"torch {torch.__version__} is installed"
    )


def test_gpu_script_compares_regions_with_the_engine_and_finds_the_preset_best(payload):
    rows = payload["regions"]
    for region in ("swiglu", "add_rms_norm", "rope"):
        mine = [r for r in rows if r["region"] == region]
        (preset,) = [r for r in mine if r["preset"]]
        assert preset["engine"] == 1.0
        assert all(r["engine"] < 0.9 for r in mine if not r["preset"])  # every control is refuted
        assert all(r["eager"] > 1 - 1e-3 for r in mine)  # this package's two backends
        for errors in (r["gradients"] for r in mine if r["gradients"]):
            assert 0 < errors["compile"] <= 1.01 * errors["eager"]


def test_gpu_script_has_overhead_rows_and_says_what_it_was(payload):
    assert [(r["arm"], r["scope"], r["phase"]) for r in payload["overhead"]] == [
        (arm, "layers", phase) for phase in ("forward", "forward_backward") for arm in ("rope", "paper", "all")
    ]
    assert payload["small"] is True and payload["skipped"] == [] and payload["versions"]["torch"] == torch.__version__


def test_gpu_script_keeps_what_it_has_when_the_budget_is_used_up_or_a_part_fails(gpu_check, monkeypatch, tmp_path):
    out = tmp_path / "gpu.json"

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "sites", fail)
    monkeypatch.setattr(gpu_check, "regions", lambda *args: [])
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: [])
    gpu_check.check("cpu", True, out, 1e9, 5, 1)
    assert json.loads(out.read_text())["skipped"] == ["sites small: RuntimeError: out of memory"]
    gpu_check.check("cpu", True, out, -1, 5, 1)
    assert json.loads(out.read_text())["skipped"] == [
        f"{part}: the budget of -1 s was used up" for part in ("sites small", "regions small", "overhead small 64")
    ]


# the README's tables


def test_readme_tables_say_not_measured_where_no_file_is(tmp_path):
    table = readme_table()
    assert table.costs(tmp_path)[2:] == [
        "| smollm2-135m, cpu | not measured | not measured | not measured | not measured |",
        "| qwen3-0.6b, cpu | not measured | not measured | not measured | not measured |",
        "| Qwen3-1.7B, 4B, 8B layers, GPU | not measured | not measured | not measured | not measured |",
    ]
    assert table.shares(tmp_path) == ["| time in |", "| --- |", "| not measured |"]
    assert table.alternatives("qwen3-0.6b", tmp_path)[2:] == [
        "| not measured | not measured | not measured | not measured | not measured |"
    ]


def test_shares_stand_in_order_of_the_unaligned_pass_with_their_sum(tmp_path):
    found = {
        "model": "m",
        "layers": 2,
        "shares": {"none": {"a": 30.0, "b": 70.0}, "all": {"a": 25.0, "b": 70.04}},
        "floor": {"all": 3.14},
    }
    report.write_json(tmp_path / "shares-smollm2-135m.json", found)
    assert readme_table().shares(tmp_path) == [
        "| time in | m, 2 layers: none, % | m, 2 layers: all, % |", "| --- | --- | --- |",
        "| b | 70.0 | 70.0 |", "| a | 30.0 | 25.0 |", "| sum | 100.0 | 95.0 |",
        "| compiled regions' least traffic, at the speed of memory |  | 3.1 |",
    ]  # fmt: skip


def test_cost_stands_beside_the_gap_that_is_left(tmp_path):
    timing = dict(low=1.03, high=1.07, ratio=1.05)
    row = dict(arm="torch.compile", plan="none", measured="yes", first_call_steps=10.6, graphs_lengths=1, lengths=6,
               rows=[dict(phase="forward_backward", timing=timing)])  # fmt: skip
    liger = dict(arm="Liger", plan="none", measured="not measured: no GPU")
    report.write_json(tmp_path / "alternatives-x.json", {"rows": [row, liger]})
    ratio = {"torch.compile": [0.98, 0.95, 1.01], "engine": [0.7, 0.6, 0.8]}
    report.write_json(tmp_path / "alternatives_gap.json", {"ratio": ratio, "unpaired": ["engine"]})
    assert readme_table().alternatives("x", tmp_path)[2:] == [
        "| torch.compile | 0.98x (0.95-1.01) | 11 | 1 over 6 | 1.050x (1.030-1.070) |",
        "| Liger | not measured: no GPU |  |  |  |",
        "| engine | 0.70x (0.60-0.80) |  |  | of sampling: not measured |",
    ]
    report.write_json(tmp_path / "engine_cost.json", {"timing": dict(timing, ratio=None)})
    last = readme_table().alternatives("x", tmp_path)[-1]
    assert last == "| engine | 0.70x (0.60-0.80) |  |  | of sampling: no difference seen (1.030-1.070) |"


def test_what_one_would_pick_instead_scores_the_same_tokens_its_own_way():
    """Each arm is a trainer of its own: other log-probs than the plain one, and close to them."""
    recipe = recipe_module("alternatives_gap")
    model, ids = tiny("qwen3").eval(), tokens()
    plain = model(ids, use_cache=False).logits.float()
    for arm, variant in recipe.ARMS.items():
        if "torch.compile" not in arm:  # whole-model compilation is measured by the recipe
            logits = variant(copy.deepcopy(model))(ids, use_cache=False).logits
            assert not torch.equal(logits.float(), plain) and (logits.float() - plain).abs().max() < 1, arm
    assert variant(copy.deepcopy(model))(ids).logits.dtype == torch.float32  # the last one: fp32 head


def test_an_unpaired_ratio_adds_both_uncertainties():
    recipe = recipe_module("alternatives_gap")
    row = lambda low, high: SimpleNamespace(k3=((low * high) ** 0.5, low, high))  # noqa: E731
    ratio, low, high = recipe.unpaired(row(1, math.e**6), row(1, math.e**8))  # half-widths 3 and 4: 5
    assert (math.log(ratio), math.log(low), math.log(high)) == pytest.approx((-1, -6, 4))


def test_readme_table_shows_ratios_and_no_times(rows, tmp_path):
    payload = {"rows": [r.as_dict() for r in rows if r.phase == "forward_backward" and r.scope == "model"]}
    report.write_json(tmp_path / "targets-qwen3-0.6b.json", payload)
    line = readme_table().costs(tmp_path)[3]
    (row,) = [r for r in payload["rows"] if (r["arm"], r["backend"]) == ("all", "eager")]
    assert f"| {row['saved_ratio']:.2f}x, {row['peak_ratio']:.2f}x |" in line
    assert f"{row['timing']['low']:.3f}-{row['timing']['high']:.3f}" in line
    assert not re.search(r"\d *m?s\b", line), line


def readme_table():
    return recipe_module("readme_table")


def recipe_module(name):
    spec = importlib.util.spec_from_file_location(name, RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RESULTS = [
    p
    for kind in ("targets", "table", "checkpointing", "alternatives-", "gpu")
    for p in (RECIPE / "results").glob(f"{kind}*.json")
]


@pytest.mark.parametrize("path", sorted(RESULTS), ids=lambda p: p.name)
def test_a_result_file_says_versions_and_device_and_agrees_with_its_samples(path):
    """Every verdict in the repository can be computed again from the samples beside it."""
    payload = json.loads(path.read_text())
    rows = payload.get("rows", []) + payload.get("overhead", [])
    rows = [inner for r in rows for inner in r.get("rows", [r])]
    assert rows and payload["versions"]["torch"] and all(r["device"] for r in rows)
    for r in rows:
        again = compare(r["timing"]["baseline_samples"], r["timing"]["variant_samples"])
        assert (again.verdict, again.ratio) == (r["verdict"], r["timing"]["ratio"])
