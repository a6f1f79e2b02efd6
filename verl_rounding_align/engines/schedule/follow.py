"""One decoder layer in an engine's graphs: its values, and its rounding points followed from reader to value.

The terms (*value*, *stored*, *never stored*, *open*) are explained in ``site_map.py``; here is how they are decided.

Modules are found by the names that vLLM's models give them (``PARTS``). Operators are found by what they do: the residual sum
is the add of two tensors of one size in a norm's module, and ``normed`` is a product with ``rsqrt`` that another product reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .graph import Graph, Stored, Value

LOW = ("bfloat16", "float16")
OUTSIDE = "outside any region"

# the parts of one decoder layer, in data-flow order: (name, module after "layers.N.", site kind or OUTSIDE, how many layers
# later it lies)
PARTS = (
    ("qkv_proj", "self_attn.qkv_proj", OUTSIDE, 0),
    ("q_norm", "self_attn.q_norm", "attention", 0),
    ("k_norm", "self_attn.k_norm", "attention", 0),
    ("rotary_emb", "self_attn.rotary_emb", "attention", 0),
    ("attn", "self_attn.attn", OUTSIDE, 0),
    ("o_proj", "self_attn.o_proj", OUTSIDE, 0),
    ("post_attention_layernorm", "post_attention_layernorm", "attn_add", 0),
    ("gate_up_proj", "mlp.gate_up_proj", OUTSIDE, 0),
    ("act_fn", "mlp.act_fn", "mlp", 0),
    ("down_proj", "mlp.down_proj", OUTSIDE, 0),
    ("gate", "mlp.gate", OUTSIDE, 0),
    ("experts", "mlp.experts", "experts", 0),
    ("input_layernorm", "input_layernorm", "mlp_add", 1),
)
# parts before and after the layers
AROUND = (
    ("embed_tokens", "embed_tokens", OUTSIDE),
    ("norm", "norm", "final"),
    ("lm_head", "lm_head", OUTSIDE),
    ("lm_head", "logits_processor", OUTSIDE),  # the engine's module that calls the language-model head
)
# operators that hand on values without rounding them, except for a conversion to a narrower dtype
_PASS = re.compile(
    r"(convert_element_type|_to_copy|_unsafe_view|view|reshape|unsqueeze|squeeze|expand|permute|transpose|t|slice|split"
    r"|split_with_sizes|chunk|narrow|unbind|select|getitem|clone|copy_?|alias|detach|neg|cat|index|index_select|contiguous"
    r"|flatten|unflatten|to|lift_fresh)$"
)


@dataclass(frozen=True)
class Row:
    """One value of the middle layer.

    Args:
        part: the layer's part, of ``PARTS``.
        kind: its site kind, or ``outside any region``.
        name, op: of the value in the graph.
        dtype: what the source declares.
        stored: dtype of the buffer that holds it; None: never stored.
        rounds: whether a rounding that the source writes is performed; None where the schedule leaves it open.
        piece: number of the graph, where the engine's graph is split.
        crosses: whether the value leaves that piece.
        opaque: whether a kernel that is not Inductor's computes it.
        source: ``file:line function`` of the engine's code.
        caller: the same of the model's code that calls it.
    """

    part: str
    kind: str
    name: str
    op: str
    dtype: str
    stored: str | None
    rounds: bool | None
    piece: int
    crosses: bool
    opaque: bool
    source: str
    caller: str


@dataclass(frozen=True)
class PointRow:
    """One rounding point at one site kind.

    Args:
        kind, point: names of ``regions``.
        stored: whether its reader sees it rounded to the model dtype; None where that stays open.
        dtype: of the memory that it is read from; "" where it stays in registers.
        why: what the answer rests on.
        source: ``file:line function`` of the engine's code.
    """

    kind: str
    point: str
    stored: bool | None
    dtype: str
    why: str
    source: str


# ---- reading one graph


def op_name(value: Value) -> str:
    """Return an operator's short name: ``add`` for ``aten.add.Tensor``.

    >>> op_name(Value("x", "aten.add.Tensor", "", (), (), None)), op_name(Value("x", "<built-in function getitem>", "", (), (), None))
    ('add', 'getitem')
    """
    if "getitem" in value.op:
        return "getitem"
    parts = value.op.removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def is_low(dtype: str) -> bool:
    return dtype in LOW


class Reader:
    """Follows values through one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.values = {v.name: v for v in graph.values}
        self.buffers = {s.buffer: s for s in graph.stored}

        self.inlined = {s.buffer: self._inlined(s) for s in graph.stored}

    def _inlined(self, loop: Stored) -> set[str]:
        """Return the values that a loop computes: its own, and what that reads, back to what it reads from memory.

        Inductor's own list (``computes``) also names what lies behind the buffers that some loops read.
        """
        found, stack = set(), [loop.value] if loop.value in self.values else []
        while stack:
            value = self.values[stack.pop()]
            if value.name in found:
                continue
            found.add(value.name)
            if not value.opaque:
                stack += [v.name for v in self.reads(value) if v.buffer is None or v.buffer not in loop.reads]
        return found

    def loops(self, name: str) -> list[Stored]:
        """Return the loops that compute a value."""
        return [s for s in self.graph.stored if name in self.inlined[s.buffer]]

    def reads(self, value: Value) -> list[Value]:
        """Return the tensors of floats that an operator reads (and lists of tensors: what ``split`` returns)."""
        found = [self.values[name] for name in value.reads if name in self.values]
        return [v for v in found if "float" in v.dtype or not v.dtype and v.op != "placeholder"]

    def paths(self, start: Value, until: str = "") -> Iterator[tuple[Value, ...]]:
        """Yield the ways from one read of an operator back to what made it, through operators that do not round."""
        stack = [(start,)]
        while stack:
            path = stack.pop()
            last = path[-1]
            on = self.reads(last) if last.name != until and not last.opaque and _PASS.match(op_name(last)) else []
            if on:
                stack += [(*path, value) for value in on]
            else:
                yield path

    def rounded(self, reader: Value, path: Sequence[Value]) -> tuple[bool | None, str]:
        """Return whether ``reader`` reads the end of ``path`` rounded to the model dtype, and why.

        Args:
            reader: an operator.
            path: from what it reads back to the value in question.
        """
        if reader.opaque:
            v = path[0]
            held = self.buffers[v.buffer].dtype if v.buffer in self.buffers else v.dtype
            return is_low(held), f"a kernel that is not Inductor's reads it from {held} memory"
        answers = {self._along(loop, path) for loop in self.loops(reader.name)}
        if not answers:
            return None, f"no kernel computes {reader.name}"
        if len({a for a, _ in answers}) > 1:
            return None, "; ".join(sorted({why for _, why in answers}))
        return min(answers, key=lambda a: (len(a[1]), a[1]))

    def _along(self, loop: Stored, path: Sequence[Value]) -> tuple[bool | None, str]:
        unsure = ""
        for value in path:
            if self.graph.keeps_casts and is_low(value.dtype) and not value.view:
                return True, f"{value.name} is rounded in registers (emulate_precision_casts)"
            held = value.buffer
            if held is not None and held in loop.reads:
                source = self.buffers.get(held)
                if source is None:  # an input of the graph
                    if is_low(value.dtype):
                        return True, f"read from {value.dtype} memory: an input of the graph"
                    continue
                if is_low(source.dtype):
                    if value.name in loop.computes and value.name != loop.value:
                        unsure = f"{value.name} is read from {held}, and computed again, in kernel {loop.kernel}"
                    elif source.extern or source.kernel != loop.kernel:
                        return True, f"read from {source.dtype} memory ({held}, kernel {source.kernel})"
                    unsure = f"{held} is {source.dtype}, written and read inside kernel {loop.kernel}"
                loop = source
            elif value.name not in self.inlined[loop.buffer] and not value.view:
                return None, f"{value.name} is not in the kernel that reads it"
        if unsure:
            return None, unsure
        last = path[-1]
        stored = self.buffers[last.buffer].dtype if last.buffer in self.buffers else None
        return False, f"read from {stored} memory" if stored and not last.view else "in fp32 registers, never stored"


