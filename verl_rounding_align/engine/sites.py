"""Where an engine's graph stores values, from its schedule: the site map of one middle decoder layer, beside the trainer.

A *value* is the result of one operator. It is

- *stored* in a dtype, if a kernel writes it to memory: whoever reads it from there reads it rounded to that dtype;
- *never stored*, if it only exists in the registers of the kernel that reads it. Inductor computes registers in fp32,
  so that a conversion to bf16 which the engine's source writes is not performed there, unless Inductor's flag
  ``emulate_precision_casts`` is on: then it is performed in registers.

A rounding point (``regions``) is a value and its reader: ``carry`` is the residual sum as the *next add* reads it. The
same sum can be stored for one reader and recomputed for another, so a point is decided per reader: the path from the
reader back to the value is followed through operators that do not round (conversions, views), from kernel to kernel.
The point is stored if the path crosses a bf16 buffer that one kernel writes and another reads, or a bf16 input or
output of a graph (where the engine splits its graph, that is a tensor between two pieces); it is not stored if no such
place lies on the path. A bf16 buffer that is written and read inside one kernel leaves it open (``None``): code
generation may hand on the register or reload memory. So does a kernel that is not Inductor's.

What this cannot show: anything inside such kernels (attention, matrix products, fused experts, custom operators); the
order of sums; whether a dtype is enough. The probe (``probe.py``) compares values bit by bit and can, for the regions.

An eager run is read in the same form: every operator is a kernel, and stores.

This file is pure: it reads :class:`~.inductor.Graph`, and imports neither torch's compiler nor an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ..presets import Preset
from .inductor import Graph, Stored, Value

LOW = ("bfloat16", "float16")
OUTSIDE = "outside any region"
ADDS = ("attn_add", "mlp_add")

# a part of one decoder layer, in data-flow order: (name, module after "layers.N.", site kind or OUTSIDE, N relative)
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
_SAME_WORK = {"sub": "add", "div": "mul", "silu": "mul", "sigmoid": "mul"}  # operators by the work that they round


@dataclass(frozen=True)
class Row:
    """One value of the middle layer.

    Args:
        part, kind: the layer's part (``PARTS``), its site kind or ``outside any region``.
        name, op: in the graph.
        dtype: what the source declares.
        stored: dtype of the buffer that holds it; None: never stored.
        rounds: whether a rounding that the source writes is performed (None: the schedule leaves it open).
        piece: number of the graph, where the engine's graph is split; ``crosses``: whether the value leaves it.
        opaque: computed by a kernel that is not Inductor's.
        source: ``file:line function`` of the engine's code; ``caller``: where the model calls it.
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
    """One rounding point at one site kind: ``stored`` as the next reader sees it, None where it stays open, and why."""

    kind: str
    point: str
    stored: bool | None
    dtype: str
    why: str
    source: str


@dataclass(frozen=True)
class Difference:
    """One place where engine and trainer differ.

    Args:
        part, kind: see :class:`Row`; ``point``: the rounding point, "" outside the known ones.
        rounding: True: one side rounds where the other does not; False: another kernel, both store the same dtype;
            None: inside a kernel that shows nothing.
        engine, trainer: what each does.
        source: ``file:line function`` of the engine's code.
    """

    part: str
    kind: str
    point: str
    rounding: bool | None
    engine: str
    trainer: str
    source: str


