"""The site map: where an engine stores values in one middle decoder layer, beside the trainer, read from its schedule.

A *value* is the result of one operator. It is

- *stored* in a dtype if a kernel writes it to memory. Whoever reads it from there reads it rounded to that dtype.
- *never stored* if it only exists in the registers of the kernel that reads it. Inductor computes registers in fp32. A
  conversion to bf16 that the engine's source writes is not performed there, unless Inductor's flag
  ``emulate_precision_casts`` is on.

A rounding point (``regions``) is a value and its reader: ``carry`` is the residual sum as the *next add* reads it. The
same sum can be stored for one reader and recomputed for another, so that a point is decided for each reader. The path from
the reader back to the value is followed through operators that do not round (conversions, views), from kernel to kernel.

- The point is stored if the path crosses a bf16 buffer that one kernel writes and another reads, or a bf16 input or output
  of a graph. Where the engine splits its graph, that is a tensor between two pieces.
- It is not stored if no such place lies on the path.
- It is *open* (``None``) if a bf16 buffer is written and read inside one kernel, since code generation may hand on the register
  or reload memory. A kernel that is not Inductor's leaves it open too.

The map cannot show what happens inside such kernels (attention, matrix products, fused experts, custom operators), in which
order sums are taken, or whether a dtype is enough. For the regions the probe can: it compares values bit by bit.

An eager run is read in the same form: every operator is a kernel, and stores its result.

``follow.py`` finds a layer and its points. This file puts the engine beside the trainer and the presets. Both are pure: they
read :class:`~.graph.Graph`, and import neither torch's compiler nor an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ..presets import Preset
from .follow import AROUND, OUTSIDE, PARTS, Layer, PointRow, Row, is_low, layer_of, op_name
from .graph import Graph

ADDS = ("attn_add", "mlp_add")
_SAME_WORK = {"sub": "add", "div": "mul", "silu": "mul", "sigmoid": "mul"}  # operators by the work that they round


@dataclass(frozen=True)
class Difference:
    """One place where engine and trainer differ.

    Args:
        part, kind: see :class:`Row`.
        point: the rounding point; "" outside the known ones.
        rounding: True if one side rounds where the other does not; False if the kernels differ and both store the same
            dtype; None inside a kernel that shows nothing.
        engine, trainer: what each side does.
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
        engine, version, mode, device, torch: what ran.
        split: whether the graph was split at attention.
        model: path or name.
        layer, layers: the layer that is shown, and how many were built.
        rows, points, differences: see their classes.
        carry: ``attn_add`` and ``mlp_add`` -> whether the residual stream is stored before the next add reads it.
        trainer_rows, trainer_points: the trainer's.
        notes: what a reader must know: how the graph was made, and what was not seen.
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
    trainer_rows: tuple[Row, ...] = ()
    trainer_points: tuple[PointRow, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        split = ", graph split at attention" if self.split else ""
        return f"{self.engine} {self.version} {self.device}, {self.mode}{split}, torch {self.torch}"

    @classmethod
    def from_dict(cls, data: dict) -> SiteMap:
        """Return the map that :func:`to_json` wrote."""
        kinds = dict(rows=Row, points=PointRow, differences=Difference, trainer_rows=Row, trainer_points=PointRow)
        lists = {key: tuple(kind(**row) for row in data[key]) for key, kind in kinds.items()}
        return cls(**{**data, **lists, "notes": tuple(data["notes"])})


# ---- engine beside trainer


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
        if part == "experts":
            out += _routing(
                [r for r in rows if r.part in ("gate", "experts")], [r for r in trainer if r.part == "gate"]
            )
    return out


def _routing(mine: list[Row], theirs: list[Row]) -> Iterator[Difference]:
    """Yield how the weights of experts are rounded, where the two sides do it differently."""
    exact = re.compile(r"(topk|getitem|gather|scatter|index|cat|clone)")

    def rounds(rows):
        kept = [r for r in rows if r.rounds and is_low(r.dtype) and not r.opaque and not exact.match(_short(r.op))]
        return [r for r in kept if _work(r) != "matrix product"]

    ours, other = rounds(mine), rounds(theirs)
    if [r.op for r in ours] != [r.op for r in other]:
        text = ["routing: " + ("; ".join(f"{_short(r.op)} rounds to {r.dtype} ({r.source})" for r in rows) or "no rounding")
                for rows in (ours, other)]  # fmt: skip
        yield Difference("experts", OUTSIDE, "", True, *text, (ours or mine)[0].source)


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
            not same,
            f"{len(ours)} {_names(ours)}, stores {_dtypes(ours)}",
            f"{len(other)} {_names(other)}, stores {_dtypes(other)}"
            + (f" ({same}; the order of sums may differ)" if same else ""),
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
        return {_work(r): r for r in rows if r.rounds and is_low(r.dtype) and not passes.match(r.op.split(".")[1])}

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
                done = adds[number] = adds.get(number, 0) + (op_name(value) == "add")
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
    found = Layer(pieces, layer)
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
        trainer_rows=theirs,
        trainer_points=trains,
        **about,
    )


def refute(found: SiteMap, preset: Preset) -> list[str]:
    """Return one line for each point that contradicts a preset; a point that is open cannot."""
    lines = []
    for p in found.points:
        claimed = p.point in preset.at(p.kind)
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
    points = table("Rounding points", "site kind", "point", "stored", "read from", "why", "source")
    for p in found.points:
        points.add_row(p.kind, p.point, _yes(p.stored), p.dtype or "registers", p.why, p.source)
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
    parts = ["aten", "getitem"] if "getitem" in op else op.split(".")
    return parts[1] if parts[0] in ("aten", "prims") else ".".join(parts[:2])


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "open"}[value]