def source_of(value: Value) -> tuple[str, str]:
    """Return (``file:line function`` of the engine's own code, of the model's code that called it)."""
    skip = ("_custom_ops.py", "ir/op.py", "custom_op.py", "parameter.py", "fused_act_quant.py")
    own = [f for f in value.frames if not f[0].endswith(skip)]
    named = ["{}:{} {}".format(*f) for f in own]
    models = [n for n, f in zip(named, own, strict=True) if "/models/" in f[0]]
    return (named[-1] if named else "", models[-1] if models else "")


def layer_of(module: str) -> tuple[int | None, str]:
    """Return (layer number, module inside the layer) of a module's qualified name.

    >>> layer_of("model.layers.1.mlp.act_fn"), layer_of("norm")
    ((1, 'mlp.act_fn'), (None, 'norm'))
    """
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.(.*))?$", module)
    if not found:
        return None, module.rsplit(".", 1)[-1]
    # fused experts call their router themselves
    return int(found[1]), (found[2] or "").replace("mlp.experts.gate", "mlp.gate")


# ---- one layer of all pieces


class Layer:
    """The parts of one middle layer in the graphs of a model."""

    def __init__(self, graphs: Sequence[Graph], layer: int):
        self.readers = [Reader(g) for g in graphs]
        self.layer = layer

    def part(self, module: str, layer: int | None) -> list[tuple[int, Value]]:
        """Return (piece, value) of a module; submodules included, except where they are parts of their own."""
        own = {m for _, m, _, _ in PARTS}
        out = []
        for piece, reader in enumerate(self.readers):
            for value in reader.graph.values:
                at, inside = layer_of(value.module)
                if at == layer and (inside == module or inside.startswith(module + ".") and inside not in own):
                    out.append((piece, value))
        return out

    def rows(self) -> Iterator[Row]:
        """Yield the values of the layer, in data-flow order."""
        for part, module, kind, ahead in PARTS:
            yield from self._rows(part, kind, self.part(module, self.layer + ahead))

    def around(self) -> Iterator[Row]:
        """Yield the values before and after the layers."""
        for part, module, kind in AROUND:
            yield from self._rows(part, kind, self.part(module, None))

    def _rows(self, part: str, kind: str, values: list[tuple[int, Value]]) -> Iterator[Row]:
        for piece, value in values:
            if not value.view and value.dtype.startswith(("float", "bfloat")) and "0" not in value.size:
                yield self._row(part, kind, piece, value)

    def _row(self, part: str, kind: str, piece: int, value: Value) -> Row:
        reader = self.readers[piece]
        buffer = reader.buffers.get(value.buffer or "")
        rounds: bool | None = None
        if not is_low(value.dtype):
            rounds = False
        elif buffer is None:
            rounds = reader.graph.keeps_casts
        else:
            rounds = True if value.output or value.opaque else self._read_rounded(reader, value)
        source, caller = source_of(value)
        return Row(
            part=part,
            kind=kind,
            name=value.name,
            op=value.op.removeprefix("torch.ops."),
            dtype=value.dtype,
            stored=buffer.dtype if buffer else None,
            rounds=rounds,
            piece=piece,
            crosses=value.output,
            opaque=value.opaque,
            source=source,
            caller=caller,
        )

    def _read_rounded(self, reader: Reader, value: Value) -> bool | None:
        """Return whether every reader of a stored value sees it rounded."""
        found = set()
        for other in reader.graph.values:
            if value.name in other.reads:
                found.add(self._direct(reader, other, value))
        return found.pop() if len(found) == 1 else None if found else True

    def _direct(self, reader: Reader, other: Value, value: Value) -> bool | None:
        if other.opaque or other.view:
            return True
        loops = reader.loops(other.name)
        kernels = {loop.kernel for loop in loops if value.buffer in loop.reads}
        home = reader.buffers[value.buffer].kernel
        if loops and all(value.buffer in loop.reads and loop.kernel != home for loop in loops):
            return True
        return None if kernels or loops else True

    # ---- points

    def points(self) -> Iterator[PointRow]:
        yield from self._attention()
        yield from self._mlp()
        for kind, module, ahead, after in (
            ("attn_add", "post_attention_layernorm", 0, ("input_layernorm", 1)),
            ("mlp_add", "input_layernorm", 1, ("post_attention_layernorm", 1)),
        ):
            part = self.part(module, self.layer + ahead)
            total = self._total(part)
            yield from self._norm(kind, part, total, dict(sum="sum", normed="normed"))
            yield self._carry(kind, part, total, self.part(after[0], self.layer + after[1]))
        part = self.part("norm", None)
        if part:
            yield from self._norm("final", part, self._total(part), dict(sum="sum", normed="normed"))

    def _total(self, part: list[tuple[int, Value]]) -> tuple[int, Value] | None:
        """Return the residual sum of a norm's module: the add of two tensors of its own size."""
        for piece, value in part:
            sizes = [v.size for v in self.readers[piece].reads(value)]
            if op_name(value) in ("add", "add_") and sizes == [value.size] * 2:
                return piece, value
        return None

    def _point(self, kind: str, point: str, answers: Iterable[tuple[bool | None, str, Value, str]]) -> PointRow:
        """Return one row from the answers of all its readers: (stored, why, value, dtype)."""
        answers = list(answers)
        found = {a[0] for a in answers}
        stored = found.pop() if len(found) == 1 else None
        why = "; ".join(dict.fromkeys(a[1] for a in answers))
        source = source_of(answers[0][2])[0] if answers else ""
        dtype = answers[0][3] if answers else ""
        return PointRow(kind, point, stored, dtype if stored is not None else "", why, source)

    def _open(self, kind: str, point: str, part: list[tuple[int, Value]], what: str) -> PointRow:
        opaque = sorted({v.op.removeprefix("torch.ops.") for _, v in part if v.opaque})
        why = f"inside {', '.join(opaque)}, a kernel that shows nothing" if opaque else what
        return PointRow(kind, point, None, "", why, source_of(part[-1][1])[0] if part else "")

    def _answer(self, piece: int, reader: Value, path: Sequence[Value]) -> tuple[bool | None, str, Value, str]:
        graph = self.readers[piece]
        stored, why = graph.rounded(reader, path)
        named = next((v for v in path if is_low(v.dtype) and not v.view), path[-1])
        dtype = named.dtype if stored else "float32" if "float32 memory" in why else ""
        return stored, why, named, dtype

    def _norm(self, kind, part, total, names) -> Iterator[PointRow]:
        """Yield ``sum`` (if there is one) and ``normed`` of a norm's module."""
        if "sum" in names:
            if total is None:
                yield self._open(kind, names["sum"], part, "no add of two tensors of one size in this module")
            else:
                piece, value = total
                answers = [
                    self._answer(piece, other, path)
                    for _, other in part
                    if op_name(other) in ("pow", "mul") and other.size == value.size and not other.view
                    for read in self.readers[piece].reads(other)
                    for path in self.readers[piece].paths(read, value.name)
                    if path[-1] is value
                ]
                yield (
                    self._point(kind, names["sum"], answers)
                    if answers
                    else self._open(kind, names["sum"], part, "no reader of the sum in this module")
                )
        answers = []
        for piece, other in part:
            if op_name(other) not in ("mul", "mul_"):
                continue
            reader = self.readers[piece]
            ends = [(path, path[-1]) for read in reader.reads(other) for path in reader.paths(read)]
            for path, end in ends:
                inner = (
                    [p[-1] for read in reader.reads(end) for p in reader.paths(read)] if op_name(end) == "mul" else []
                )
                if end.module == other.module and any(op_name(v) == "rsqrt" for v in inner):
                    answers.append(self._answer(piece, other, path))
        yield (
            self._point(kind, names["normed"], answers)
            if answers
            else self._open(kind, names["normed"], part, "no product with the norm's weight in this module")
        )

    def _carry(self, kind, part, total, after) -> PointRow:
        """Return how the next add reads the residual sum."""
        nxt = self._total(after)
        if total is None:
            # one kernel adds, normalises and writes the stream: what leaves it is what the next add reads
            streams = [v for _, v in part if v.opaque and len(v.size) > 1]
            if len(streams) >= 2 and all(is_low(v.dtype) for v in streams):
                source = source_of(streams[-1])[0]
                return PointRow(kind, "carry", True, streams[-1].dtype, "written by an opaque add and norm", source)
            return self._open(kind, "carry", part, "no add of two tensors of one size in this module")
        if nxt is None:
            return self._open(kind, "carry", after, "no next add was found")
        (piece, value), (there, add) = total, nxt
        reader, goal = self.readers[there], value.name if there == piece else ""
        answers = []
        for read in reader.reads(add):
            for path in reader.paths(read, goal):
                end = path[-1]
                if there == piece and end is value:
                    answers.append(self._answer(there, add, path))
                elif there != piece and end.op == "placeholder" and end.size == value.size:
                    answers.append(self._crossing(piece, value, there, add, path))
                elif there == piece and end.opaque and self._hands_on(reader, end, value):
                    stored = True if is_low(end.dtype) else None
                    answers.append((stored, f"passes through {end.op} as a {end.dtype} tensor", end, end.dtype))
        if not answers:
            return PointRow(kind, "carry", None, "", "the next add does not read the sum", source_of(value)[0])
        return self._point(kind, "carry", answers)

    @staticmethod
    def _hands_on(reader: Reader, operator: Value, value: Value) -> bool:
        """Return whether an opaque operator reads ``value`` itself, converted at most."""
        return any(p[-1] is value for read in reader.reads(operator) for p in reader.paths(read, value.name))

    def _crossing(self, piece, value, there, add, path) -> tuple[bool | None, str, Value, str]:
        """Return how ``add`` reads a sum of an earlier piece: through an input of its own piece."""
        end = path[-1]
        leaving = [
            p
            for v in self.readers[piece].graph.values
            if v.output and v.size == end.size and v.dtype == end.dtype
            for p in self.readers[piece].paths(v, value.name)
            if p[-1] is value
        ]
        if not leaving:
            why = f"no {end.dtype} tensor made of the sum leaves piece {piece}"
            return None, why, value, ""
        named = leaving[0][0]
        if is_low(end.dtype):
            return True, f"crosses from piece {piece} to {there} as a {end.dtype} tensor", named, end.dtype
        stored, why = self.readers[there].rounded(add, path)
        if any(is_low(v.dtype) for p in leaving for v in p):
            return None, f"a narrower value lies before the {end.dtype} tensor between two pieces", named, ""
        return stored, f"crosses from piece {piece} to {there} as a {end.dtype} tensor; {why}", named, end.dtype

    def _mlp(self) -> Iterator[PointRow]:
        experts = self.part("mlp.experts", self.layer)
        part = self.part("mlp.act_fn", self.layer)
        if experts:
            yield self._open("experts", "act", [(p, v) for p, v in experts if v.opaque] or experts, "not followed")
        if not part and experts:
            return
        products = [(p, v) for p, v in part if op_name(v) == "mul" and len(self.readers[p].reads(v)) == 2]
        answers = []
        if products:
            piece, out = products[-1]
            reader = self.readers[piece]
            for read in reader.reads(out):
                for path in reader.paths(read):
                    if path[-1].module == out.module and not path[-1].opaque and path[-1] is not out:
                        answers.append(self._answer(piece, out, path))
        yield (
            self._point("mlp", "act", answers)
            if answers
            else self._open("mlp", "act", part, "no product with the up projection was found")
        )

    def _attention(self) -> Iterator[PointRow]:
        rotary = self.part("self_attn.rotary_emb", self.layer)
        norms = {m: self.part(f"self_attn.{m}", self.layer) for m in ("q_norm", "k_norm")}
        scaled, cosines, products = [], [], []
        opaque = [(p, v) for p, v in rotary if v.opaque]
        for piece, value in rotary:
            reader = self.readers[piece]
            if op_name(value) == "mul" and not value.view:
                for read in reader.reads(value):
                    for path in reader.paths(read):
                        end = layer_of(path[-1].module)
                        from_layer = end[0] == self.layer and end[1] != "self_attn.rotary_emb"
                        (scaled if from_layer else cosines).append(self._answer(piece, value, path))
            if op_name(value) in ("add", "sub", "add_", "sub_"):
                for read in reader.reads(value):
                    for path in reader.paths(read):
                        if op_name(path[-1]) == "mul":
                            products.append(self._answer(piece, value, path))
        if any(norms.values()):
            rows = [r for part in norms.values() for r in self._norm("attention", part, None, dict(normed="qk_normed"))]
            stored = {r.stored for r in rows}
            yield replace(rows[0], stored=stored.pop() if len(stored) == 1 else None)
            if opaque:
                scaled = [
                    (True, "read from memory by an opaque kernel", v, v.dtype)
                    for part in norms.values()
                    for _, v in part[-1:]
                    if is_low(v.dtype)
                ]
            yield (
                self._point("attention", "qk_norm", scaled)
                if scaled
                else self._open("attention", "qk_norm", rotary, "no product with the cosines was found")
            )
        if opaque and not cosines:
            cosines = [
                (True, "an opaque kernel reads a table in memory", v, v.dtype)
                for v in self._tables(opaque)
                if is_low(v.dtype)
            ]
        yield (
            self._point("attention", "cos_sin", cosines)
            if cosines
            else self._open("attention", "cos_sin", rotary, "no product with the cosines was found")
        )
        yield (
            self._point("attention", "product", products)
            if products
            else self._open("attention", "product", rotary, "no sum of two products was found")
        )

    def _tables(self, opaque: list[tuple[int, Value]]) -> Iterator[Value]:
        """Yield the inputs of floats that an opaque rotary kernel reads: its table of cosines and sines."""
        for piece, value in opaque:
            for read in self.readers[piece].reads(value):
                if read.op == "placeholder":
                    yield replace(read, frames=value.frames)