@dataclass(frozen=True)
class SiteMap:
    """Where one engine stores values in one middle decoder layer.

    Args:
        engine, version, mode, device, split, torch: what ran; ``split``: the graph was split at attention.
        model: path or name; ``layer``: the layer shown, of ``layers`` built.
        rows, points, differences: see the classes.
        carry: ``attn_add`` and ``mlp_add`` -> whether the residual stream is stored before the next add reads it.
        notes: what a reader must know: how the graph was made, what was not seen.
    """

    engine: str
    version: str
    mode: str
    device: str
    split: bool
    torch: str
    model: str
    layer: int
    layers: int
    rows: tuple[Row, ...]
    points: tuple[PointRow, ...]
    differences: tuple[Difference, ...]
    carry: dict[str, bool | None]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        split = ", graph split at attention" if self.split else ""
        return f"{self.engine} {self.version} {self.device}, {self.mode}{split}, torch {self.torch}"

    @classmethod
    def from_dict(cls, data: dict) -> SiteMap:
        """Return the map that :func:`to_json` wrote."""
        kinds = dict(rows=Row, points=PointRow, differences=Difference)
        lists = {key: tuple(kind(**row) for row in data[key]) for key, kind in kinds.items()}
        return cls(**{**data, **lists, "notes": tuple(data["notes"])})


# ---- reading one graph


def _op(value: Value) -> str:
    """Return an operator's short name: ``add`` for ``aten.add.Tensor``.

    >>> _op(Value("x", "aten.add.Tensor", "", (), (), None)), _op(Value("x", "<built-in function getitem>", "", (), (), None))
    ('add', 'getitem')
    """
    if "getitem" in value.op:
        return "getitem"
    parts = value.op.removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _low(dtype: str) -> bool:
    return dtype in LOW


class _Reader:
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
            on = self.reads(last) if last.name != until and not last.opaque and _PASS.match(_op(last)) else []
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
            return _low(held), f"a kernel that is not Inductor's reads it from {held} memory"
        answers = {self._along(loop, path) for loop in self.loops(reader.name)}
        if not answers:
            return None, f"no kernel computes {reader.name}"
        if len({a for a, _ in answers}) > 1:
            return None, "; ".join(sorted({why for _, why in answers}))
        return min(answers, key=lambda a: (len(a[1]), a[1]))

    def _along(self, loop: Stored, path: Sequence[Value]) -> tuple[bool | None, str]:
        unsure = ""
        for value in path:
            if self.graph.keeps_casts and _low(value.dtype) and not value.view:
                return True, f"{value.name} is rounded in registers (emulate_precision_casts)"
            held = value.buffer
            if held is not None and held in loop.reads:
                source = self.buffers.get(held)
                if source is None:  # an input of the graph
                    if _low(value.dtype):
                        return True, f"read from {value.dtype} memory: an input of the graph"
                    continue
                if _low(source.dtype):
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


def _source(value: Value) -> tuple[str, str]:
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
    return (int(found[1]), found[2] or "") if found else (None, module.rsplit(".", 1)[-1])


# ---- one layer of all pieces


