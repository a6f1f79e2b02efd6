"""The contract: the probe names exactly the points an engine stores, and says so when it cannot.

The toy engine is plain PyTorch with a rounding switch at every place, written without our regions. vLLM's layers are
probed as installed, and with a rounding put into them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.nn import functional as F

from verl_rounding_align.engines import presets, probe
from verl_rounding_align.engines.probe import (
    AMBIGUOUS,
    EXACT,
    NO_MATCH,
    Case,
    Site,
    exit_code,
    probe_site,
    refute,
)
from verl_rounding_align.engines.probe.run import run_probe
from verl_rounding_align.engines.spec import ModelSpec
from verl_rounding_align.regions import KINDS, REGIONS

ROPE = json.dumps({"rope_theta": 1e4, "rope_type": "default"})
SPEC = ModelSpec("qwen3", 40, 21, 2, 1, 16, 1e-6, ROPE, 64, qk_norm=True, expert_size=32)
CASES = (Case(5, 0, 1.0), Case(12, 1, 0.25))


@dataclass
class Toy:
    """An engine that stores, at each site kind, the points in ``stored``; ``noise`` disturbs one MLP output."""

    stored: dict = field(default_factory=dict)
    spec: ModelSpec = SPEC
    noise: bool = False
    table: torch.dtype = torch.float32
    name, mode, compiled, device = "toy 1.0", "eager", False, "cpu"

    def __post_init__(self):
        generator = torch.Generator().manual_seed(5)
        self.qk_weights = tuple((1 + 0.3 * torch.randn(16, generator=generator)).bfloat16() for _ in range(2))
        self.norm_weights = tuple((1 + 0.3 * torch.randn(40, generator=generator)).bfloat16() for _ in range(3))

    def keep(self, kind, point, x):
        return x.bfloat16().float() if point in self.stored.get(kind, ()) else x

    def cos_sin(self, positions):
        angles = positions[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
        return tuple(torch.cat((t, t), -1).to(self.table).float() for t in (angles.cos(), angles.sin()))

    def rope(self, positions, qkv):
        cos, sin = (self.keep("attention", "cos_sin", x[:, None]) for x in self.cos_sin(positions))
        q, k, _ = qkv.view(len(qkv), -1, 16).split([2, 1, 1], 1)
        return tuple(self.rotate(x.float(), cos, sin, w) for x, w in zip((q, k), self.qk_weights, strict=True))

    def rotate(self, x, cos, sin, weight):
        if self.spec.qk_norm:
            x = self.keep("attention", "qk_normed", x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            x = self.keep("attention", "qk_norm", weight.float() * x)
        turned = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return sum(self.keep("attention", "product", p) for p in (x * cos, turned * sin)).bfloat16()

    def swiglu(self, gate_up, kind="mlp"):
        gate, up = gate_up.float().chunk(2, -1)
        out = (self.keep(kind, "act", F.silu(gate)) * up).bfloat16()
        if self.noise:
            out[3, 4] += 1
        return out

    def experts(self, gate_up):
        return self.swiglu(gate_up, "experts")

    def stream(self, residual, *deltas):
        outputs, residual = [], residual.float()
        for kind, delta, weight in zip(("mlp_add", "attn_add", "final"), deltas, self.norm_weights, strict=True):
            total = delta.float() + residual
            h = self.keep(kind, "sum", total)
            normed = self.keep(kind, "normed", h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
            outputs.append((weight.float() * normed).bfloat16())
            residual = self.keep(kind, "carry", total)
        return tuple(outputs)


def row_of(kind: str, engine, cases=CASES) -> probe.Row:
    (site,) = [site for site in probe.sites(engine) if site.kind == kind]
    return probe_site(site, cases, engine.name, engine.mode)


EVERY = [(kind, s) for kind, region in KINDS.items() for s in probe.subsets(REGIONS[region].points)]


@pytest.mark.parametrize(("kind", "stored"), EVERY, ids=[f"{k}-{'+'.join(sorted(s)) or 'none'}" for k, s in EVERY])
def test_every_subset_of_points_at_every_site_kind_is_named(kind, stored):
    row = row_of(kind, Toy({kind: stored}))
    inert = {"carry"} if kind == "final" else set()
    assert (row.verdict, row.points, row.inert, row.share) == (EXACT, stored - inert, inert, 1.0)
    assert row.runner_up is not None and row.runner_up_share < 1


def test_adds_are_told_apart_whatever_the_others_store():
    stored = {"mlp_add": {"carry", "normed"}, "attn_add": {"sum"}, "final": {"normed"}}
    rows = {row.kind: row for row in probe.probe(Toy(stored), CASES)}
    assert {kind: rows[kind].points for kind in stored} == stored


def test_kinds_follow_the_model():
    kinds = [row.kind for row in probe.probe(Toy(), CASES)]
    dense = [row.kind for row in probe.probe(Toy(spec=replace(SPEC, expert_size=None)), CASES)]
    assert (kinds, dense) == (list(KINDS), [kind for kind in KINDS if kind != "experts"])


def test_points_of_an_absent_qk_norm_are_inert_not_ambiguous():
    row = row_of("attention", Toy({"attention": {"product"}}, replace(SPEC, qk_norm=False)))
    assert (row.verdict, row.points, row.inert) == (EXACT, {"product"}, {"qk_normed", "qk_norm"})
    assert len(row.matches) == 4


@pytest.mark.parametrize(("table", "inert"), [(torch.bfloat16, {"cos_sin"}), (torch.float32, set())])
def test_cos_sin_is_inert_where_the_table_is_bf16_already(table, inert):
    row = row_of("attention", Toy({"attention": {"cos_sin", "product"}}, table=table))
    assert (row.verdict, row.points, row.inert) == (EXACT, {"cos_sin", "product"} - inert, inert)


def synthetic(engine: float, outputs: dict[str, float]) -> probe.Row:
    """Probe ``add_rms_norm`` subsets (written as s, n, c) that return constants; other subsets return 0."""
    letter = {"sum": "s", "normed": "n", "carry": "c"}

    def candidates(case):
        for points in probe.subsets(letter):
            yield (
                points,
                "",
                (torch.tensor([1.0, outputs.get("".join(v for k, v in letter.items() if k in points), 0)]),),
            )

    return probe_site(Site("attn_add", ("out",), lambda case: (torch.tensor([1.0, engine]),), candidates), CASES)


def test_subsets_that_match_and_differ_elsewhere_are_ambiguous():
    row = synthetic(5, {"": 5, "s": 5, "n": 6, "sn": 7})
    assert (row.verdict, row.points, set(row.matches)) == (AMBIGUOUS, None, {frozenset(), frozenset({"sum"})})
    assert exit_code([row]) == 1


def test_no_match_reports_the_best_subset_and_the_first_difference():
    row = row_of("mlp", Toy({"mlp": {"act"}}, noise=True))
    assert (row.verdict, row.points, row.matches, row.best) == (NO_MATCH, None, (), {"act"})
    assert row.share == 1 - len(CASES) / row.elements
    assert (row.differs.case, row.differs.output, row.differs.index) == (str(CASES[0]), "act", (3, 4))
    assert row.differs.engine == pytest.approx(row.differs.candidate + 1, rel=2**-7)
    assert exit_code([row]) == 1


def test_exit_code_is_zero_only_if_every_row_is_exact():
    good, bad = synthetic(5, {"": 5}), synthetic(9, {"": 5})
    assert [exit_code(rows) for rows in ([good], [good, good], [good, bad], [])] == [0, 0, 1, 1]


def test_no_case_is_an_error_not_an_exact_match():
    with pytest.raises(ValueError, match=r"^mlp: no case to probe$"):
        row_of("mlp", Toy(), cases=())


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_an_engine_made_from_a_preset_agrees_with_it(name):
    preset = presets.get(name)
    assert refute(probe.probe(Toy(preset.points), CASES), preset) == []


@pytest.mark.parametrize(("kind", "point"), [(k, p) for k, r in KINDS.items() for p in REGIONS[r].points])
def test_a_preset_with_one_wrong_point_is_refuted(kind, point):
    preset = presets.get("vllm_compiled")
    wrong = replace(preset, points={**preset.points, kind: preset.points[kind] ^ {point}})
    lines = refute([row_of(kind, Toy(preset.points))], wrong)
    if (kind, point) == ("final", "carry"):  # inert
        assert lines == []
    else:
        assert len(lines) == 1 and lines[0].startswith(f"vllm_compiled: {kind}: claims {{")


def test_refutation_says_what_is_claimed_and_what_is_stored():
    row = row_of("mlp", Toy({"mlp": {"act"}}))
    assert refute([row], presets.get("vllm_compiled")) == [
        f"vllm_compiled: mlp: claims {{}}, toy 1.0 eager stores {{act}} (exact, 100.0000% of {row.elements} elements)"
    ]


@pytest.mark.parametrize("case", probe.CASES, ids=str)
def test_norm_inputs_have_sums_of_squares_that_are_exact_in_any_order(case):
    residual, *deltas = probe.residual_rows(case, 4096, torch.bfloat16)
    heads = probe.qkv_rows(case, 256, 128, torch.bfloat16).view(-1, 128)
    total, sums = residual.float(), []
    for delta in deltas:
        total = total + delta.float()
        sums.append(total)
    assert not torch.equal(total, total.bfloat16().float())  # storing the sum shows
    for x in (*sums, heads.float()):
        squares, exact = x.pow(2), x.double().pow(2).sum(-1)
        for order in (slice(None), torch.randperm(x.shape[-1])):
            assert torch.equal(squares[:, order].cumsum(-1)[:, -1].double(), exact)


def test_json_holds_every_row_and_the_header():
    rows = probe.probe(Toy(), CASES)
    loaded = json.loads(probe.to_json(rows, model="m", versions={"torch": "2"}))
    assert (loaded["model"], loaded["versions"], len(loaded["rows"])) == ("m", {"torch": "2"}, len(rows))
    assert loaded["rows"][0]["points"] == [] and loaded["rows"][-1]["inert"] == ["carry"]


def test_table_shows_answers_and_where_nothing_matches(capsys):
    from rich.console import Console

    rows = [row_of("mlp", Toy({"mlp": {"act"}})), row_of("mlp", Toy(noise=True))]
    Console(width=200).print(probe.render(rows))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("toy 1.0", "exact", "{act}", "no match", "best {}", "act[3, 4] engine"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "model=None, family=None: give exactly one of model and family"),
        (dict(model="a", family="b"), "model='a', family='b': give exactly one of model and family"),
        (dict(family="qwen3", engine="sglang"), "engine='sglang': unknown engine 'sglang'; choose from vllm"),
        (dict(family="qwen3", mode="fast"), "mode='fast': unknown mode 'fast'; choose from compiled, eager, both"),
        (
            dict(family="gemma2"),
            "family='gemma2': unsupported model family 'gemma2'; choose from llama, mistral, qwen2, qwen3, qwen3_moe",
        ),
        (dict(model="/nowhere"), "model='/nowhere': no config.json in this folder"),
    ],
)
def test_run_probe_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        run_probe(**arguments)
    assert str(error.value) == message


def test_a_missing_engine_and_a_missing_config_are_named(monkeypatch):
    def offline(name):
        raise OSError("cannot reach the hub\nlong advice")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(ValueError, match=r"^model='no/such': no config found: cannot reach the hub$"):
        ModelSpec.from_model("no/such")
    monkeypatch.setattr("verl_rounding_align.engines.Engine.installed", lambda self: None)
    with pytest.raises(ValueError) as error:
        run_probe(family="qwen3")
    assert str(error.value) == "engine='vllm': vllm is not installed in this environment; the probe runs its layers"


def test_spec_is_read_from_the_checkpoints_config(tmp_path):
    from transformers import LlamaConfig

    scaling = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling["original_max_position_embeddings"] = 64
    config = LlamaConfig(hidden_size=48, intermediate_size=1001, num_attention_heads=6, num_key_value_heads=2,
                         rms_norm_eps=1e-5, max_position_embeddings=512, rope_parameters=scaling)  # fmt: skip
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_model(str(tmp_path))
    assert (spec.head_dim, spec.eps, spec.max_position, spec.qk_norm) == (8, 1e-5, 512, False)
    assert json.loads(spec.rope_parameters) == scaling
    fewer = spec.fewer()
    assert (fewer.hidden_size, fewer.head_dim, fewer.heads, fewer.intermediate_size) == (48, 8, 3, 256 + 1001 % 64)


# ---- vLLM's own layers


@pytest.fixture
def layers():
    """vLLM's layers and sizes as in ``test_presets_vllm``: compiled callables are shared."""
    return pytest.importorskip("test_presets_vllm").layers


