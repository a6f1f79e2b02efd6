"""Rounding points: where an intermediate is stored in the model dtype, and where it stays in fp32.

A rounding point is a *named* intermediate of a fused region. To store it means to round it once, to nearest even, to the
model dtype (bf16 in training). Where it is not stored, the next operator reads the fp32 value. What an engine does in a
region is therefore a set of point names. Presets, groups, probe candidates and error messages are all sets over the same
names, and each region's maths is written once.

The Rounding decides the format of what is stored, and regions do not know it: it is the model dtype, by a cast, or a format
that is emulated in an fp32 model (``formats.py``), for experiments with coarser storage than any dtype has.

Store once and upcast at each use: ``h = up(rnd("sum", total, dtype))``. A cast pair ``x.to(bf16).float()`` at each use
would give the same forward values and different gradients, since Hugging Face rounds the gradient once per consumer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .formats import Format


def up(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the compute dtype: at least fp32; fp64 stays fp64, so that gradcheck works.

    >>> up(torch.ones(1, dtype=torch.bfloat16)).dtype, up(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Rounding:
    """The set of rounding points that are stored in the model dtype; every other point stays in fp32.

    With a ``format`` the model dtype is fp32, and what is stored is rounded to that format there.

    >>> rnd = Rounding({"sum"})
    >>> x = torch.full((1,), 1.001)
    >>> rnd("sum", x, torch.bfloat16).dtype, rnd("carry", x, torch.bfloat16).dtype
    (torch.bfloat16, torch.float32)
    """

    points: frozenset[str]
    format: Format | None

    def __init__(self, points: Iterable[str] = (), format: Format | None = None):
        object.__setattr__(self, "points", frozenset(points))
        object.__setattr__(self, "format", format)

    def stores(self, point: str) -> bool:
        """Return whether ``point`` is stored in the model dtype."""
        return point in self.points

    def __call__(self, point: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``x`` stored in ``dtype`` if ``point`` is stored, else ``x`` unchanged.

        Args:
            point: name of the intermediate.
            x: the intermediate, any shape, compute dtype.
            dtype: the model dtype.
        """
        return self.store(x, dtype) if point in self.points else x

    def store(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``x`` stored in ``dtype``, or in the emulated format: what every region does with its results."""
        return x.to(dtype) if self.format is None else self.format.store(x)

    def __str__(self) -> str:
        return "{" + ", ".join(sorted(self.points)) + "}" + (f" in {self.format}" if self.format else "")