class _Layer:
    """The parts of one middle layer in the graphs of a model."""

    def __init__(self, graphs: Sequence[Graph], layer: int):
        self.readers = [_Reader(g) for g in graphs]
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
        if not _low(value.dtype):
            rounds = False
        elif buffer is None:
            rounds = reader.graph.keeps_casts
        else:
            rounds = True if value.output or value.opaque else self._read_rounded(reader, value)
        source, caller = _source(value)
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

    def _read_rounded(self, reader: _Reader, value: Value) -> bool | None:
        """Return whether every reader of a stored value sees it rounded."""
        found = set()
        for other in reader.graph.values:
            if value.name in other.reads:
                found.add(self._direct(reader, other, value))
        return found.pop() if len(found) == 1 else None if found else True

    def _direct(self, reader: _Reader, other: Value, value: Value) -> bool | None:
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
            if _op(value) in ("add", "add_") and sizes == [value.size] * 2:
                return piece, value
        return None

    def _point(self, kind: str, point: str, answers: Iterable[tuple[bool | None, str, Value, str]]) -> PointRow:
        """Return one row from the answers of all its readers: (stored, why, value, dtype)."""
        answers = list(answers)
        found = {a[0] for a in answers}
        stored = found.pop() if len(found) == 1 else None
        why = "; ".join(dict.fromkeys(a[1] for a in answers))
        source = _source(answers[0][2])[0] if answers else ""
        dtype = answers[0][3] if answers else ""
        return PointRow(kind, point, stored, dtype if stored is not None else "", why, source)

    def _open(self, kind: str, point: str, part: list[tuple[int, Value]], what: str) -> PointRow:
        opaque = sorted({v.op.removeprefix("torch.ops.") for _, v in part if v.opaque})
        why = f"inside {', '.join(opaque)}, a kernel that shows nothing" if opaque else what
        return PointRow(kind, point, None, "", why, _source(part[-1][1])[0] if part else "")

    def _answer(self, piece: int, reader: Value, path: Sequence[Value]) -> tuple[bool | None, str, Value, str]:
        graph = self.readers[piece]
        stored, why = graph.rounded(reader, path)
        named = next((v for v in path if _low(v.dtype) and not v.view), path[-1])
        dtype = named.dtype if stored else "float32"
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
                    if _op(other) in ("pow", "mul") and other.size == value.size and not other.view
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
            if _op(other) not in ("mul", "mul_"):
                continue
            reader = self.readers[piece]
            ends = [(path, path[-1]) for read in reader.reads(other) for path in reader.paths(read)]
            for path, end in ends:
                inner = [p[-1] for read in reader.reads(end) for p in reader.paths(read)] if _op(end) == "mul" else []
                if end.module == other.module and any(_op(v) == "rsqrt" for v in inner):
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
            if len(streams) >= 2 and all(_low(v.dtype) for v in streams):
                source = _source(streams[-1])[0]
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
                    stored = True if _low(end.dtype) else None
                    answers.append((stored, f"passes through {end.op} as a {end.dtype} tensor", end, end.dtype))
        if not answers:
            return PointRow(kind, "carry", None, "", "the next add does not read the sum", _source(value)[0])
        return self._point(kind, "carry", answers)

    @staticmethod
    def _hands_on(reader: _Reader, operator: Value, value: Value) -> bool:
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
        if _low(end.dtype):
            return True, f"crosses from piece {piece} to {there} as a {end.dtype} tensor", named, end.dtype
        stored, why = self.readers[there].rounded(add, path)
        if any(_low(v.dtype) for p in leaving for v in p):
            return None, f"a narrower value lies before the {end.dtype} tensor between two pieces", named, ""
        return stored, f"crosses from piece {piece} to {there} as a {end.dtype} tensor; {why}", named, end.dtype

    def _mlp(self) -> Iterator[PointRow]:
        experts = self.part("mlp.experts", self.layer)
        part = self.part("mlp.act_fn", self.layer)
        if experts:
            yield self._open("experts", "act", [(p, v) for p, v in experts if v.opaque] or experts, "not followed")
        if not part and experts:
            return
        products = [(p, v) for p, v in part if _op(v) == "mul" and len(self.readers[p].reads(v)) == 2]
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
            if _op(value) == "mul" and not value.view:
                for read in reader.reads(value):
                    for path in reader.paths(read):
                        end = layer_of(path[-1].module)
                        from_layer = end[0] == self.layer and end[1] != "self_attn.rotary_emb"
                        (scaled if from_layer else cosines).append(self._answer(piece, value, path))
            if _op(value) in ("add", "sub", "add_", "sub_"):
                for read in reader.reads(value):
                    for path in reader.paths(read):
                        if _op(path[-1]) == "mul":
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
                    if _low(v.dtype)
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
                if _low(v.dtype)
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


def _work(row: Row) -> str:
    """Return what an operator does, so that two graphs can be compared: a matrix product, an add, a multiplication."""
    short = row.op.split(".")[1] if "." in row.op else row.op
    if re.search(r"mm|linear|gemm", short) and "moe" not in short:
        return "matrix product"
    return _SAME_WORK.get(short.rstrip("_"), short.rstrip("_"))


