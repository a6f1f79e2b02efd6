"""Models to measure on: the sizes of public models with random weights, or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import families


def _shape(model_type, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, theta, eps, tied, positions):
    return dict(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rope_parameters=dict(rope_type="default", rope_theta=theta),
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
    )


# the sizes in the public configs; a new shape is one row
SHAPES = {
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 1e5, 1e-5, True, 8192),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-1.7b": _shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, 1e-6, False, 40960),
    "deepseek-r1-distill-qwen-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 1e4, 1e-6, False, 131072),
}


def choose(name: str, value: str, choices: Iterable[str]) -> str:
    """Return ``value``.

    Raises:
        ValueError: it is not one of ``choices``; the message names the option and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: unknown {name} {value!r}; choose from {', '.join(choices)}")
    return value


def shape_config(shape: str, family: str | None = None, layers: int | None = None):
    """Return the Transformers config of a row of ``SHAPES``.

    Args:
        shape: a key of ``SHAPES``.
        family: compute these sizes as another supported dense family; None for the shape's own.
        layers: number of decoder layers; None for the shape's own.

    Raises:
        ValueError: unknown shape or family, or a family with experts, as no shape has sizes of experts.
    """
    from transformers import AutoConfig

    sizes = dict(SHAPES[choose("shape", shape, SHAPES)])
    model_type = sizes.pop("model_type")
    row = families.get(family or model_type, key="family")
    if row.experts:
        raise ValueError(f"family={row.model_type!r}: shapes are dense; measure a mixture of experts with --model")
    return AutoConfig.for_model(row.model_type, **{**sizes, **({"num_hidden_layers": layers} if layers else {})})


def build(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    layers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
):
    """Return ``(label, causal LM)``: the weights in folder ``model``, or random ones in the sizes of ``shape``.

    The model is in bf16 and in train mode.

    Args:
        model: folder or hub name of a model with weights.
        shape, family, layers: see :func:`shape_config`.
        device: where the model is.
        seed: of random weights.

    Raises:
        ValueError: neither or both of ``model`` and ``shape``, or an unknown one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if (model is None) == (shape is None):
        raise ValueError("give either a model (folder or hub name) or a shape (with or without a family)")
    if model is not None:
        config = AutoConfig.from_pretrained(model)
        families.get(config.model_type)
        if layers:
            config.num_hidden_layers = layers
        lm = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.bfloat16).to(device)
        return str(model), lm.train()
    config = shape_config(shape, family, layers)
    own = config.model_type == SHAPES[shape]["model_type"]
    return shape if own else f"{shape} as {config.model_type}", from_config(config, device, seed)


def from_config(config, device: str = "cpu", seed: int = 0):
    """Return a causal LM of ``config`` with random weights, bf16, in train mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