VLLM_CASES = (Case(7, 0, 1.0), Case(130, 1, 2.0**-4))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "preset"), [("compiled", "vllm_compiled"), ("eager", "vllm_cpu")])
def test_vllm_has_exactly_one_answer_per_site_and_it_is_the_preset(layers, mode, preset):
    rows = probe.probe(layers("qwen3", mode), VLLM_CASES)
    assert refute(rows, presets.get(preset)) == []
    # the experts' kernel approximates exp: a few elements in 100,000 are off by one step, or none, as the draw has it
    experts = rows.pop([row.kind for row in rows].index("experts"))
    assert (exit_code(rows), experts.share > 0.999, experts.runner_up_share < 0.9) == (0, True, True)


@pytest.mark.vllm
@pytest.mark.slow
def test_with_emulate_precision_casts_compiled_vllm_stores_what_its_source_stores(layers):
    """Inductor then keeps the source's casts: Hugging Face's points, but vLLM's native norm reads the unrounded sum."""
    from test_presets_vllm import SPECS, vllm_layers

    layers("qwen3", "compiled")
    # torch's own patch: monkeypatch deletes the entry when it undoes
    with torch._inductor.config.patch(emulate_precision_casts=True):
        rows = {row.kind: row for row in probe.probe(vllm_layers.VllmLayers(SPECS["qwen3"], "compiled"), VLLM_CASES)}
    hf = presets.get("hf_eager").points
    want = {"attention": hf["attention"], "mlp": hf["mlp"], "final": {"normed"}}
    want |= dict.fromkeys(("attn_add", "mlp_add"), {"normed", "carry"})
    assert {kind: rows[kind].points for kind in want} == want


