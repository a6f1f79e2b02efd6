"""What torch stores: Inductor's schedule after fusion, or every operator of an eager run. The only internal torch hooks.

Inductor lowers a graph of operators (*values* here) to kernels. Most values are fused into the kernel of their reader
and live in registers; some are *buffers*, which a kernel writes to memory in the buffer's dtype. Two hooks show which:

- ``torch._inductor.config._post_fusion_custom_pass`` receives the fused kernels with the buffers that each one writes;
- ``GraphLowering.run_node`` returns, per operator, the Inductor object that stands for it. Once the graph is lowered,
  that object is a buffer if the value was materialised, a view of one, or a formula if it was fused away.

Both are internal: they were read and run on the releases ``TESTED``, and other releases are refused.

An eager run (:class:`OperatorTrace`, a ``TorchDispatchMode``) is written down in the same form: every operator is a kernel
of its own and stores its result.

Needs torch alone; imports no engine.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# torch releases (major.minor) whose scheduler was read and run: vLLM's models on 2.13, pieces of one (gpu_check) on both
TESTED = ("2.11", "2.13")
_DONE = "the schedule is read; no kernel needs to be built"


@dataclass(frozen=True)
class Stored:
    """One buffer that a compiled graph writes.

    Args:
        kernel: number of the kernel that writes it, in the order in which kernels run.
        extern: whether that kernel is not Inductor's own (a matrix product, attention): nothing inside it is visible.
        buffer, dtype, size: of the buffer.
        reads: buffers and inputs that the kernel's loop for this buffer reads.
        origins: operators fused into that loop.
        output: whether the buffer leaves the graph.
        value: the operator whose result it holds, as named in :class:`Value`; empty if it is none's.
        computes: the values, by name, that the loop for this buffer computes.
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
    """One operator of the graph that Inductor was given (after its own graph passes), or one input of that graph.

    Args:
        name, op: name in the graph; the operator, ``placeholder`` for an input.
        dtype, size: of its result, as the graph declares them.
        reads: the values it reads.
        buffer: the buffer that holds its result (for a view: of which it is a part); None: never stored.
        view: whether it only looks at another value.
        module: qualified name of the module that called it, "" if the graph does not say.
        frames: the engine's stack when it was traced, outermost first: (file, line, function), without torch's frames.
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
    """One compiled graph: its values in order, its buffers in order, and whether fused kernels keep named roundings.

    With ``keeps_casts`` (Inductor's ``emulate_precision_casts``) every operator rounds to its declared dtype, in
    registers too; without it only memory rounds.
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


def check(tested: tuple[str, ...] = TESTED) -> None:
    """Raise if this torch release is not one that the hooks were tested on.

    Raises:
        RuntimeError: with the releases that were.
    """
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in tested:
        raise RuntimeError(
            f"torch {torch.__version__}: Inductor's _post_fusion_custom_pass was read and run on torch "
            f"{', '.join(tested)} only"
        )


@contextlib.contextmanager
def record(
    tested: tuple[str, ...] = TESTED, stop: Callable[[Graph], bool] = lambda graph: False
) -> Iterator[list[Graph]]:
    """Within the context, append a :class:`Graph` to the list that is returned for each graph that Inductor compiles.

    Args:
        tested: releases to accept.
        stop: for which graph to raise once its schedule is read, before its kernels are built (see :func:`stopped`).

    Raises:
        RuntimeError: untested torch release.
    """
    check(tested)
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graphs: list[Graph] = []
    run_node, results = GraphLowering.run_node, {}

    def remember(self, node):
        result = run_node(self, node)
        results.setdefault(id(self), {})[node] = result
        return result

    def read(kernels):
        graphs.append(_graph(kernels, results.pop(id(V.graph), {})))
        if stop(graphs[-1]):
            raise InterruptedError(_DONE)
        return kernels

    GraphLowering.run_node = remember
    try:
        with config.patch(_post_fusion_custom_pass=read, force_disable_caches=True):
            yield graphs
    finally:
        GraphLowering.run_node = run_node


def stopped(error: BaseException) -> bool:
    """Return whether ``error`` is what ``record(stop=...)`` raised, as Inductor wraps it."""
    return _DONE in str(error)


def schedule(function: Callable, args, tested: tuple[str, ...] = TESTED) -> tuple[Stored, ...]:
    """Return what Inductor stores when it compiles ``function``; no kernel is built.

    Raises:
        RuntimeError: untested torch release.
    """
    with record(tested, stop=lambda graph: True) as graphs, torch.no_grad():
        torch._dynamo.reset()
        try:
            torch.compile(function)(*args)
        except Exception as error:  # Inductor wraps what its passes raise
            if not stopped(error):
                raise
    return graphs[0].stored


# ---- reading Inductor's objects


def _graph(kernels, results: dict) -> Graph:
    from torch._inductor import config

    nodes = list(results)
    buffers = {node: _held_in(result) for node, result in results.items()}
    order = {node: i for i, node in enumerate(nodes)}
    value_of: dict[str, str] = {}
    for node, (buffer, view) in buffers.items():
        if buffer is not None and not view and node.op == "call_function":
            value_of.setdefault(buffer, node.name)
    # a buffer that an operator writes to in place has a new name from there on; here it keeps its first one
    first, writer = {}, {}
    for n, kernel in enumerate(kernels):
        for op in kernel.get_nodes():
            for buffer in op.get_outputs():
                for name in buffer.get_mutations():
                    first[buffer.get_name()] = first.get(name, name)
                    writer[first.get(name, name)] = (n, op)
    stored = []
    for n, kernel in enumerate(kernels):
        for op in kernel.get_nodes():
            for buffer in op.get_outputs():
                ir = buffer.node
                dtype, size = _layout(ir)
                if not size:
                    continue
                name, origins = buffer.get_name(), [o for o in ir.get_origins() if hasattr(o, "target")]
                if name not in value_of:
                    # a copy made for a reader that wants memory: the last of the operators in its formula. A matrix
                    # product that reads it is among the origins, too
                    inside = [o for o in origins if o in order and not _opaque(o.target) and buffers[o][0] is None]
                    if not op.is_extern() and inside:
                        value_of[name] = max(inside, key=order.get).name
                users = {user.get_name() for user in buffer.users}
                kernel_number, by = writer.get(name, (n, op))
                stored.append(
                    Stored(
                        kernel=kernel_number,
                        extern=by.is_extern(),
                        buffer=name,
                        dtype=dtype,
                        size=size,
                        reads=tuple(sorted({first.get(dep.name, dep.name) for dep in by.read_writes.reads} - {name})),
                        origins=tuple(sorted({str(o.target) for o in origins})),
                        output="OUTPUT" in users,
                        value=value_of.get(name, ""),
                        computes=tuple(sorted(o.name for o in origins)),
                    )
                )
    holder = {s.value: s.buffer for s in stored if s.value}
    return Graph(_values(nodes, buffers, holder), tuple(stored), bool(config.emulate_precision_casts))


def _layout(ir) -> tuple[str, tuple[str, ...]]:
    """Return (dtype, size) of a buffer, ("", ()) for one without a layout of its own (mutation, several outputs)."""
    try:
        return str(ir.get_dtype()).removeprefix("torch."), tuple(map(str, ir.get_size()))
    except (AttributeError, NotImplementedError):
        return "", ()


def _held_in(result) -> tuple[str | None, bool]:
    """Return (name of the buffer that holds a lowered operator's result, whether the result is a view of it)."""
    from torch._inductor import ir

    view = False
    while isinstance(result, (ir.MutableBox, ir.BaseView)):
        view |= isinstance(result, ir.BaseView)
        result = result.data
    return (result.get_name() if isinstance(result, ir.Buffer) else None), view


def _opaque(target) -> bool:
    """Return whether an operator is one that Inductor does not lower to loops: a custom operator, a matrix product."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or bool(
        re.match(r"(add|b|badd)?b?mm$|linear$|_scaled_dot_product|_grouped_mm|convolution", target._opname)
    )


def _written(target, args, kwargs) -> list:
    """Return the arguments (graph nodes or tensors) that an operator writes to."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    written = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [value] if isinstance(value, torch.fx.Node | torch.Tensor) else []
    return written


def _values(nodes: list, buffers: dict, holder: dict[str, str]) -> tuple[Value, ...]:
    """Return the graph's values. A tensor that is made empty and written by an operator becomes that operator's value."""

    def root(node):
        while buffers[node][1] and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    written = {root(x) for node in nodes for x in _written(node.target, node.args, node.kwargs) if x in buffers}
    leaving = {x for node in nodes if node.op == "output" for x in node.all_input_nodes}
    out: list[Value] = []

    def add(node, at, reads):
        val = node.meta.get("val")
        tensor = isinstance(val, torch.Tensor)
        buffer, view = buffers[node]
        out.append(
            Value(
                name=node.name,
                op=node.op if node.op == "placeholder" else str(at.target),
                dtype=str(val.dtype).removeprefix("torch.") if tensor else "",
                size=tuple(map(str, val.shape)) if tensor else (),
                reads=tuple(x.name for x in reads),
                buffer=buffer or holder.get(node.name),
                view=view,
                module=_module(at),
                frames=_frames(at.meta.get("stack_trace") or ""),
                output=node in leaving,
                opaque=_opaque(at.target),
            )
        )

    for node in nodes:
        if node.op == "output":
            continue
        targets = [root(x) for x in _written(node.target, node.args, node.kwargs) if x in buffers]
        for target in targets:
            add(target, node, [x for x in node.all_input_nodes if root(x) is not target])
        if not targets and node not in written:
            add(node, node, node.all_input_nodes)
    return tuple(out)


def _module(node) -> str:
    """Return the qualified name of the module that an operator was called in, e.g. ``layers.1.mlp.act_fn``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    name = stack[-1][0] if isinstance(stack[-1], tuple) else str(stack[-1])
    return (
        re.sub(r"\[['\"]?([\w.]+)['\"]?\]", r".\1", name.replace("L['self']", "")).replace("_modules.", "").strip(".")
    )


def _frames(trace: str) -> tuple[tuple[str, int, str], ...]:
    """Return the frames of a traced operator's stack outside torch; file names from the package on."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    named = [(re.split(r"(?:site|dist)-packages/", file)[-1], int(line), function) for file, line, function in found]
    return tuple(frame for frame in named if not frame[0].startswith("torch/"))


# ---- op by op


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
        written = _written(func, args, kwargs)
        reads = [self._name(x) for x in inputs if not any(x is w for w in written) or not _opaque(func)]
        frames = self._frames()
        for x in written or _tensors([result]):
            self._add(func, x, reads, inputs, frames, bool(written))
        return result

    def _add(self, func, x, reads, inputs, frames, written):
        number = len(self._values)
        view = not written and any(x is y or x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in inputs)
        name = f"{func._opname}_{number}"
        buffer = reads[0][1] if view and reads else f"buf{number}"
        if func._opname in ("empty", "empty_like", "new_empty", "empty_strided"):
            view = True  # nothing is stored yet: the operator that fills it makes another value
        dtype, size = str(x.dtype).removeprefix("torch."), tuple(map(str, x.shape))
        names = tuple(r[0] for r in reads)
        value = Value(name, str(func), dtype, size, names, buffer, view, self._stack[-1] if self._stack else "", frames)
        self._values.append(replace(value, opaque=_opaque(func)))
        if not view:
            from_ = tuple(sorted({r[1] for r in reads}))
            loop = Stored(number, _opaque(func), buffer, dtype, size, from_, (str(func),), False, name, (name,))
            self._stored.append(loop)
        self._alive.append(x)
        self._names[id(x)] = name, buffer
        if written:  # other tensors that look at the same memory see the new value
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