def _text(stored: bool | None, point: PointRow | None) -> str:
    if point is None:
        return "not there"
    return {True: "stored in " + (point.dtype or "the model dtype"), False: "not stored", None: "open"}[stored]


def compare(
    rows: Sequence[Row], points: Sequence[PointRow], trainer: Sequence[Row], trains: Sequence[PointRow]
) -> list[Difference]:
    """Return every place where an engine's layer and the trainer's differ, in data-flow order.

    Known rounding points are compared point by point. What is left in each part of the layer is compared by the work
    that is rounded there (matrix products, adds, multiplications, conversions), so that a rounding on one side only is
    found outside the known points, too; kernels that show nothing are listed as such.
    """
    theirs = {(p.kind, p.point): p for p in trains}
    out: list[Difference] = []
    before, *after = dict.fromkeys((part, kind) for part, _, kind in AROUND)
    for part, kind in (before, *[(part, kind) for part, _, kind, _ in PARTS], *after):
        for point in points if part in ("rotary_emb", "act_fn", "experts", "norm") or kind in ADDS else ():
            other = theirs.get((point.kind, point.point))
            if point.kind != kind or other is None or point.stored == other.stored:
                continue
            both = point.stored is not None and other.stored is not None
            out.append(
                Difference(
                    part,
                    kind,
                    point.point,
                    True if both else None,
                    f"{_text(point.stored, point)}: {point.why}",
                    f"{_text(other.stored, other)} ({other.source})",
                    point.source,
                )
            )
        out += _outside(part, kind, [r for r in rows if r.part == part], [r for r in trainer if r.part == part])
    return out


def _outside(part: str, kind: str, mine: list[Row], theirs: list[Row]) -> Iterator[Difference]:
    """Yield the differences of one part of the layer that are no rounding points."""

    def products(rows):
        return [r for r in rows if _work(r) == "matrix product"]

    ours, other = products(mine), products(theirs)
    if ours and other and ([r.op for r in ours] != [r.op for r in other]):
        dtypes = {r.stored for r in (*ours, *other)}
        same = f"both store {dtypes.pop()}" if len(dtypes) == 1 else ""
        yield Difference(
            part,
            OUTSIDE,
            "",
            False if same else True,
            f"{len(ours)} {_names(ours)}, stores {_dtypes(ours)}",
            f"{len(other)} {_names(other)}, stores {_dtypes(other)}"
            + (f" ({same}: no rounding differs)" if same else ""),
            ours[0].source,
        )
    if theirs and not mine:
        text = "no value under this module's name in the graph: not seen"
        yield Difference(part, OUTSIDE, "", None, text, f"{_names(theirs)}, stores {_dtypes(theirs)}", "")
        return
    if part == "attn" and not any(r.opaque for r in mine):
        text, source = (
            "runs between two pieces of the graph; nothing inside is visible",
            mine[-1].source if mine else "",
        )
        yield Difference(part, OUTSIDE, "", None, text, f"{_names(theirs)}, stores {_dtypes(theirs)}", source)
        return
    opaque = [r for r in mine if r.opaque and _work(r) != "matrix product"]
    if opaque:
        yield Difference(
            part,
            kind if kind == "experts" else OUTSIDE,
            "",
            None,
            f"{_names(opaque)}, stores {_dtypes(opaque)}; nothing inside is visible",
            f"{_names(theirs) or 'nothing'}, stores {_dtypes(theirs)}" if theirs else "nothing here",
            opaque[0].source,
        )
        return

    def arithmetic(rows):
        passes = re.compile(r"(cat|neg|clone|copy_?|index|embedding|empty|convert_element_type|_to_copy|to|getitem)$")
        return {_work(r): r for r in rows if r.rounds and _low(r.dtype) and not passes.match(r.op.split(".")[1])}

    a, b = arithmetic(mine), arithmetic(theirs)
    for work in [w for w in a if w not in b and w not in _POINT_WORK.get(kind, ())]:
        yield Difference(
            part,
            OUTSIDE,
            "",
            True,
            f"{_short(a[work].op)} rounds to {a[work].dtype}",
            "no such rounding",
            a[work].source,
        )
    for work in [w for w in b if w not in a and w not in _POINT_WORK.get(kind, ())]:
        unrounded = next((r.source for r in mine if _work(r) == work), mine[-1].source if mine else "")
        text = f"{_short(b[work].op)} rounds to {b[work].dtype} ({b[work].source})"
        yield Difference(part, OUTSIDE, "", True, "no such rounding", text, unrounded)


