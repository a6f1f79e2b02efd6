"""The site map: what a schedule says about rounding points, on hand-made schedules, on Inductor's, and on vLLM's own.

Every answer has a control in which the same code must answer otherwise: a stream that is stored, a flag that keeps
roundings, a kernel that shows nothing.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from typer.testing import CliRunner

from verl_rounding_align import releases
from verl_rounding_align.engines import presets
from verl_rounding_align.engines.schedule import inductor
from verl_rounding_align.engines.schedule import site_map as sites
from verl_rounding_align.engines.schedule.graph import Graph, Stored, Value
from verl_rounding_align.engines.vllm import sites as sites_vllm

RECIPE = Path(__file__).parents[2] / "recipes" / "where_it_rounds"
SIZE = ("s0", "64")


def graph(values: str, stored: str, keeps_casts: bool = False) -> Graph:
    """Return a graph from lines: ``name op dtype module reads``, and ``buffer kernel dtype value reads``.

    ``-`` is nothing; ``!`` before an operator makes it opaque (and its buffer's kernel not Inductor's); ``>`` before a
    value's name lets it leave the graph.
    """
    loops = [line.split() for line in stored.strip().splitlines()]
    holder = {value: buffer for buffer, _, _, value, *_ in loops}
    made = []
    for line in filter(None, values.splitlines()):
        name, op, dtype, module, *reads = line.split()
        leaves, name, opaque, op = name[0] == ">", name.lstrip(">"), op[0] == "!", op.lstrip("!")
        buffer = name if op == "placeholder" else holder.get(name)
        frames = (("engine/models/m.py", 1, "forward"), ("engine/layers/norm.py", len(made) + 1, "forward"))
        module = "" if module == "-" else module
        made.append(Value(name, op, dtype, SIZE, tuple(reads), buffer, False, module, frames, leaves, opaque))
    opaque = {v.name for v in made if v.opaque}
    leaving = {v.name for v in made if v.output}
    rows = [
        Stored(int(k), v in opaque, b, dtype, SIZE, tuple(reads), (), v in leaving, v, (v,))
        for b, k, dtype, v, *reads in loops
    ]
    return Graph(tuple(made), tuple(rows), keeps_casts)


A, M, N = "layers.1.post_attention_layernorm", "layers.2.input_layernorm", "layers.2.post_attention_layernorm"
# the stream of a middle layer: three adds, each as the engine's source writes it: fp32 sum, rounded for the next add
STREAM = f"""
r0 placeholder bfloat16 -
o1 !aten.mm.default bfloat16 layers.1.self_attn.o_proj
t1 aten.add.Tensor float32 {A} o1 r0
p1 aten.pow.Tensor_Scalar float32 {A} t1
c1 prims.convert_element_type.default bfloat16 {A} t1
d1 !aten.mm.default bfloat16 layers.1.mlp.down_proj
t2 aten.add.Tensor float32 {M} d1 c1
p2 aten.pow.Tensor_Scalar float32 {M} t2
c2 prims.convert_element_type.default bfloat16 {M} t2
o2 !aten.mm.default bfloat16 layers.2.self_attn.o_proj
t3 aten.add.Tensor float32 {N} o2 c2
p3 aten.pow.Tensor_Scalar float32 {N} t3
"""
PRODUCTS = "b1 1 bfloat16 o1\nb2 3 bfloat16 d1\nb3 5 bfloat16 o2\n"


def carry(*graphs: Graph) -> dict[str, bool | None]:
    _, points, _ = sites.read(graphs, 1)
    return {p.kind: p.stored for p in points if p.point == "carry"}


def why(*graphs: Graph) -> dict[str, str]:
    return {p.kind: p.why for p in sites.read(graphs, 1)[1] if p.point == "carry"}


def test_a_stream_in_float32_memory_or_in_registers_is_not_stored():
    in_memory = PRODUCTS + "b4 2 float32 t1 b1 r0\nb5 4 float32 p2 b2 b4\nb6 6 float32 p3 b3 b2 b4"
    in_registers = PRODUCTS + "b4 2 float32 p1 b1 r0\nb5 4 float32 p2 b2 b1 r0\nb6 6 float32 p3 b3 b2 b1 r0"
    assert carry(graph(STREAM, in_memory)) == {"attn_add": False, "mlp_add": False}
    assert carry(graph(STREAM, in_registers)) == {"attn_add": False, "mlp_add": False}


def test_a_stream_that_one_kernel_writes_in_bf16_and_another_reads_is_stored():
    stored = PRODUCTS + "b4 2 bfloat16 c1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 float32 p3 b3 b5"
    assert carry(graph(STREAM, stored)) == {"attn_add": True, "mlp_add": False}


def test_a_bf16_buffer_written_and_read_inside_one_kernel_leaves_carry_open():
    stored = PRODUCTS + "b4 4 bfloat16 c1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 float32 p3 b3 b5"
    assert carry(graph(STREAM, stored)) == {"attn_add": None, "mlp_add": False}
    assert why(graph(STREAM, stored))["attn_add"] == "b4 is bfloat16, written and read inside kernel 4"


def test_readers_that_disagree_leave_carry_open():
    stored = PRODUCTS + "b4 2 bfloat16 c1 b1 r0\nb5 4 float32 p2 b2 b4\nb6 6 float32 p3 b3 b2 b1 r0"
    assert carry(graph(STREAM, stored))["attn_add"] is None


def test_kept_casts_round_in_registers():
    in_registers = PRODUCTS + "b4 2 float32 p1 b1 r0\nb5 4 float32 p2 b2 b1 r0\nb6 6 float32 p3 b3 b2 b1 r0"
    assert carry(graph(STREAM, in_registers, keeps_casts=True)) == {"attn_add": True, "mlp_add": True}


def test_an_add_inside_an_unknown_operator_leaves_carry_open_and_names_it():
    lines = STREAM.replace("t2 aten.add.Tensor float32", "t2 !engine.mystery.default float32")
    stored = PRODUCTS + "b4 2 float32 t1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 float32 p3 b3 b5"
    assert carry(graph(lines, stored)) == {"attn_add": None, "mlp_add": None}
    assert "engine.mystery.default" in why(graph(lines, stored))["mlp_add"]


def pieces(crossing: str) -> tuple[Graph, Graph]:
    """Return a graph that is split at attention; the stream crosses in ``crossing``."""
    lines = STREAM.strip().splitlines()
    leaving = "c2" if crossing == "bfloat16" else "t2"
    first = "\n".join(lines[:9]).replace(f"\n{leaving} ", f"\n>{leaving} ")
    second = f"r1 placeholder {crossing} -\n" + "\n".join(lines[9:]).replace("o2 c2", "o2 r1")
    stored = f"b1 1 bfloat16 o1\nb2 3 bfloat16 d1\nb4 2 float32 p1 b1 r0\nb5 4 {crossing} {leaving} b2 b1 r0"
    return graph(first, stored), graph(second, "b3 1 bfloat16 o2\nb6 2 float32 p3 b3 r1")


def test_on_a_split_graph_the_two_adds_differ():
    assert carry(*pieces("bfloat16")) == {"attn_add": False, "mlp_add": True}
    assert why(*pieces("bfloat16"))["mlp_add"] == "crosses from piece 0 to 1 as a bfloat16 tensor"
    rows, _, _ = sites.read(pieces("bfloat16"), 1)
    assert [(r.name, r.stored) for r in rows if r.crosses] == [("c2", "bfloat16")]


def test_a_stream_that_crosses_in_float32_is_not_stored():
    assert carry(*pieces("float32")) == {"attn_add": False, "mlp_add": False}


def site_map(engine: Graph, **about) -> sites.SiteMap:
    trainer = graph(STREAM, PRODUCTS + "b4 2 bfloat16 c1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 bfloat16 c2 b5\n"
                    "b7 7 float32 t3 b3 b6")  # fmt: skip
    about = dict(engine="vllm", version="0.30.0", mode="compiled", device="cpu", split=False, torch="2.13.0") | about
    return sites.site_map([engine], [trainer], 3, model="m", **about)


KEPT = PRODUCTS + "b4 2 float32 t1 b1 r0\nb5 4 float32 p2 b2 b4\nb6 6 float32 p3 b3 b2 b4"
ROUNDED = PRODUCTS + "b4 2 bfloat16 c1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 float32 p3 b3 b5"


def test_a_map_that_contradicts_the_preset_is_refuted_and_fails():
    agrees, contradicts = site_map(graph(STREAM, KEPT)), site_map(graph(STREAM, ROUNDED))
    preset = presets.get("vllm_compiled")
    assert sites.refute(agrees, preset) == [] and sites.exit_code([agrees]) == 0
    (line,) = sites.refute(contradicts, preset)
    assert line.startswith("vllm_compiled: attn_add: claims carry not stored, vllm 0.30.0 cpu, compiled, torch 2.13.0")
    assert sites.exit_code([contradicts], [line]) == 1


def test_an_open_carry_or_no_map_fails():
    stored = PRODUCTS + "b4 4 bfloat16 c1 b1 r0\nb5 4 float32 t2 b2 b4\nb6 6 float32 p3 b3 b5"
    assert sites.exit_code([site_map(graph(STREAM, stored))]) == 1 and sites.exit_code([]) == 1


def test_differences_name_the_point_and_the_line_of_the_engine():
    (found,) = [d for d in site_map(graph(STREAM, KEPT)).differences if d.point == "carry" and d.kind == "attn_add"]
    assert found.rounding is True and found.engine.startswith("not stored") and found.trainer.startswith("stored")
    assert found.source == "engine/layers/norm.py:5 forward"


def test_a_rounding_outside_the_known_points_is_listed_on_either_side():
    extra = "x1 aten.mul.Tensor bfloat16 layers.1.self_attn.o_proj o1"
    one_sided = graph(STREAM + extra, KEPT + "\nb9 9 bfloat16 x1 b1")
    plain = graph(STREAM, KEPT)
    about = dict(engine="vllm", version="0", mode="compiled", device="cpu", split=False, torch="2", model="m")
    for engine, trainer, column in ((one_sided, plain, "engine"), (plain, one_sided, "trainer")):
        found = sites.site_map([engine], [trainer], 3, **about).differences
        assert [getattr(d, column).split()[0] for d in found if d.part == "o_proj"] == ["mul"]
    assert not [d for d in sites.site_map([plain], [plain], 3, **about).differences if d.rounding]


def test_kernels_that_both_store_bf16_are_no_rounding_difference():
    packed = STREAM + "q1 !_C.packed_mm.default bfloat16 layers.1.self_attn.qkv_proj"
    three = STREAM + "\n".join(f"q{n} !aten.mm.default bfloat16 layers.1.self_attn.qkv_proj" for n in (1, 2, 3))
    about = dict(engine="vllm", version="0", mode="compiled", device="cpu", split=False, torch="2", model="m")
    stored = KEPT + "\n" + "\n".join(f"b1{n} 9 bfloat16 q{n}" for n in (1, 2, 3))
    found = sites.site_map([graph(packed, KEPT + "\nb11 9 bfloat16 q1")], [graph(three, stored)], 3, **about)
    (row,) = [d for d in found.differences if d.part == "qkv_proj"]
    assert row.rounding is False and row.kind == sites.OUTSIDE


def test_a_rounding_between_router_and_experts_is_listed():
    lines = """
