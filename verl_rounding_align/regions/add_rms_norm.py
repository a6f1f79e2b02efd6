"""Region ``add_rms_norm``: the residual add, the RMSNorm that reads it, and the residual stream that the next add reads.

    total  = delta + residual
    h      = total                                       point sum:    what the norm reads
    normed = h * rsqrt(mean(h^2) + eps)                  point normed: before the norm's weight
    out    = weight * normed                             returned in the model dtype
    carry  = total                                       point carry:  what the next add reads

``sum`` and ``carry`` are two readers of one value. An engine may round for neither, either or both.

Mirrors: HF ``Qwen3DecoderLayer`` and ``Qwen3RMSNorm``, Transformers 5.10; vLLM ``RMSNorm.forward(x, residual)``, 0.30.
"""

from __future__ import annotations

import torch

from ..rounding import Rounding, up

POINTS = {
    "sum": "the residual sum as the norm reads it",
    "normed": "the normalised sum before the norm's weight",
    "carry": "the residual sum as the next add reads it (the residual stream)",
}


def add(delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the unrounded residual sum.

    Args:
        delta: (..., hidden_size) output of attention or MLP, model dtype.
        residual: (..., hidden_size) residual stream, model dtype or fp32.

    Returns:
        (..., hidden_size), compute dtype.
    """
    return up(delta) + up(residual)


def rms_norm(
    total: torch.Tensor, weight: torch.Tensor, eps: float, rnd: Rounding, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, carry)`` for a residual sum that is already there (the second half of the region).

    Args:
        total: (..., hidden_size), compute dtype, or model dtype where it was stored or nothing was added.
        weight: (hidden_size,) the norm's weight, model dtype.
        eps: the norm's epsilon.
        rnd: which of ``POINTS`` are stored.
        dtype: the model dtype.
    """
    h = up(rnd("sum", total, dtype))
    normed = rnd("normed", h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps), dtype)
    return (weight * normed).to(dtype), rnd("carry", total, dtype)


def add_rms_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rnd: Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, carry)``: the norm's output in the model dtype, the residual stream stored or in fp32.

    Args: see :func:`add` and :func:`rms_norm`.
    """
    return rms_norm(add(delta, residual), weight, eps, rnd, delta.dtype)