# work whose rounding is a point of the region, and is compared there
_POINT_WORK = {"attention": ("mul",), "attn_add": ("add",), "mlp_add": ("add",), "final": ("add",)}


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(_short(r.op) for r in rows))


def _dtypes(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(r.stored or "nothing" for r in rows))


# ---- the trainer's graph, with the engine's names


def as_engine(graph: Graph, layers: int) -> Graph:
    """Return a Hugging Face graph with the names that engines give to the modules: ``qkv_proj`` for ``q_proj``, ...

    A decoder layer's own two adds are named after the norm that reads them, as engines add inside their norm.
    """
    adds: dict[int, int] = {}
    out = []
    for value in graph.values:
        number, inside = layer_of(value.module)
        module = value.module
        if number is not None:
            functions = {f[2] for f in value.frames}
            if inside == "":
                done = adds[number] = adds.get(number, 0) + (_op(value) == "add")
                after = f"layers.{number + 1}.input_layernorm" if number + 1 < layers else "norm"
                module = f"layers.{number}.post_attention_layernorm" if done == 1 else after
            elif inside == "self_attn":
                rotary = functions & {"apply_rotary_pos_emb", "rotate_half"}
                module = f"layers.{number}.self_attn.{'rotary_emb' if rotary else 'attn'}"
            else:
                packed = {
                    "self_attn.[qkv]_proj": "self_attn.qkv_proj",
                    "mlp.(gate|up)_proj": "mlp.gate_up_proj",
                    "mlp": "mlp.act_fn",
                }
                name = next((new for old, new in packed.items() if re.fullmatch(old, inside)), inside)
                module = f"layers.{number}.{name}"
        out.append(replace(value, module=module))
    return replace(graph, values=tuple(out))


# ---- the map


def middle(layers: int) -> int:
    """Return the layer that is shown: it has a layer after it, whose adds read its stream.

    Raises:
        ValueError: fewer than two layers.

    >>> middle(3), middle(2)
    (1, 0)
    """
    if layers < 2:
        raise ValueError(f"layers={layers}: the next add lies in the next layer; give at least 2")
    return (layers - 1) // 2


def read(graphs: Sequence[Graph], layer: int) -> tuple[tuple[Row, ...], tuple[PointRow, ...], tuple[Row, ...]]:
    """Return the rows and points of one decoder layer, and the rows around the layers.

    Args:
        graphs: the compiled graphs (several where the engine splits), in the order in which they run.
        layer: its number.

    Raises:
        ValueError: no graph holds the layer.
    """
    parts = {module for _, module, _ in AROUND}
    pieces = [g for g in graphs if any(n is not None or m in parts for n, m in (layer_of(v.module) for v in g.values))]
    found = _Layer(pieces, layer)
    rows = tuple(found.rows())
    if not rows:
        modules = sorted({v.module for g in graphs for v in g.values if v.module})
        raise ValueError(f"layer={layer}: no value of layers.{layer} in the graphs; modules seen: {modules[:5]}")
    return rows, tuple(found.points()), tuple(found.around())


