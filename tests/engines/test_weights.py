"""Contract of the weights' digests: what each rank of an engine holds is the part of the trainer's weights that the engine's own
loaders put there, K/V heads that several ranks share and experts included; the trainer's weights are cast to the engine's
dtype, and what is equal after a cast is never called equal in every bit; what a kernel stores in a layout of its own is left
out rather than called different."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny import tiny
from torch import nn

from verl_rounding_align.engines import weights
from verl_rounding_align.engines.weights import Shard
from verl_rounding_align.triage.compare import compare_engine

NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@contextlib.contextmanager
def parallel(rank: int, size: int):
    """Within the context, vLLM believes that this process is one of ``size`` ranks of tensor parallelism."""
    from vllm import distributed
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    with contextlib.ExitStack() as stack:
        for module in (distributed, parameter, linear, vocab_parallel_embedding):
            for name, value in (("rank", rank), ("world_size", size)):
                name = f"get_tensor_model_parallel_{name}"
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda value=value: value))
        yield


def fused_experts(gate_up, down, rank: int, size: int, held=None, pad: int = 0, backend: str = "TRITON"):
    """Return a module with the tensors that vLLM's loaders make of stacked experts; ``pad`` more rows and columns."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    hidden, inner = down.shape[1], down.shape[2] // size
    config = SimpleNamespace(
        is_act_and_mul=True,
        tp_rank=rank,
        tp_size=size,
        moe_parallel_config=SimpleNamespace(tp_size=size, enable_eplb=False),
        intermediate_size_per_partition_unpadded=inner,
        hidden_dim_unpadded=hidden,
    )
    loader = SimpleNamespace(
        moe_config=config,
        _get_hidden_dim=RoutedExperts._get_hidden_dim,
        _narrow_expert_data_for_padding=RoutedExperts._narrow_expert_data_for_padding,
    )
    numbers = list(range(len(down))) if held is None else held
    w13 = torch.zeros(len(numbers), 2 * (inner + pad), hidden + pad, dtype=down.dtype)
    w2 = torch.zeros(len(numbers), hidden + pad, inner + pad, dtype=down.dtype)
    for place, number in enumerate(numbers):
        for shard, half in zip(("w1", "w3"), gate_up[number].chunk(2), strict=True):
            RoutedExperts._load_w13(loader, w13[place], 0, shard, half, rank)
        RoutedExperts._load_w2(loader, w2[place], 1, down[number], rank)
    out = nn.Module()
    out.w13_weight, out.w2_weight = (nn.Parameter(x, requires_grad=False) for x in (w13, w2))
    out.moe_config = config
    out.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
    out._expert_map = None
    if held is not None:
        out._expert_map = torch.full((len(down),), -1)
        out._expert_map[held] = torch.arange(len(held))
    return out


