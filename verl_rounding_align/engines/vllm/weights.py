"""Digests of what a worker of vLLM holds, under Hugging Face's names; see :mod:`verl_rounding_align.engines.weights`.

vLLM fuses projections (``qkv_proj``, ``gate_up_proj``, experts' ``w13_weight``), pads the vocabulary and, for some kernels,
experts, and may store experts in a layout of its kernel. What can be taken apart without a doubt is; what cannot is left out,
and the comparison then says that it was not compared. Mirrors vLLM 0.30: ``QKVParallelLinear.weight_loader``,
``VocabParallelEmbedding``, ``RoutedExperts._load_w13`` and ``_load_w2``, ``convert_to_unquantized_kernel_format``.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from ..weights import Digest, Shard, digest
from . import rope

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # others are quantized: their bits are not the weights'
# backends of fused experts by how they store w13: gate then up, as a checkpoint does, or the other way round
PLAIN, SWAPPED = ("TRITON", "BATCHED_TRITON"), ("FLASHINFER_CUTLASS",)


def of_worker(worker) -> dict:
    """Return what a worker holds, as plain data.

    ``{"weights": name -> fields of a Digest, "shard": fields of a Shard, "rope": {"frequencies", "factor"}}``

    Args:
        worker: vLLM's ``Worker`` with a loaded model.

    Raises:
        ValueError: its model has no rotary embedding with a table of cos and sin.
    """
    model = worker.model_runner.get_model()
    angles = rope.of_vllm(model)
    return {
        "weights": {name: asdict(found) for name, found in digest_vllm(model).items()},
        "shard": shard_of(model).as_dict(),
        "rope": {"frequencies": angles.frequencies.tolist(), "factor": angles.factor},
    }


def shard_of(model) -> Shard:
    """Return which part of the weights a worker's model is.

    Args:
        model: vLLM's; ``worker.model_runner.get_model()``.
    """
    from vllm import distributed

    rank, size = distributed.get_tensor_model_parallel_rank(), distributed.get_tensor_model_parallel_world_size()
    modules = list(model.modules())
    heads = next((m.total_num_kv_heads for m in modules if hasattr(m, "total_num_kv_heads")), None)
    fused = next((m for m in modules if hasattr(m, "w13_weight") and hasattr(m, "moe_config")), None)
    if fused is None:
        return Shard(rank, size, heads)
    return Shard(rank, size, heads, fused.moe_config.tp_rank, fused.moe_config.tp_size, _held(fused))


def _held(module) -> tuple[int, ...] | None:
    """Return the numbers of the experts that a module holds, in its order; None for all."""
    places = getattr(module, "_expert_map", None)  # expert -> its place here, -1 for one that is elsewhere
    if places is None:
        return None
    held = sorted((place, number) for number, place in enumerate(places.tolist()) if place >= 0)
    return tuple(number for _, number in held)


def digest_vllm(model) -> dict[str, Digest]:
    """Return name -> digest of what one worker of vLLM holds, under Hugging Face's names, in its own dtypes.

    Left out are tensors without elements, quantized ones, and experts in a kernel's own layout. vLLM's CPU kernels throw the
    unpacked weights of linear layers away, except in a verl run on a CPU (``VERL_PLATFORM=cpu``), where this package keeps
    them. ``weights.coverage`` says what that leaves.

    Args:
        model: vLLM's; ``worker.model_runner.get_model()``.
    """
    modules, found = dict(model.named_modules()), {}
    for name, weight in model.named_parameters():
        if not weight.numel() or weight.dtype not in FLOATS:
            continue
        path, leaf = name.rpartition(".")[::2]
        parent, layer = path.rpartition(".")[::2]
        module = modules[path]
        if layer in FUSED:
            for part, rows in zip(FUSED[layer], weight.split(list(module.output_partition_sizes)), strict=True):
                found[f"{parent}.{part}.{leaf}"] = digest(rows, weight.dtype)
        elif leaf in EXPERTS:
            plain = _experts(module, leaf, weight)
            if plain is not None:
                prefix = path[: path.index("experts") + len("experts")]
                found[f"{prefix}.{EXPERTS[leaf]}"] = digest(plain, weight.dtype)
        else:
            if hasattr(module, "shard_indices"):  # vLLM pads the vocabulary
                weight = weight[: module.shard_indices.num_org_elements]
            found[name] = digest(weight, weight.dtype)
    return found


def _experts(module, leaf: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return fused experts as a checkpoint stacks them, without padding; None where their layout is not known."""
    config = getattr(module, "moe_config", None)
    backend = getattr(getattr(getattr(module, "quant_method", None), "unquantized_backend", None), "name", None)
    if config is None or backend not in PLAIN + SWAPPED or config.moe_parallel_config.enable_eplb:
        return None
    size, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    if leaf == "w2_weight":
        return weight[:, :hidden, :size]
    gate, up = weight.chunk(2, 1)
    if backend in SWAPPED:
        gate, up = up, gate
    return torch.cat([gate[:, :size, :hidden], up[:, :size, :hidden]], 1)
