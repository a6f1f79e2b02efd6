"""Tiny models of every supported family, made from a config: what the tests patch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.regions import GROUPS

VOCAB = 97
ALL = "+".join(GROUPS)  # every group, proven or not
# the residual stream kept in fp32 at every add, and kept at one add of a layer and stored at the other
both_streams = pytest.mark.parametrize("engine", ["vllm_compiled", "vllm_compiled_split"])
EXTRA = {"qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[0])}


def tiny(model_type: str, layers: int = 3, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **kwargs):
    """Return a causal LM of ``model_type`` in train mode, with norm weights away from one."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        **{**EXTRA.get(model_type, {}), **kwargs},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()  # not .to(dtype): it would round inv_freq
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "embed" in name or "lm_head" in name:
                parameter.mul_(10)
    return model


def tokens(batch: int = 2, length: int = 19, seed: int = 1) -> torch.Tensor:
    """Return token ids of shape (batch, length)."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model, ids: torch.Tensor, **kwargs):
    """Return (logits, {parameter name: gradient}) of one forward and backward pass."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **kwargs).logits
    logits.float().logsumexp(-1).pow(2).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def same(a: dict, b: dict) -> bool:
    """Return whether two dicts of tensors have the same keys and bitwise equal values."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def verified(preset: str, version: str = "0.30.0"):
    """Return the fingerprint of an engine release that a preset was verified on."""
    return next(found for found in PRESETS[preset].verified if found.version == version)


def leave():
    """End a rank whose assertions all held. Not by returning: FSDP1 with gloo aborts now and then ("terminate called
    without an active exception") in the interpreter's teardown, with no Python frame left, seen on torch 2.13."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


MODEL_TYPES = sorted(FAMILIES)