def engine_of(model, rank: int = 0, size: int = 1, dtype=torch.bfloat16, held=None, **experts) -> nn.Module:
    """Return vLLM's model of a trainer's, on one rank, loaded by vLLM's own loaders; experts whole if ``held`` names them."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    config, whole = model.config, model.state_dict()
    out = nn.Module()

    def put(name: str, module: nn.Module, parts: dict[str | int | None, str]) -> None:
        parent = out
        *path, last = name.split(".")
        for step in path:
            if step not in dict(parent.named_children()):
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(last, module)
        for shard, source in parts.items():
            for leaf in ("weight", "bias"):
                if f"{source}.{leaf}" in whole:
                    parameter = getattr(module, leaf)
                    arguments = () if shard is None else (shard,)
                    parameter.weight_loader(parameter, whole[f"{source}.{leaf}"].to(dtype), *arguments)

    def norm(name: str) -> None:
        module = nn.Module()
        module.weight = nn.Parameter(whole[f"{name}.weight"].to(dtype))
        module.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
        put(name, module, {None: name})

    def size_of(name: str) -> tuple[int, int]:
        rows, columns = whole[f"{name}.weight"].shape
        return columns, rows

    with parallel(rank, size):
        options = dict(params_dtype=dtype)
        heads = (config.head_dim, config.num_attention_heads, config.num_key_value_heads)
        vocabulary = (config.vocab_size, config.hidden_size)
        put("model.embed_tokens", VocabParallelEmbedding(*vocabulary, **options), {None: "model.embed_tokens"})
        put("lm_head", ParallelLMHead(*vocabulary, **options), {None: "lm_head"})
        norm("model.norm")
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}"
            for name in NORMS:
                if f"{layer}.{name}.weight" in whole:
                    norm(f"{layer}.{name}")
            attention, bias = f"{layer}.self_attn", f"{layer}.self_attn.q_proj.bias" in whole
            fused = linear.QKVParallelLinear(config.hidden_size, *heads, bias=bias, **options)
            put(f"{attention}.qkv_proj", fused, {x: f"{attention}.{x}_proj" for x in "qkv"})
            row = linear.RowParallelLinear(*size_of(f"{attention}.o_proj"), bias=False, **options)
            put(f"{attention}.o_proj", row, {None: f"{attention}.o_proj"})
            mlp = f"{layer}.mlp"
            if f"{mlp}.experts.down_proj" in whole:
                stacked = [whole[f"{mlp}.experts.{name}"].to(dtype) for name in ("gate_up_proj", "down_proj")]
                place = (rank, size) if held is None else (0, 1)
                put(f"{mlp}.experts", fused_experts(*stacked, *place, held, **experts), {})
                norm(f"{mlp}.gate")  # a router is held whole, as a norm is
            else:
                columns, rows = size_of(f"{mlp}.gate_proj")
                both = linear.MergedColumnParallelLinear(columns, [rows, rows], bias=False, **options)
                put(f"{mlp}.gate_up_proj", both, {0: f"{mlp}.gate_proj", 1: f"{mlp}.up_proj"})
                row = linear.RowParallelLinear(*size_of(f"{mlp}.down_proj"), bias=False, **options)
                put(f"{mlp}.down_proj", row, {None: f"{mlp}.down_proj"})
    return out


def both(model, rank: int, size: int, **options) -> tuple[dict, dict, Shard]:
    """Return (the trainer's digests, the engine's, what the engine says of its place)."""
    from vllm import distributed  # noqa: F401  (what parallel() patches)

    from verl_rounding_align.engines.vllm.weights import digest_vllm, shard_of

    engine = engine_of(model, rank, size, **options)
    with parallel(rank, size):
        shard = shard_of(engine)
    found = digest_vllm(engine)
    return weights.digest_hf(model, shard=shard, engine=found), found, shard


def names(model) -> set[str]:
    """Return the weights of a trainer; a rotary embedding's frequencies are none."""
    return {name for name in model.state_dict() if not name.endswith("inv_freq")}


