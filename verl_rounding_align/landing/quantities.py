"""The quantities that are scored, as data: what gets rounded in a decoder layer, and which rounding points store it."""

from __future__ import annotations

from dataclasses import dataclass

ALWAYS = "always"  # every engine rounds it


@dataclass(frozen=True)
class Quantity:
    """An fp32 value that gets rounded.

    Args:
        kind: what the paper calls it.
        formula: how it is recomputed from the bf16 tensors of the running model; factors are bf16 unless it says otherwise.
        point: the rounding points that store it, or ``ALWAYS``.
    """

    kind: str
    formula: str
    point: str


def _norms(prefix: str, normed: str, out: str) -> dict[str, Quantity]:
    return {
        f"{prefix}normed": Quantity("norm", "h * rsqrt(mean(h^2) + eps)", normed),
        f"{prefix}norm": Quantity("norm", "weight * normed, normed in fp32", out),
        f"{prefix}norm of stored normed": Quantity(
            "norm, twice rounded", "weight * normed, normed stored in bf16", out
        ),
    }


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTITIES = {
    **{name: Quantity("projection", "x @ weight^T (+ bias), accumulated in fp32", ALWAYS) for name in PROJECTIONS},
    "attention": Quantity("attention", "softmax(q k^T / sqrt(head_dim)) v, all in fp32", ALWAYS),
    **_norms("", "normed", ALWAYS),
    **_norms("Q/K ", "qk_normed", "qk_norm"),
    "SiLU": Quantity("SiLU", "silu(gate)", "act"),
    "SiLU, experts": Quantity("SiLU", "silu(gate) of the experts", "act"),
    "RoPE products": Quantity("RoPE product", "x * cos and rotate_half(x) * sin, x = q and k", "product"),
    "RoPE cos products": Quantity("RoPE product", "x * cos, x = q and k", "product"),
    "RoPE sin products": Quantity("RoPE product", "rotate_half(x) * sin, x = q and k", "product"),
    "RoPE sum": Quantity("RoPE sum", "the two products' sum, products in fp32", ALWAYS),
    "RoPE sum of stored products": Quantity(
        "RoPE sum, twice rounded", "the two products' sum, products in bf16", ALWAYS
    ),
    "sum after attention": Quantity("residual sum", "residual + attention's output", "sum, carry"),
    "sum after MLP": Quantity("residual sum", "residual + the MLP's output", "sum, carry"),
}
