"""The form in which both an Inductor schedule and an eager run are written down: values, and the buffers that hold them.

A *value* is the result of one operator, or an input. A *buffer* is memory that a kernel writes, in the buffer's dtype. A
value that no buffer holds only ever exists in the registers of a kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stored:
    """One buffer that a graph writes.

    Args:
        kernel: number of the kernel that writes it, in the order in which kernels run.
        extern: whether that kernel is not Inductor's own (a matrix product, attention): nothing inside it is visible.
        buffer, dtype, size: of the buffer.
        reads: buffers and inputs that the kernel's loop for this buffer reads.
        origins: operators that are fused into that loop.
        output: whether the buffer leaves the graph.
        value: name of the :class:`Value` that it holds; empty if it holds none.
        computes: names of the values that the loop for this buffer computes.
    """

    kernel: int
    extern: bool
    buffer: str
    dtype: str
    size: tuple[str, ...]
    reads: tuple[str, ...]
    origins: tuple[str, ...]
    output: bool
    value: str = ""
    computes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """One operator of a graph, or one input of it. Of a compiled graph: after Inductor's own passes over it.

    Args:
        name: its name in the graph.
        op: the operator; ``placeholder`` for an input.
        dtype, size: of its result, as the graph declares them.
        reads: names of the values that it reads.
        buffer: the buffer that holds its result, or of which it is a view; None where it is never stored.
        view: whether it only looks at another value.
        module: qualified name of the module that called it; "" if the graph does not say.
        frames: the caller's stack when it was traced, outermost first, as (file, line, function), without torch's own.
        output: whether the value leaves the graph.
        opaque: whether it runs in a kernel that is not Inductor's.
    """

    name: str
    op: str
    dtype: str
    size: tuple[str, ...]
    reads: tuple[str, ...]
    buffer: str | None
    view: bool = False
    module: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()
    output: bool = False
    opaque: bool = False


@dataclass(frozen=True)
class Graph:
    """One graph.

    Args:
        values: in order.
        stored: its buffers, in order.
        keeps_casts: whether every operator rounds to its declared dtype in registers too, as with Inductor's
            ``emulate_precision_casts``; without it only memory rounds.
    """

    values: tuple[Value, ...]
    stored: tuple[Stored, ...]
    keeps_casts: bool

    @classmethod
    def from_dict(cls, data: dict) -> Graph:
        """Return the graph that ``dataclasses.asdict`` made ``data`` of (through JSON)."""

        def tuples(x):
            return tuple(map(tuples, x)) if isinstance(x, list) else x

        def make(kind, row):
            return kind(**{key: tuples(x) for key, x in row.items()})

        return cls(
            tuple(make(Value, row) for row in data["values"]),
            tuple(make(Stored, row) for row in data["stored"]),
            data["keeps_casts"],
        )


def opaque(target) -> bool:
    """Return whether an operator is one that Inductor does not lower to loops: a custom operator, a matrix product."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or bool(
        re.match(r"(add|b|badd)?b?mm$|linear$|_scaled_dot_product|_grouped_mm|convolution", target._opname)
    )


def written(target, args, kwargs) -> list:
    """Return the arguments (graph nodes or tensors) that an operator writes to."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    found = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [value] if isinstance(value, torch.fx.Node | torch.Tensor) else []
    return found
