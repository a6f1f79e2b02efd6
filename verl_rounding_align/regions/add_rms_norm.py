"""Region ``add_rms_norm``: the residual add, the RMSNorm that reads it, and the residual stream that the next add reads.

    total  = delta + residual
    h      = total                                       point sum:    what the norm reads
    normed = h * rsqrt(mean(h^2) + eps)                  point normed: before the norm's weight
    out    = weight * normed                             returned in the model dtype
    carry  = total                                       point carry:  what the next add reads

``sum`` and ``carry`` are two readers of one value. An engine may round for neither, either or both. The add after the
MLP and the norm that reads it lie in two decoder layers, so the region also exists as its two halves, :func:`add` and
:func:`rms_norm`; ``add_rms_norm`` is their composition.

Mirrors: HF ``Qwen3DecoderLayer`` and ``Qwen3RMSNorm``, Transformers 5.10; vLLM ``RMSNorm.forward(x, residual)``, 0.30.
"""

from __future__ import annotations

import torch

from ..rounding import Rounding, up
from .table import Group, Region

POINTS = {
    "sum": "the residual sum as the norm reads it",
    "normed": "the normalised sum before the norm's weight",
    "carry": "the residual sum as the next add reads it (the residual stream)",
}


def add(delta: torch.Tensor, residual: torch.Tensor, rnd: Rounding) -> torch.Tensor:
    """Return the residual sum: in the model dtype if both of its readers store it, else in the compute dtype.

    Args:
        delta: (..., hidden_size) output of attention or MLP, model dtype.
        residual: (..., hidden_size) residual stream, model dtype or compute dtype.
        rnd: which of ``POINTS`` are stored.
    """
    total = up(delta) + up(residual)
    return rnd("sum", total, delta.dtype) if rnd.stores("carry") else total


def rms_norm(total: torch.Tensor, weight: torch.Tensor, eps: float, rnd: Rounding, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of a residual sum.

    Args:
        total: (..., hidden_size), compute dtype, or model dtype where it was stored or nothing was added.
        weight: (hidden_size,) the norm's weight, model dtype.
        eps: the norm's epsilon.
        rnd: which of ``POINTS`` are stored.
        dtype: the model dtype, which the result has.
    """
    h = up(rnd("sum", total, dtype))
    normed = rnd("normed", h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps), dtype)
    return rnd.store(weight * normed, dtype)


def add_rms_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rnd: Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, carry)``: the norm's output in the model dtype, the residual stream stored or in compute dtype.

    Args: see :func:`add` and :func:`rms_norm`.

    Returns:
        Two tensors (..., hidden_size).
    """
    total = up(delta) + up(residual)
    return rms_norm(total, weight, eps, rnd, delta.dtype), rnd("carry", total, delta.dtype)


REGION = Region(
    name="add_rms_norm",
    function=add_rms_norm,
    points=POINTS,
    kinds={
        "attn_add": "the add after attention, read by post_attention_layernorm",
        "mlp_add": "the add after the MLP, read by the next layer's input_layernorm",
        "final": "the last layer's add after the MLP, read by the final norm",
    },
    groups={
        "add_rms_norm": Group(
            "add_rms_norm",
            frozenset({"sum", "normed"}),
            "the residual sum as the norm reads it, and the norm",
            paper=True,
        ),
        "carry": Group("add_rms_norm", frozenset({"carry"}), "the residual stream as the next add reads it"),
    },
)
