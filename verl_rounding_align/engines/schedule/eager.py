"""What an eager run stores: every operator is a kernel of its own, and its result lies in memory.

An eager run is written down in the form of a compiled graph (:mod:`.graph`), so that both are read by the same code.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import Graph, Stored, Value, opaque, written


class OperatorTrace(TorchDispatchMode):
    """Within the context, write down every operator that runs on tensors, as a graph in which each stores its result.

    Args:
        model: the model that runs; gives values the names of its modules.
        package: only frames of this package are kept as source, e.g. ``vllm/``.
    """

    def __init__(self, model: torch.nn.Module, package: str):
        super().__init__()
        self._model, self._package = model, package
        self._stack: list[str] = []
        self._values: list[Value] = []
        self._stored: list[Stored] = []
        self._names: dict[int, tuple[str, str]] = {}  # id of a tensor -> (value, buffer)
        self._alive: list[torch.Tensor] = []  # ids are unique only among tensors that live
        self._hooks: list = []

    @property
    def graph(self) -> Graph:
        """The operators so far."""
        return Graph(tuple(self._values), tuple(self._stored), keeps_casts=False)

    def __enter__(self):
        def enter(module, args, *, name):
            above = self._stack[-1] if self._stack else ""
            if not name.startswith(above):  # one module in several layers: named after the layer that calls it
                name = f"{above}.{name.rsplit('.', 1)[-1]}"
            self._stack.append(name)

        def leave(*_):  # a hook that returned something would replace the module's output
            self._stack.pop()

        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(enter, name=name)))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = _tensors([*args, *kwargs.values()])
        filled = written(func, args, kwargs)
        reads = [self._name(x) for x in inputs if not any(x is w for w in filled) or not opaque(func)]
        frames = self._frames()
        for x in filled or _tensors([result]):
            self._add(func, x, reads, inputs, frames, bool(filled))
        return result

    def _add(self, func, x, reads, inputs, frames, in_place):
        number = len(self._values)
        view = not in_place and any(x is y or x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in inputs)
        name = f"{func._opname}_{number}"
        buffer = reads[0][1] if view and reads else f"buf{number}"
        if func._opname in ("empty", "empty_like", "new_empty", "empty_strided"):
            view = True  # nothing is stored yet: the operator that fills it makes another value
        dtype, size = str(x.dtype).removeprefix("torch."), tuple(map(str, x.shape))
        names = tuple(r[0] for r in reads)
        value = Value(name, str(func), dtype, size, names, buffer, view, self._stack[-1] if self._stack else "", frames)
        self._values.append(replace(value, opaque=opaque(func)))
        if not view:
            from_ = tuple(sorted({r[1] for r in reads}))
            loop = Stored(number, opaque(func), buffer, dtype, size, from_, (str(func),), False, name, (name,))
            self._stored.append(loop)
        self._alive.append(x)
        self._names[id(x)] = name, buffer
        if in_place:  # other tensors that look at the same memory see the new value
            for other in self._alive:
                same = other.untyped_storage()._cdata == x.untyped_storage()._cdata
                if same and other.data_ptr() == x.data_ptr():
                    self._names[id(other)] = name, buffer

    def _name(self, x: torch.Tensor) -> tuple[str, str]:
        """Return (value, buffer) of a tensor; one that no operator made here is an input."""
        if id(x) not in self._names:
            name = f"arg{len(self._alive)}"
            dtype, size = str(x.dtype).removeprefix("torch."), tuple(map(str, x.shape))
            self._values.append(Value(name, "placeholder", dtype, size, (), name))
            self._alive.append(x)
            self._names[id(x)] = name, name
        return self._names[id(x)]

    def _frames(self) -> tuple[tuple[str, int, str], ...]:
        frame, found = sys._getframe(2), []
        while frame is not None:
            file = re.split(r"(?:site|dist)-packages/", frame.f_code.co_filename)[-1]
            if file.startswith(self._package):
                found.append((file, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return tuple(reversed(found))


def _tensors(x) -> list[torch.Tensor]:
    """Return the tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for y in x for t in _tensors(y)] if isinstance(x, list | tuple) else []