# ---- ranks


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])  # qwen2 has biases
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_a_rank_holds_what_the_engines_loaders_put_there(family, rank, size):
    """Two K/V heads: on four ranks each is held by two. Both sides name every tensor. The control is the next rank's part."""
    model = tiny(family, layers=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zeros are alike on every rank
                parameter.normal_()
    trainer, engine, shard = both(model, rank, size)
    assert weights.compare(trainer, engine) == [] and set(engine) == names(model)
    assert (shard.rank, shard.size, shard.kv_heads) == (rank, size, 2)
    if size > 1:
        other = weights.digest_hf(model, shard=Shard((rank + 1) % size, size))
        differ = {x.name for x in weights.compare(other, engine)}
        split = {name for name, whole in model.state_dict().items() if trainer[name].shape != tuple(whole.shape)}
        shared = {name for name in split if ("k_proj" in name or "v_proj" in name) and size == 4 and rank % 2 == 0}
        assert differ == split - shared and shared != split


@pytest.mark.vllm
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_with_expert_parallelism_a_rank_holds_whole_experts(rank, strategy):
    """As vLLM places them: the first half of four, or every second one."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    _, places, _ = determine_expert_map(2, rank, 4, strategy)
    held = places.argsort()[places.sort().values >= 0].tolist()
    model = tiny("qwen3_moe", layers=2)
    trainer, engine, shard = both(model, rank, 2, held=held)
    assert weights.compare(trainer, engine) == [] and weights.coverage(trainer, engine).whole
    assert shard == Shard(rank, 2, 2, 0, 1, tuple(held))
    assert trainer["model.layers.1.mlp.experts.down_proj"].shape == (2, 64, 48)
    others = tuple(number for number in range(4) if number not in held)
    wrong = weights.digest_hf(model, shard=Shard(rank, 2, 2, 0, 1, others))
    assert {x.name for x in weights.compare(wrong, engine)} == {
        f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }


@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON"])
def test_padding_of_experts_is_cut_off(backend):
    trainer, engine, _ = both(tiny("qwen3_moe", layers=2), 1, 2, pad=16, backend=backend)
    assert weights.compare(trainer, engine) == [] and weights.coverage(trainer, engine).whole


@pytest.mark.vllm
def test_experts_stored_the_other_way_round_are_turned_back():
    """Mirrors vLLM's own function, which its kernel for that backend asks for."""
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    from verl_rounding_align.engines.vllm.weights import digest_vllm

    model = tiny("qwen3_moe", layers=2)
    engine = engine_of(model, backend="FLASHINFER_CUTLASS")
    experts = engine.get_submodule("model.layers.1.mlp.experts")
    before = digest_vllm(engine)
    experts.w13_weight.data = swap_w13_to_w31(experts.w13_weight.data).contiguous()
    assert weights.compare(weights.digest_hf(model), digest_vllm(engine)) == []
    assert [x.name for x in weights.compare(weights.digest_hf(model), before)] == [
        "model.layers.1.mlp.experts.gate_up_proj"
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("why", ["a kernel's layout", "an unknown release", "experts that move"])
def test_experts_in_a_layout_that_is_not_known_are_not_compared(why):
    """They had been compared, and were called different with certainty."""
    from verl_rounding_align.engines.vllm.weights import digest_vllm

    model = tiny("qwen3_moe", layers=2)
    engine = engine_of(model, backend="FLASHINFER_TRTLLM" if why == "a kernel's layout" else "TRITON")
    experts = engine.get_submodule("model.layers.1.mlp.experts")
    if why == "an unknown release":
        experts.quant_method = object()
    if why == "experts that move":
        experts.moe_config.moe_parallel_config.enable_eplb = True
    experts.w13_weight.data = experts.w13_weight.data.flip(1).contiguous()
    covered = weights.coverage(weights.digest_hf(model), digest_vllm(engine))
    assert covered.trainer == ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj")
    assert weights.compare(weights.digest_hf(model), digest_vllm(engine)) == []


@pytest.mark.vllm
def test_quantized_tensors_are_not_compared():
    from verl_rounding_align.engines.vllm.weights import digest_vllm

    engine = engine_of(tiny("llama", layers=1))
    row = engine.get_submodule("model.layers.0.self_attn.o_proj")
    row.weight = nn.Parameter(row.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert "model.layers.0.self_attn.o_proj.weight" not in digest_vllm(engine)


def test_heads_that_ranks_cannot_share_are_refused():
    model = tiny("llama", layers=1)
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError) as error:
        Shard(0, 3, kv_heads=2).part(name, model.state_dict()[name])
    assert str(error.value) == f"{name}: 2 K/V heads cannot be shared by 3 ranks"
    with pytest.raises(ValueError) as error:
        weights.digest_hf(model.state_dict(), shard=Shard(0, 2))
    assert str(error.value) == (f"{name}: how 2 ranks share it depends on the number of K/V heads; give kv_heads")
    with pytest.raises(ValueError) as error:
        Shard(0, 3).part("model.layers.0.self_attn.o_proj.weight", torch.zeros(64, 64))
    assert str(error.value) == (
        "model.layers.0.self_attn.o_proj.weight: 64 rows or columns cannot be split over 3 ranks"
    )


def test_the_number_of_heads_is_read_from_a_checkpoint(tmp_path):
    model = tiny("llama", layers=1)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.v_proj.weight"
    for source in (model, tmp_path, str(tmp_path)):
        assert weights.digest_hf(source, shard=Shard(1, 4))[name] == weights.digest(model.state_dict()[name][:16])


# ---- dtypes


@pytest.mark.vllm
@pytest.mark.parametrize("trainer", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_compared_in_the_engines_dtype(trainer):
    """An fp16 engine; bf16 had been assumed, and every tensor was called different."""
    torch.manual_seed(0)
    model = tiny("llama", layers=1).to(trainer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))  # what bf16 alone would not hold
    mine, engine, _ = both(model, 0, 1, dtype=torch.float16)
    assert weights.compare(mine, engine) == []
    covered = weights.coverage(mine, engine)
    source = str(trainer).removeprefix("torch.")
    assert covered.equal == f"equal once the trainer's {source} is cast to float16"
    with pytest.raises(ValueError) as error:
        weights.compare(weights.digest_hf(model), engine)
    assert str(error.value).endswith(
        "digested in bfloat16 for the trainer and in float16 for the engine; digest the trainer with engine="
    )


def test_only_what_was_not_cast_is_equal_in_every_bit():
    low, high = torch.ones(3).bfloat16(), torch.ones(3)
    plain, cast = {"w": weights.digest(low)}, {"w": weights.digest(high)}
    assert weights.compare(plain, cast) == []
    assert weights.coverage(plain, plain).equal == "equal in every bit"
    assert weights.coverage(cast, plain).equal == "equal once the trainer's float32 is cast to bfloat16"
    assert weights.coverage(plain, cast).equal == "equal once the engine's float32 is cast to bfloat16"
    assert weights.coverage(cast, cast).equal == (
        "equal once the trainer's float32 is cast to bfloat16 and the engine's float32 is cast to bfloat16"
    )


def test_triage_of_two_checkpoints_says_which_cast_came_first(tmp_path):
    """It said "equal in every bit" of weights that differ below bf16."""
    from verl_rounding_align.triage.run import find

    model = tiny("llama", layers=1)
    model.save_pretrained(tmp_path / "engine")
    masters = model.float()
    with torch.no_grad():
        masters.model.norm.weight.mul_(1 + 1e-5)  # less than bf16 can show
    masters.save_pretrained(tmp_path / "trainer")
    for trainer, equal in (
        ("engine", "equal in every bit"),
        ("trainer", "equal once the trainer's float32 is cast to bfloat16"),
    ):
        (finding,) = find(None, None, str(tmp_path / "engine"), str(tmp_path / trainer))
        assert finding.evidence.endswith(f" tensors compared, {equal}")


def test_half_precision_checkpoints_are_digested_as_they_are():
    model = tiny("llama", layers=1).half()
    found = weights.digest_hf(model)["model.norm.weight"]
    assert (found.dtype, found.source) == ("float16", "float16")
    found = weights.digest_hf(model, torch.bfloat16)["model.norm.weight"]
    assert (found.dtype, found.source) == ("bfloat16", "float16")


# ---- what a worker answers


def answer(model, rank: int, size: int) -> dict:
    """Return what a worker of vLLM answers."""
    from verl_rounding_align.engines.vllm.weights import of_worker

    engine = engine_of(model, rank, size)
    config = model.config
    frequencies = config.rope_parameters["rope_theta"] ** -(
        torch.arange(0, config.head_dim, 2).float() / config.head_dim
    )
    angles = torch.arange(256).float()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], -1)
    engine.rotary_emb = nn.Module()
    engine.rotary_emb._compute_cos_sin_cache = lambda: table
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: engine))
    with parallel(rank, size):
        return of_worker(worker)


