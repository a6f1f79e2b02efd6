"""Where each site kind runs in a Hugging Face decoder stack, and what is bound there: one row of ``PLACES`` a kind.

A row is asked once for every decoder layer and once for the stack as a whole, in the order in which a forward pass meets
the rows. It yields claims; ``checks.py`` looks at each before anything is bound. A new region adds a row for each of its
site kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from ..engines.presets import get
from ..families import Family
from ..regions import KINDS
from ..rounding import Rounding
from . import forwards
from .alignment import Alignment, Claim, Context, Site


@dataclass(frozen=True)
class Stack:
    """A decoder stack that is about to be aligned.

    Args:
        prefix: fully qualified name of the stack, with a dot at its end if it is not empty.
        module: the stack: embeddings, ``layers``, ``norm``, ``rotary_emb``.
        family: its row of ``FAMILIES``.
        alignment: what the claims are made for.
        model: the whole model, with its language-model head.
    """

    prefix: str
    module: nn.Module
    family: Family
    alignment: Alignment
    model: nn.Module

    def rounding(self, kind: str) -> Rounding | None:
        """Return the plan's Rounding at a site kind, None where nothing is patched."""
        return self.alignment.plan.rounding(kind)

    def site(self, kind: str, fqn: str, module: nn.Module, part: str, build: Callable, *args, attr: str = "forward"):
        """Return the claim of one site.

        Args:
            kind: the site kind; the plan has a Rounding for it.
            fqn: the module's name inside the stack.
            module: the instance.
            part: what it is checked as (``checks.PARTS``).
            build: (Rounding, Context, *args) -> the function to bind.
            attr: the attribute that is bound.
        """
        rnd, fqn = self.rounding(kind), self.prefix + fqn
        before = get(self.alignment.plan.trainer).at(kind)
        function = build(rnd, Context(self.alignment, fqn), *args)
        return Claim(fqn, module, part, attr, function, Site(fqn, KINDS[kind], kind, before, rnd.points))


# (stack, number of a decoder layer, or None for the stack as a whole) -> claims
Place = Callable[[Stack, int | None], Iterator[Claim]]


def _in_layer(claims: Callable[[Stack, int, nn.Module], Iterator[Claim]]) -> Place:
    """Return the row of a site kind that every decoder layer has."""
    return lambda stack, i: claims(stack, i, stack.module.layers[i]) if i is not None else iter(())


def _mlp_add(stack: Stack, i: int, layer: nn.Module) -> Iterator[Claim]:
    name = f"layers.{i}.input_layernorm"
    yield stack.site("mlp_add", name, layer.input_layernorm, "RMSNorm", forwards.norm_forward)


def _attention(stack: Stack, i: int, layer: nn.Module) -> Iterator[Claim]:
    attention, name = layer.self_attn, f"layers.{i}.self_attn"
    rotary = None if stack.rounding("attention").stores("cos_sin") else stack.module.rotary_emb
    yield stack.site("attention", name, attention, "Attention", forwards.attention_forward, stack.family, rotary)
    for norm in ("q_norm", "k_norm") if stack.family.qk_norm else ():  # their maths runs inside the region
        fqn = f"{stack.prefix}{name}.{norm}"
        yield Claim(fqn, getattr(attention, norm), "RMSNorm", "forward", forwards.pass_through, counted=False)


def _attn_add(stack: Stack, i: int, layer: nn.Module) -> Iterator[Claim]:
    fqn, norm = f"layers.{i}", layer.post_attention_layernorm
    yield stack.site("attn_add", f"{fqn}.post_attention_layernorm", norm, "RMSNorm", forwards.norm_forward)
    # the layer itself: it makes both adds, and hands the second sum to the next layer
    out = stack.rounding("final" if i == len(stack.module.layers) - 1 else "mlp_add")
    context = Context(stack.alignment, stack.prefix + fqn)
    function = forwards.layer_forward(stack.rounding("mlp_add"), out, i == 0, context)
    yield Claim(stack.prefix + fqn, layer, "DecoderLayer", "forward", function)


def _mlp(stack: Stack, i: int, layer: nn.Module) -> Iterator[Claim]:
    if getattr(layer.mlp, "experts", None) is None:
        yield stack.site("mlp", f"layers.{i}.mlp", layer.mlp, "MLP", forwards.mlp_forward)


def _experts(stack: Stack, i: int, layer: nn.Module) -> Iterator[Claim]:
    experts, name = getattr(layer.mlp, "experts", None), f"layers.{i}.mlp.experts"
    if experts is not None:
        yield stack.site("experts", name, experts, "Experts", forwards.expert_gate, attr="_apply_gate")


def _final(stack: Stack, i: int | None) -> Iterator[Claim]:
    if i is None:
        yield stack.site("final", "norm", stack.module.norm, "RMSNorm", forwards.norm_forward)


PLACES: dict[str, Place] = {
    "mlp_add": _in_layer(_mlp_add),  # read by the next layer's first norm, so it comes first in a layer
    "attention": _in_layer(_attention),
    "attn_add": _in_layer(_attn_add),
    "mlp": _in_layer(_mlp),
    "experts": _in_layer(_experts),
    "final": _final,
}


def claims(stack: Stack) -> Iterator[Claim]:
    """Yield what the alignment's plan wants to bind in one decoder stack, in the order of a forward pass.

    Raises:
        ValueError: the plan has a site kind that no row of ``PLACES`` knows.
    """
    asked = [kind for kind, _ in stack.alignment.plan.roundings]
    for kind in asked:
        if kind not in PLACES:
            raise ValueError(
                f"rounding_align={'+'.join(stack.alignment.plan.groups)!r}: site kind {kind!r} has no place in a Hugging Face "
                f"model here; choose from {', '.join(PLACES)}"
            )
    for i in (*range(len(stack.module.layers)), None):
        for kind, place in PLACES.items():
            if kind in asked:
                yield from place(stack, i)
