"""Inputs of a probe, drawn so that equality is decidable.

The order in which a norm's mean is summed is no rounding point, but it can move a result by one step, and it is the
compiler's or kernel's choice. So whatever a norm reads is a set of small integers times a power of two, whose squares sum
exactly in fp32 in any order.
"""

from __future__ import annotations

import torch

from .bitwise import Case


def generator(case: Case) -> torch.Generator:
    """Return the generator of a case's draws; the same numbers on every machine."""
    return torch.Generator().manual_seed(case.seed)


def _integers(case: Case, bound: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return integers in [-bound, bound], uniform, times the case's scale (a power of two)."""
    uniform = (2 * torch.rand(case.tokens, len(bound), generator=draw) - 1) * (bound + 0.49)
    return uniform.round() * case.scale


def residual_rows(case: Case, hidden_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return (residual, three deltas), each (tokens, hidden_size): every running sum has an exact sum of squares.

    Twelve columns hold integers up to 255, the others up to 1; a running sum of four is at most 1020 or 4, and
    12 * 1020^2 + 4^2 * hidden_size < 2^24 for hidden sizes below 268,000. Integers up to 255 are exact in bf16; sums
    beyond 256 are not, so that storing them shows.
    """
    draw = generator(case)
    bound = torch.ones(hidden_size)
    bound[torch.randperm(hidden_size, generator=draw)[:12]] = 255
    return [_integers(case, bound, draw).to(dtype) for _ in range(4)]


def qkv_rows(case: Case, width: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (tokens, width): integers whose squares sum exactly over a head, head_dim * bound^2 <= 2^24."""
    bound = min(255, int((2**24 / head_dim) ** 0.5))
    return _integers(case, torch.full((width,), float(bound)), generator(case)).to(dtype)


def random_rows(case: Case, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (tokens, width), normally distributed with the case's scale."""
    return (case.scale * torch.randn(case.tokens, width, generator=generator(case))).to(dtype)
