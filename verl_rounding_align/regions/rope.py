"""Region ``rope``: Q/K RMSNorm (Qwen3) and the rotary embedding, up to the rotated Q and K that attention reads.

    normed  = x * rsqrt(mean(x^2) + eps)                 point qk_normed   (only with Q/K norm)
    scaled  = weight * normed                            point qk_norm     (only with Q/K norm)
    c, s    = cos, sin                                   point cos_sin
    out     = scaled * c + rotate_half(scaled) * s       point product: each of the two products
    returned in the model dtype.

Mirrors: HF ``Qwen3Attention`` (``q_norm``, ``k_norm``, ``apply_rotary_pos_emb``), Transformers 5.10; vLLM
``RMSNorm`` + ``RotaryEmbedding`` (neox style), 0.30.
"""

from __future__ import annotations

import torch

from ..rounding import Rounding, up
from .table import Group, Region

POINTS = {
    "qk_normed": "normalised Q or K before the norm's weight",
    "qk_norm": "normalised Q or K times the norm's weight: what the rotary embedding reads",
    "cos_sin": "the cosines and sines",
    "product": "x * cos and rotate_half(x) * sin, before their sum",
}


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return ``(-x2, x1)`` for the halves ``x = (x1, x2)`` of the last dimension (neox-style rotary embedding)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rnd: Rounding,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise (if ``weight`` is given) and rotate Q or K.

    Args:
        x: (..., tokens, head_dim), model dtype.
        cos, sin: broadcastable to ``x``, model dtype or fp32.
        rnd: which of ``POINTS`` are stored.
        weight: (head_dim,) weight of the Q or K norm, or None for a family without it.
        eps: the norm's epsilon.

    Returns:
        Tensor like ``x``, model dtype.
    """
    dtype = x.dtype
    scaled = x
    if weight is not None:
        h = up(x)
        normed = rnd("qk_normed", h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps), dtype)
        # a stored product of two stored factors is one operator in the model dtype, in the backward pass too
        scaled = weight * normed if rnd.stores("qk_norm") else up(weight) * up(normed)
        scaled = rnd("qk_norm", scaled, dtype)
    cos, sin = rnd("cos_sin", cos, dtype), rnd("cos_sin", sin, dtype)
    # upcast at each use: HF's two products round their gradients separately
    direct = rnd("product", up(scaled) * up(cos), dtype)
    crossed = rnd("product", rotate_half(up(scaled)) * up(sin), dtype)
    return rnd.store(up(direct) + up(crossed), dtype)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rnd: Rounding,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``(q, k)``; see the module's docstring for the formula, :func:`rotate` for shapes and dtypes.

    Args:
        q, k: (batch, heads, tokens, head_dim) and (batch, kv_heads, tokens, head_dim), model dtype.
        cos, sin: (batch, 1, tokens, head_dim), model dtype or fp32.
        rnd: which of ``POINTS`` are stored.
        q_weight, k_weight: (head_dim,) weights of the Q and K norms, or None.
        eps: epsilon of the norms.

    Returns:
        Tensors like ``q`` and ``k``, model dtype.
    """
    return rotate(q, cos, sin, rnd, q_weight, eps), rotate(k, cos, sin, rnd, k_weight, eps)


REGION = Region(
    name="rope",
    function=rope,
    points=POINTS,
    kinds={"attention": "Q and K in self-attention"},
    groups={"rope": Group("rope", frozenset(POINTS), "Q/K norm and rotary embedding", paper=True)},
)