def test_the_variable_sets_inductors_switch():
    command = "import torch._inductor.config as c; print(c.emulate_precision_casts)"
    environment = os.environ | {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}
    found = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


@pytest.mark.vllm
def test_run_probe_uses_the_checkpoints_own_rope_scaling(tmp_path):
    """A yarn table is scaled by its own factor: the engine's cosines, not the default's, are what the region gets."""
    pytest.importorskip("verl_rounding_align.engines.vllm.layers")
    from transformers import LlamaConfig

    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    LlamaConfig(hidden_size=64, intermediate_size=65, num_attention_heads=4, num_key_value_heads=2,
                rope_parameters=yarn, max_position_embeddings=256).save_pretrained(tmp_path)  # fmt: skip
    rows = run_probe(model=str(tmp_path), mode="eager", cases=VLLM_CASES).rows
    assert (exit_code(rows), refute(rows, presets.get("vllm_cpu"))) == (0, [])
    assert rows[0].points == {"cos_sin"} and rows[0].inert == {"qk_normed", "qk_norm"}


def rounded_sum(norm):
    """Return vLLM's norm with one rounding more: the residual sum is stored before the norm reads it."""

    def forward(x, residual=None):
        total = x + residual
        return norm(total), total

    return forward


@pytest.mark.vllm
def test_a_rounding_put_into_vllms_layers_is_named(layers):
    from test_presets_vllm import SPECS, vllm_layers

    engine = vllm_layers.VllmLayers(SPECS["qwen3"], "eager")
    before = {kind: row_of(kind, engine, VLLM_CASES).points for kind in ("mlp", "attn_add", "mlp_add")}
    norm = engine._stream.post_attention_layernorm
    norm._forward_method = rounded_sum(norm.forward_native)
    engine._swiglu.act_fn._forward_method = lambda x: (F.silu(x.float()[:, :128]) * x.float()[:, 128:]).to(x.dtype)
    after = {kind: row_of(kind, engine, VLLM_CASES).points for kind in before}
    assert before == {"mlp": {"act"}, "attn_add": {"normed", "carry"}, "mlp_add": {"normed", "carry"}}
    assert after == {"mlp": set(), "attn_add": {"sum", "normed", "carry"}, "mlp_add": {"normed", "carry"}}