def site_map(graphs: Sequence[Graph], trainer: Sequence[Graph], layers: int, **about) -> SiteMap:
    """Return the site map of the middle layer.

    Args:
        graphs: the engine's graphs; ``trainer``: the trainer's (an operator trace).
        layers: decoder layers built.
        about: engine, version, mode, device, split, torch, model, notes; see :class:`SiteMap`.
    """
    layer = middle(layers)
    rows, points, around = read(graphs, layer)
    theirs, trains, beside = read(trainer, layer)
    return SiteMap(
        layer=layer,
        layers=layers,
        rows=rows,
        points=points,
        differences=tuple(compare((*rows, *around), points, (*theirs, *beside), trains)),
        carry={p.kind: p.stored for p in points if p.point == "carry"},
        **about,
    )


def refute(found: SiteMap, preset: Preset) -> list[str]:
    """Return one line for each point that contradicts a preset; a point that is open cannot."""
    lines = []
    for p in found.points:
        claimed = p.point in preset.points[p.kind]
        if p.stored is not None and p.stored != claimed:
            says, does = ("stored", "not stored") if claimed else ("not stored", "stored")
            lines.append(
                f"{preset.name}: {p.kind}: claims {p.point} {says}, {found} shows it {does} ({p.why}; {p.source})"
            )
    return lines


def exit_code(maps: Sequence[SiteMap], refuted: Sequence[str] = ()) -> int:
    """Return 0 if there are maps, each decides ``carry`` at both adds, and nothing contradicts a preset; else 1."""
    decided = all(m.carry.get(add) is not None for m in maps for add in ADDS)
    return 0 if maps and decided and not refuted else 1


def to_json(maps: Iterable[SiteMap], **header) -> str:
    """Return site maps as JSON with a header (versions)."""
    return json.dumps({**header, "maps": [asdict(m) for m in maps]}, indent=1)


def from_json(text: str) -> list[SiteMap]:
    """Return the site maps that :func:`to_json` wrote."""
    return [SiteMap.from_dict(data) for data in json.loads(text)["maps"]]


# ---- for a terminal


def render(found: SiteMap) -> list:
    """Return one map as ``rich`` tables: values in data-flow order, points, differences, and a line on ``carry``."""
    from rich.table import Table

    def table(title, *columns):
        out = Table(title=title, title_justify="left")
        for column in columns:
            out.add_column(column, overflow="fold")
        return out

    where = table(f"{found}: layer {found.layer} of {found.layers}, in data-flow order",
                  "part", "site kind", "operator", "source writes", "stored", "rounds", *(["piece"] if found.split else []),
                  "source")  # fmt: skip
    for r in found.rows:
        stored = (r.stored or "never stored") + (", leaves the piece" if found.split and r.crosses else "")
        piece = [str(r.piece)] if found.split else []
        where.add_row(r.part, r.kind, _short(r.op), r.dtype, stored, _yes(r.rounds), *piece, r.source)
    points = table("Rounding points", "site kind", "point", "stored", "dtype", "why", "source")
    for p in found.points:
        points.add_row(p.kind, p.point, _yes(p.stored), p.dtype or "-", p.why, p.source)
    differences = table(
        "Where engine and trainer (Hugging Face, eager) differ",
        "part",
        "site kind",
        "point",
        "rounding",
        "engine",
        "trainer",
        "source",
    )
    for d in found.differences:
        word = {True: "differs", False: "same", None: "not visible"}[d.rounding]
        differences.add_row(d.part, d.kind, d.point or "-", word, d.engine, d.trainer, d.source)
    carry = ", ".join(f"{add} {_yes(found.carry.get(add))}" for add in ADDS)
    return [where, points, differences, f"carry stored: {carry}", *found.notes]


def _short(op: str) -> str:
    """Return an operator's name for a table: ``add`` for ``aten.add.Tensor``, ``_C.onednn_mm`` for a custom one."""
    parts = op.split(".")
    return parts[1] if parts[0] in ("aten", "prims") else ".".join(parts[:2])


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "open"}[value]
