"""Every quantity of a running model, shown before it is rounded: hooks that recompute it in fp32 and leave the pass alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from ..families import Family
from ..regions.rope import rotate_half
from ..rounding import up
from ..trainers.huggingface import find_base_models
from .quantities import PROJECTIONS, QUANTITIES

See = Callable[[str, int, torch.Tensor], None]


@contextmanager
def watch(model: nn.Module, see: See) -> Iterator[tuple[set[tuple[str, int]], list[str]]]:
    """Show ``see`` every quantity, before it is rounded, in each forward pass inside the context.

    Values are recomputed in fp32 from the bf16 tensors that the running model's modules get and return. The pass itself is
    not changed. Hooks sit on module instances and are removed at the end, whatever happens inside. Sequences must have no
    padding.

    Args:
        model: a Transformers model of a supported family, in bf16 and unpatched.
        see: called with a name of ``QUANTITIES``, the layer's index and an fp32 tensor.

    Yields:
        The (quantity, layer) pairs that will be seen, and what will not be seen, in words.

    Raises:
        ValueError: unsupported family, another dtype, another activation, or a module whose forward is patched.
    """
    ((fqn, stack, family),) = find_base_models(model)
    _check(stack, f"{fqn}." if fqn else "")
    handles, expected, absent = [], set(), []
    experts = sum(hasattr(layer.mlp, "experts") for layer in stack.layers)
    if experts:
        absent.append(f"router and projections of the experts in {experts} layers (grouped matmuls, not modules)")
    try:
        for i, layer in enumerate(stack.layers):
            _watch_layer(layer, i, family, see, handles, expected)
        yield expected, absent
    finally:
        for handle in handles:
            handle.remove()


def _check(stack: nn.Module, prefix: str) -> None:
    for name, parameter in stack.named_parameters():
        if parameter.dtype != torch.bfloat16:
            raise ValueError(
                f"landing: {prefix}{name} is {parameter.dtype}; positions are between bf16 numbers, load the model with "
                "dtype=torch.bfloat16"
            )
    for name, module in stack.named_modules():
        if "forward" in module.__dict__:
            raise ValueError(
                f"landing: {prefix}{name} ({type(module).__name__}) has its forward patched; undo() that first"
            )
    if stack.config.hidden_act != "silu":
        raise ValueError(f"landing: hidden_act={stack.config.hidden_act!r}: expected 'silu'")


def _watch_layer(layer: nn.Module, index: int, family: Family, see: See, handles: list, expected: set) -> None:
    """Hook one decoder layer; see :func:`watch`.

    Args:
        handles: every hook's handle is added to it.
        expected: the (quantity, index) pairs that the hooks show are added to it.
    """
    now: dict[str, object] = {}  # tensors of this layer that a later hook of the same forward pass needs

    def hook(module: nn.Module, function: Callable, *quantities: str, register="register_forward_hook") -> None:
        handles.append(getattr(module, register)(function, with_kwargs=True))
        expected.update((quantity, index) for quantity in quantities)

    def show(quantity: str, value: torch.Tensor) -> None:
        see(quantity, index, value)

    def enter(module, args, kwargs):
        now["residual"] = args[0] if args else kwargs["hidden_states"]

    def projection(name: str, keep: bool):
        def function(module, args, kwargs, output):
            bias = None if module.bias is None else up(module.bias)
            show(name, F.linear(up(args[0]), up(module.weight), bias))
            if keep:
                now[name] = output

        return function

    def norm(prefix: str, keep: str | None = None):
        def function(module, args, kwargs, output):
            h, weight = up(args[0]), up(module.weight)
            normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            show(f"{prefix}normed", normed)
            show(f"{prefix}norm", weight * normed)
            show(f"{prefix}norm of stored normed", weight * up(normed.to(output.dtype)))
            if keep == "residual":
                now[keep] = args[0]
            elif keep is not None:
                now[keep] = output

        return function

    def attention(module, args, kwargs, output):
        cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
        q, k, v = (now.pop(name) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (x.view(*x.shape[:2], -1, module.head_dim).transpose(1, 2) for x in (q, k, v))
        rotated = []
        for x in (q, k):
            direct, crossed = up(x) * up(cos.unsqueeze(1)), rotate_half(up(x)) * up(sin.unsqueeze(1))
            stored = up(direct.to(x.dtype)) + up(crossed.to(x.dtype))
            for name, product in (("cos", direct), ("sin", crossed)):
                show("RoPE products", product)
                show(f"RoPE {name} products", product)
            show("RoPE sum", direct + crossed)
            show("RoPE sum of stored products", stored)
            rotated.append(stored.to(x.dtype))  # as attention reads them
        show("attention", _attention(module, *rotated, v))
        show("sum after attention", up(now["residual"]) + up(output[0]))

    def silu(name: str):
        return lambda module, args, kwargs, output: show(name, F.silu(up(args[0])))

    def mlp(module, args, kwargs, output):
        delta = output[0] if isinstance(output, tuple) else output
        show("sum after MLP", up(now.pop("residual")) + up(delta))

    hook(layer, enter, register="register_forward_pre_hook")
    norms = ("normed", "norm", "norm of stored normed")
    hook(layer.input_layernorm, norm(""), *norms)
    for name in PROJECTIONS[:4]:
        normed = family.qk_norm and name in ("q_proj", "k_proj")
        hook(getattr(layer.self_attn, name), projection(name, keep=not normed and name != "o_proj"), name)
        if normed:
            module = getattr(layer.self_attn, name.replace("proj", "norm"))
            hook(module, norm("Q/K ", keep=name), *(f"Q/K {q}" for q in norms))
    rope = [name for name in QUANTITIES if name.startswith("RoPE")]
    hook(layer.self_attn, attention, *rope, "attention", "sum after attention")
    hook(layer.post_attention_layernorm, norm("", keep="residual"), *norms)
    if hasattr(layer.mlp, "experts"):
        hook(layer.mlp.experts.act_fn, silu("SiLU, experts"), "SiLU, experts")
    else:
        for name in PROJECTIONS[4:]:
            hook(getattr(layer.mlp, name), projection(name, keep=False), name)
        hook(layer.mlp.act_fn, silu("SiLU"), "SiLU")
    hook(layer.mlp, mlp, "sum after MLP")


def _attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention in fp32, with the module's sliding window if it has one.

    q, k, v: (batch, heads, tokens, head_dim).
    """
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (up(x).repeat_interleave(groups, dim=1) for x in (k, v))
    # Mistral's attention takes it from the config; those that set it per layer have an attribute
    window, mask = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)), None
    if window is not None and window < tokens:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(up(q), k, v, attn_mask=mask, is_causal=mask is None, scale=module.scaling)