g1 !aten.mm.default bfloat16 G.no_compile.model.layers.1.mlp.experts.gate
w1 prims.convert_element_type.default bfloat16 layers.1.mlp.experts g1
e1 !_C.fused_moe.default bfloat16 layers.1.mlp.experts w1
"""
    engine = graph(STREAM + lines, KEPT + "\nb11 9 bfloat16 g1\nb12 10 bfloat16 w1 b11\nb13 11 bfloat16 e1 b12")
    trainer = graph(STREAM + "\ng1 !aten.mm.default bfloat16 layers.1.mlp.gate", KEPT + "\nb11 9 bfloat16 g1")
    about = dict(engine="vllm", version="0", mode="compiled", device="cpu", split=False, torch="2", model="m")
    found = sites.site_map([engine], [trainer], 3, **about).differences
    assert [(d.part, d.rounding, d.trainer) for d in found if "routing" in d.engine] == [
        ("experts", True, "routing: no rounding")
    ]
    assert not [d for d in found if d.part == "gate"]


def test_json_comes_back_as_the_same_maps():
    found = site_map(graph(STREAM, KEPT))
    assert sites.from_json(sites.to_json([found], versions={})) == [found]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_config_gets_as_many_layers_as_are_built(tmp_path, layers):
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3", num_hidden_layers=layers).save_pretrained(tmp_path)
    config = sites_vllm.few_layers(str(tmp_path), 3)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 3
    AutoConfig.for_model(**config)  # its own check


def test_an_untested_torch_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    message = (
        "reading Inductor's schedule works with torch >=2.11,!=2.12.*,<2.14 (tested with 2.11.0, 2.13.0); torch 2.0.1 is "
        "installed"
    )
    with pytest.raises(releases.UntestedRelease) as error, inductor.record():
        pass
    assert str(error.value) == message
    if importlib.util.find_spec("vllm"):
        with pytest.raises(ValueError) as error:
            sites_vllm.run_sites(str(tiny_checkpoint(tmp_path)))
        assert str(error.value) == message


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(mode="fast"), "mode='fast': unknown mode 'fast'; choose from compiled, eager, both"),
        (dict(layers=1), "layers=1: the next add lies in the next layer; give at least 2"),
        (
            dict(mode="eager", split=True),
            "mode='eager': an eager run has no graph to split; choose from compiled, both",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_the_choices(options, message):
    with pytest.raises(ValueError) as error:
        sites_vllm.run_sites("m", **options)
    assert str(error.value) == message


# ---- Inductor's own schedule


@torch.library.custom_op("verl_rounding_align_test::store", mutates_args=())
def store(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


store.register_fake(lambda x: torch.empty_like(x))


class Norm(nn.Module):
    """Add and norm, as engines write them; ``opaque`` sends the stream through memory."""

    def __init__(self, opaque: bool):
        super().__init__()
        self.weight, self.opaque = nn.Parameter(torch.rand(64)), opaque

    def forward(self, x, residual):
        total = x.float() + residual.float()
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        residual = total.to(x.dtype)
        return (normed.to(x.dtype) * self.weight).to(x.dtype), store(residual) if self.opaque else residual


class Layer(nn.Module):
    def __init__(self, opaque: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(opaque), Norm(opaque)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.o_proj = nn.Linear(64, 64, bias=False)
        self.mlp.down_proj = nn.Linear(64, 64, bias=False)

    def forward(self, x, residual):
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn.o_proj(x), residual)
        return self.mlp.down_proj(x), residual


class Stack(nn.Module):
    def __init__(self, opaque: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer(opaque) for _ in range(3))

    def forward(self, x, residual):
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


def scheduled(opaque: bool) -> dict[str, bool | None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Stack(opaque).bfloat16()
    inputs = [torch.randn(9, 64).bfloat16() for _ in range(2)]
    with inductor.record(stop=lambda graph: True) as graphs, torch.no_grad():
        try:
            torch.compile(model)(*inputs)
        except Exception as error:
            assert inductor.stopped(error), error
    return carry(*graphs)


def test_inductor_keeps_the_stream_in_fp32_unless_an_operator_stores_it():
    assert scheduled(opaque=False) == {"attn_add": False, "mlp_add": False}
    assert scheduled(opaque=True) == {"attn_add": True, "mlp_add": True}


def test_inductor_rounds_the_stream_where_it_keeps_casts():
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert scheduled(opaque=False) == {"attn_add": True, "mlp_add": True}


def test_op_by_op_the_trainer_stores_every_point_of_its_preset(tmp_path):
    config = sites_vllm.few_layers(str(tiny_checkpoint(tmp_path, "qwen3")), 3)
    trainer = sites.as_engine(sites_vllm.trainer_graph(config), 3)
    _, points, _ = sites.read([trainer], 1)
    claimed = presets.get("hf_eager").points
    expected = {(kind, p) for kind in ("attention", "mlp", "attn_add", "mlp_add") for p in claimed[kind]}
    assert {(p.kind, p.point) for p in points if p.stored} >= expected
    assert all(p.stored for p in points)


# ---- vLLM's own


def tiny_checkpoint(folder: Path, model_type: str = "llama") -> Path:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
    )
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]]
    config.save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_model_keeps_the_stream_in_fp32_and_the_preset_agrees(tmp_path):
    """With its negative control: where Inductor keeps casts, the same model rounds the stream, and the preset is refuted."""
    model = str(tiny_checkpoint(tmp_path, "qwen3"))
    (found,) = sites_vllm.run_sites(model)
    preset = sites_vllm.preset_of(found)
    assert found.carry == {"attn_add": False, "mlp_add": False} and sites.refute(found, preset) == []
    assert {d.part for d in found.differences if d.kind == sites.OUTSIDE} >= {"qkv_proj", "attn", "gate_up_proj"}
    assert all(r.source.startswith("vllm/") for r in found.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
        (control,) = sites_vllm.run_sites(model)
    assert control.carry == {"attn_add": True, "mlp_add": True}
    assert {line.split(":")[1].strip() for line in sites.refute(control, preset)} >= {"attn_add", "mlp_add"}


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_model_split_at_attention_stores_the_stream_after_the_mlp_only(tmp_path):
    (found,) = sites_vllm.run_sites(str(tiny_checkpoint(tmp_path)), layers=2, split=True)
    assert found.split and found.carry == {"attn_add": False, "mlp_add": True}
    assert sites_vllm.preset_of(found).name == "vllm_compiled_split" and sites_vllm.contradictions(found) == []
    assert {r.part for r in found.rows if r.crosses} >= {"rotary_emb", "input_layernorm"}


@pytest.mark.vllm
def test_command_prints_the_tables_writes_json_and_fails_where_carry_is_open(monkeypatch, tmp_path):
    from verl_rounding_align.cli import app

    found = site_map(graph(STREAM, KEPT))
    monkeypatch.setattr(sites_vllm, "run_sites", lambda *args: [found])
    out = CliRunner().invoke(app, ["sites", "--model", "m", "--json", str(tmp_path / "deep" / "f.json")])
    assert out.exit_code == 0 and "carry stored: attn_add no, mlp_add no" in out.output
    assert json.loads((tmp_path / "deep" / "f.json").read_text())["maps"][0]["carry"]["attn_add"] is False
    monkeypatch.setattr(sites_vllm, "run_sites", lambda *args: [replace(found, carry={"attn_add": None})])
    assert CliRunner().invoke(app, ["sites", "--model", "m"]).exit_code == 1


# ---- the page


@pytest.fixture(scope="module")
def picture():
    spec = importlib.util.spec_from_file_location("where_it_rounds_picture", RECIPE / "picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_picture_and_table_are_what_the_files_give(picture):
    assert picture.main(["--check"]) == 0


def test_picture_and_table_change_with_the_files(picture, tmp_path):
    """The control: a map in which one point is stored gives another picture, and another table."""
    results = tmp_path / "results"
    results.mkdir()
    for name in picture.FILES:
        maps = sites.from_json((RECIPE / "results" / name).read_text())
        changed = [
            replace(m, points=tuple(replace(p, stored=True) if p.point == "act" else p for p in m.points)) for m in maps
        ]
        (results / name).write_text(sites.to_json(changed))
    for name in ("README.md", "decoder_layer.svg"):
        (tmp_path / name).write_text((RECIPE / name).read_text())
    options = ["--results", str(results), "--out", str(tmp_path)]
    assert picture.main(["--check", *options]) == 1
    assert picture.main(options) == 0 and picture.main(["--check", *options]) == 0
    assert (
        "| MLP: silu(gate) | stored bf16 | stored bf16 | stored bf16 | stored bf16 |"
        in (tmp_path / "README.md").read_text()
    )


def test_files_of_the_page_agree_with_the_presets_and_decide_carry(picture):
    maps = picture.load(RECIPE / "results")
    assert [sites_vllm.contradictions(m) for m in maps.values()] == [[], [], []]
    assert sites.exit_code(list(maps.values())) == 0
    assert maps["split"].carry == {"attn_add": False, "mlp_add": True}
