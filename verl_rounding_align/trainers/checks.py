"""What a module must be for the bound forwards to be right. Every refusal of a module is raised here, before anything is bound.

The replaced forwards rely on Transformers' own: on every global and attribute that its source names, no more and no less. A
forward that names anything else (a residual multiplier, a second norm) is another computation, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import transformers
from torch import nn

from ..families import Family
from ..plan import Plan
from .alignment import Claim
from .forwards import ROTARY

NAMES = {
    "DecoderLayer": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "RMSNorm": {"dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"},
    "MLP": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
LAYER_SIGNATURE = (
    "self",
    "hidden_states",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "position_embeddings",
    "kwargs",
)
EXPERTS = ("grouped_mm", "batched_mm")  # implementations that always call _apply_gate
PACKAGE = __name__.partition(".")[0]


def _owned(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    """The class's forward is the family's own in Transformers."""
    if forward.__module__ != family.module:
        raise ValueError(f"{where} has its class's forward replaced by {forward.__module__}, expected {family.module}")


def _named(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    """The class's forward is the family's own, and names what it is expected to."""
    _owned(claim, forward, family, where)
    if set(forward.__code__.co_names) != NAMES[claim.part]:
        raise ValueError(
            f"{where}: transformers {transformers.__version__} computes it differently from what rounding_align is "
            f"written for: it names {sorted(forward.__code__.co_names)}, expected {sorted(NAMES[claim.part])}"
        )


def _layer(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    _named(claim, forward, family, where)
    if tuple(inspect.signature(forward).parameters) != LAYER_SIGNATURE:
        raise ValueError(f"{where}: its forward's signature is {inspect.signature(forward)}")


def _attention(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    _owned(claim, forward, family, where)
    rotary = inspect.unwrap(forward.__globals__.get(ROTARY))
    if ROTARY not in forward.__code__.co_names or forward.__code__.co_freevars:
        raise ValueError(f"{where}: its forward does not call {ROTARY} of {family.module}")
    if rotary.__module__ != family.module:
        raise ValueError(f"{where} has {ROTARY} replaced by {rotary.__module__}, expected {family.module}")


def _mlp(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    _named(claim, forward, family, where)
    _silu(claim, where)


def _experts(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    implementation = getattr(claim.module.config, "_experts_implementation", None)
    if implementation not in EXPERTS:
        raise ValueError(
            f"{where}: experts_implementation={implementation!r} does not call {claim.attr} in every case; "
            f"choose {' or '.join(EXPERTS)}"
        )
    if forward.__module__ != "transformers.integrations.moe":
        raise ValueError(f"{where} has its class's {claim.attr} replaced by {forward.__module__}")
    _silu(claim, where)


def _silu(claim: Claim, where: str) -> None:
    from transformers.activations import ACT2FN

    activation = getattr(claim.module, "act_fn", None)
    if not isinstance(activation, nn.SiLU | type(ACT2FN["silu"])):
        raise ValueError(f"{where}: its activation is {type(activation).__name__}, expected SiLU")


def _torch(claim: Claim, forward: Callable, family: Family, where: str) -> None:
    """The class's forward is torch's own: a linear layer or an embedding that nobody has replaced."""
    if not forward.__module__.startswith("torch.nn."):
        raise ValueError(f"{where} has its class's forward replaced by {forward.__module__}, expected torch.nn")


# what a claim's module is -> its check: (claim, the class's own function, family, "key=value: module" for the message)
PARTS: dict[str, Callable[[Claim, Callable, Family, str], None]] = {
    "DecoderLayer": _layer,
    "RMSNorm": _named,
    "MLP": _mlp,
    "Attention": _attention,
    "Experts": _experts,
    "torch": _torch,
}


def check(claims: Sequence[Claim], family: Family, plan: Plan, key: str) -> None:
    """Raise ValueError unless every claim meets the module that it is written for, and nobody else's patch."""
    for claim in claims:
        module = claim.module
        where = f"{key}={'+'.join(plan.groups)!r}: {claim.fqn} ({type(module).__name__})"
        if claim.attr in module.__dict__:
            other = module.__dict__[claim.attr]
            owner = getattr(inspect.unwrap(getattr(other, "__func__", other)), "__module__", type(other).__name__)
            if owner.partition(".")[0] == PACKAGE:
                raise ValueError(f"{where} is aligned already; call undo() on that Alignment first")
            raise ValueError(f"{where} has its {claim.attr} patched by {owner}; rounding_align cannot patch it as well")
        PARTS[claim.part](claim, inspect.unwrap(getattr(type(module), claim.attr)), family, where)
