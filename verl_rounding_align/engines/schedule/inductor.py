"""What Inductor stores when it compiles a graph: its schedule after fusion. The only internal hooks into torch's compiler.

Inductor lowers a graph of operators to kernels. Most values are fused into the kernel of their reader and live in
registers; some are buffers, which a kernel writes to memory in the buffer's dtype. Two hooks show which:

- ``torch._inductor.config._post_fusion_custom_pass`` receives the fused kernels with the buffers that each one writes;
- ``GraphLowering.run_node`` returns the Inductor object that stands for an operator. Once the graph is lowered, that object
  is a buffer if the value was materialised, a view of one, or a formula if it was fused away.

Both are internal. They were read and run on the releases ``RELEASES``, and other releases are refused.

Needs torch alone, and imports no engine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch
from packaging.specifiers import SpecifierSet

from ... import releases
from .graph import Graph, Stored, Value, opaque, written

# torch releases whose scheduler was read and run: vLLM's models on 2.13, pieces of one (gpu_check) on both
RELEASES, TESTED = SpecifierSet(">=2.11,!=2.12.*,<2.14"), "2.11.0, 2.13.0"
_DONE = "the schedule is read; no kernel needs to be built"


def check(supported: SpecifierSet = RELEASES) -> None:
    """Refuse a torch release on which the hooks were not tested.

    Args:
        supported: releases to accept.

    Raises:
        UntestedRelease: a ValueError that names the releases that were.
    """
    releases.check("torch", torch.__version__, supported, "reading Inductor's schedule", TESTED)


@contextlib.contextmanager
def record(
    supported: SpecifierSet = RELEASES, stop: Callable[[Graph], bool] = lambda graph: False
) -> Iterator[list[Graph]]:
    """Within the context, append a :class:`Graph` to the list that is returned for each graph that Inductor compiles.

    Args:
        supported: torch releases to accept.
        stop: for which graph to raise once its schedule is read, before its kernels are built (see :func:`stopped`).

    Raises:
        UntestedRelease: another torch release.
    """
    check(supported)
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


def schedule(function: Callable, args, supported: SpecifierSet = RELEASES) -> tuple[Stored, ...]:
    """Return what Inductor stores when it compiles ``function``; no kernel is built.

    Raises:
        UntestedRelease: another torch release.
    """
    with record(supported, stop=lambda graph: True) as graphs, torch.no_grad():
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
                    inside = [o for o in origins if o in order and not opaque(o.target) and buffers[o][0] is None]
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


def _values(nodes: list, buffers: dict, holder: dict[str, str]) -> tuple[Value, ...]:
    """Return the graph's values. A tensor that is made empty and written by an operator becomes that operator's value."""

    def root(node):
        while buffers[node][1] and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    filled = {root(x) for node in nodes for x in written(node.target, node.args, node.kwargs) if x in buffers}
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
                opaque=opaque(at.target),
            )
        )

    for node in nodes:
        if node.op == "output":
            continue
        targets = [root(x) for x in written(node.target, node.args, node.kwargs) if x in buffers]
        for target in targets:
            add(target, node, [x for x in node.all_input_nodes if root(x) is not target])
        if not targets and node not in filled:
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