@pytest.mark.vllm
@pytest.mark.parametrize("rank", range(4))
def test_a_worker_says_its_place_and_is_compared_there(rank):
    """Four ranks and two K/V heads; who asks need not know it. The control: an answer that does not say it."""
    model = tiny("qwen3", layers=2)
    said = answer(model, rank, 4)
    assert compare_engine(model, said) == []
    assert Shard.from_dict(said["shard"]) == Shard(rank, 4, 2)
    (finding,) = compare_engine(model, {name: x for name, x in said.items() if name != "shard"})
    assert finding.cause == "weights"
    assert compare_engine(model, {name: x for name, x in said.items() if name != "shard"}, rank, 4) == []


@pytest.mark.vllm
def test_a_worker_without_rope_or_with_a_fault_says_so():
    from verl_rounding_align.engines.vllm.plugin import rounding_align_digest

    engine = engine_of(tiny("llama", layers=1))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: engine))
    assert rounding_align_digest(worker) == {"missing": "ValueError: Module: no rotary embedding with a cos-sin table"}


def test_a_digest_and_a_shard_survive_json():
    import json

    found = weights.digest(torch.randn(3, 4))
    assert weights.Digest.from_dict(json.loads(json.dumps(asdict(found)))) == found
    for shard in (Shard(), Shard(1, 4, 2, 0, 1, (3, 1))):
        assert Shard.from_dict(json.loads(json.dumps(shard.as_dict()))) == shard
