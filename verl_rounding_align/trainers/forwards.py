"""What is bound to a Hugging Face model's modules: forwards that run a region instead of its operators, one by one.

Each builder takes the Rounding of its site and the Context of its alignment, and returns a function of the module. Code of
Transformers is not copied: attention runs its own code with another ``apply_rotary_pos_emb``; norms, MLPs and decoder layers
are the few lines that ``checks.py`` has compared with the names that Transformers' code uses.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import torch
from torch import nn

from .. import backend as backends
from .. import families
from ..regions.add_rms_norm import add, add_rms_norm, rms_norm
from ..regions.rope import rope
from ..regions.swiglu import swiglu
from ..rounding import Rounding
from . import stream
from .alignment import Context

ROTARY = "apply_rotary_pos_emb"  # the global of the family's module that attention calls


def pass_through(self, hidden_states):
    """Forward of Q/K norms whose maths runs inside the rope region."""
    return hidden_states


def mlp_forward(rnd: Rounding, context: Context) -> Callable:
    def forward(self, x):
        context.count()
        return self.down_proj(context.run(swiglu, {"gate": self.gate_proj(x), "up_": self.up_proj(x)}, rnd))

    return forward


def expert_gate(rnd: Rounding, context: Context) -> Callable:
    def apply_gate(self, gate_up_out):
        context.count()
        gate, up_ = gate_up_out.chunk(2, dim=-1)
        return context.run(swiglu, {"gate": gate, "up_": up_}, rnd)

    return apply_gate


def attention_forward(rnd: Rounding, context: Context, family: families.Family, rotary: nn.Module | None) -> Callable:
    source = inspect.unwrap(family.cls("Attention").forward)
    rotary_forward = None if rotary is None else rotary.forward

    def forward(self, hidden_states, position_embeddings, *args, **kwargs):
        context.count()
        if rotary_forward is not None:
            position_ids = kwargs.get("position_ids")
            if position_ids is None:
                raise ValueError("a plan that keeps cos and sin in fp32 needs position_ids in the attention's kwargs")
            position_embeddings = rotary_forward(hidden_states.new_empty(0, dtype=torch.float32), position_ids)

        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            assert unsqueeze_dim == 1, f"heads at dimension 1 expected, got unsqueeze_dim={unsqueeze_dim}"
            norms = dict(q_weight=self.q_norm.weight, k_weight=self.k_norm.weight) if family.qk_norm else {}
            eps = self.q_norm.variance_epsilon if family.qk_norm else 0.0
            return _rope(q, k, cos, sin, rnd, context.backend(q), norms, eps)

        # the same code with a private copy of its globals: no other model in the process sees the replacement
        clone = types.FunctionType(
            source.__code__, {**source.__globals__, ROTARY: apply_rotary_pos_emb}, source.__name__, source.__defaults__
        )
        clone.__kwdefaults__ = source.__kwdefaults__
        return clone(self, hidden_states, position_embeddings, *args, **kwargs)

    return forward


def _rope(q, k, cos, sin, rnd, backend, norms, eps):
    """Return rotated q (batch, heads, tokens, head_dim) and k (batch, kv_heads, tokens, head_dim), model dtype.

    cos, sin: (batch or 1, tokens, head_dim). Heads lie inside tokens in memory, so the compiled region's rows are tokens.
    """
    batch, _, tokens, head_dim = q.shape
    if backend == "eager":
        rows = dict(q=q, k=k, cos=cos.unsqueeze(1), sin=sin.unsqueeze(1))
        return backends.run(rope, rows, rnd, backend, params=norms, eps=eps)

    def flat(x):
        return backends.plain(x.transpose(1, 2), batch * tokens, x.shape[1], head_dim)

    def table(x):
        return backends.plain(x.expand(batch, tokens, head_dim), batch * tokens, 1, head_dim)

    out = backends.run(
        rope, dict(q=flat(q), k=flat(k), cos=table(cos), sin=table(sin)), rnd, backend, params=norms, eps=eps
    )
    return tuple(x.view(batch, tokens, x.shape[1], head_dim).transpose(1, 2) for x in out)


def norm_forward(rnd: Rounding, context: Context) -> Callable:
    def forward(self, hidden_states, residual=None, with_carry=False):
        """Return the norm of a residual sum, or of ``hidden_states + residual``; with it the carry, if asked or added.

        Args:
            hidden_states: (..., hidden_size) model dtype, or the sealed sum (..., hidden_size / 2) complex64.
            residual: (..., hidden_size) model dtype or fp32: add it first, return (out, carry).
            with_carry: return (out, carry) of a sum that is there already.
        """
        context.count()
        dtype, weight, eps = self.weight.dtype, self.weight, self.variance_epsilon
        if residual is not None:
            return context.run(
                add_rms_norm, dict(delta=hidden_states, residual=residual), rnd, params=dict(weight=weight), eps=eps
            )
        total = stream.unseal(hidden_states)
        out = context.run(rms_norm, dict(total=total), rnd, params=dict(weight=weight), eps=eps, dtype=dtype)
        return (out, rnd("carry", total, dtype)) if with_carry else out

    return forward


def layer_forward(rnd_in: Rounding, rnd_out: Rounding, first: bool, context: Context) -> Callable:
    """Return a decoder layer's forward; ``rnd_in`` governs the sum it reads, ``rnd_out`` the sum it returns.

    The forward takes hidden states (batch, tokens, hidden_size) in the model dtype, or, after the first layer and where
    ``rnd_in`` does not store them, sealed (batch, tokens, hidden_size / 2) complex64; it returns them likewise.
    """
    sealed_in = not first and not (rnd_in.stores("sum") and rnd_in.stores("carry"))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        context.count()
        dtype = self.input_layernorm.weight.dtype
        narrow = dtype != torch.promote_types(dtype, torch.float32)
        expected = torch.complex64 if narrow and sealed_in else dtype
        if hidden_states.dtype != expected:
            raise ValueError(_dtype_message(hidden_states.dtype, expected, dtype))
        hidden_states, residual = self.input_layernorm(hidden_states, with_carry=True)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        total = context.run(add, dict(delta=hidden_states, residual=residual), rnd_out)
        return total if total.dtype == hidden_states.dtype else stream.seal(total)

    return forward


def _dtype_message(got: torch.dtype, expected: torch.dtype, weights: torch.dtype) -> str:
    sealed = " (the unrounded residual sum, viewed as complex)" if expected.is_complex else ""
    return (
        f"rounding_align: a decoder layer got hidden states in {got}, expected {expected}{sealed}; its weights are in "
        f"{weights}. Either a wrapper casts the inputs of layers, or the parameters are not in the model dtype (autocast "
        "over fp32 parameters keeps the residual stream in fp32: cast the model, or use FSDP mixed precision)"
    )
