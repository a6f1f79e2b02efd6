"""The fused regions: each region's maths once, with its rounding points by name.

A new region is one file here (the function, ``POINTS``) and one row in ``REGIONS``; a place in the model where it runs
is a *site kind* (``KINDS``), so that an engine may round differently, say, at the add after attention and at the add
after the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import add_rms_norm, rope, swiglu


@dataclass(frozen=True)
class Region:
    """A fused region: its name, its function, and what each of its rounding points means."""

    name: str
    function: Callable
    points: Mapping[str, str]


REGIONS = {
    "rope": Region("rope", rope.rope, rope.POINTS),
    "swiglu": Region("swiglu", swiglu.swiglu, swiglu.POINTS),
    "add_rms_norm": Region("add_rms_norm", add_rms_norm.add_rms_norm, add_rms_norm.POINTS),
}

# site kind -> region
KINDS = {
    "attention": "rope",
    "mlp": "swiglu",
    "experts": "swiglu",
    "attn_add": "add_rms_norm",  # the add after attention, read by post_attention_layernorm
    "mlp_add": "add_rms_norm",  # the add after the MLP, read by the next layer's input_layernorm
    "final": "add_rms_norm",  # the last layer's add after the MLP, read by the final norm
}

# what users switch, and what attribution plays over: group -> (region, points)
GROUPS = {
    "rope": ("rope", frozenset(rope.POINTS)),
    "swiglu": ("swiglu", frozenset(swiglu.POINTS)),
    "add_rms_norm": ("add_rms_norm", frozenset({"sum", "normed"})),
    "carry": ("add_rms_norm", frozenset({"carry"})),
}
