"""Which rounding points does an engine store? Its own layers against every subset of points, bit for bit.

The probe runs an engine's layer code on drawn inputs and our region, with each subset of its points stored, on the same
inputs. A subset *matches* if all output elements of all cases are equal bit for bit. Candidates run as the engine runs:
compiled (with interior rounding points kept) for a compiled engine, op by op for an eager one.

Inputs are drawn so that equality is decidable: the order in which a norm's mean is summed is no rounding point, but it
can move a result by one step, and it is the compiler's or kernel's choice. So whatever a norm reads is a set of small
integers times a power of two, whose squares sum exactly in fp32 in any order (``residual_rows``, ``qkv_rows``).

``carry`` shows only when the next add reads the stream. The engine runs three successive adds, and a subset's ``carry``
is judged by the next norm's output, under whichever points of that next norm (a *reader*) explain it best.

A point is *inert* at a site if storing it or not changes no output element of any candidate in any case: it does not
exist there (``qk_norm`` without a Q/K norm, ``carry`` after the last add) or its value is already representable in the
model dtype. This is a fact about the regions and the inputs' dtypes, not about the engine; subsets that differ only in
inert points are one answer.

This file is pure: no engine is imported. ``Engine`` is what it asks of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Protocol

import torch

from ... import backend as backends
from ...regions import KINDS, REGIONS
from ...regions.add_rms_norm import add_rms_norm
from ...regions.rope import rope
from ...regions.swiglu import swiglu
from ...rounding import Rounding
from ..fingerprint import Fingerprint
from ..presets import Preset
from ..spec import ModelSpec

EXACT, AMBIGUOUS, NO_MATCH = "exact", "ambiguous", "no match"
ADDS = ("mlp_add", "attn_add", "final")  # in the order in which a stream meets them
Points = frozenset[str]


class Engine(Protocol):
    """An engine's layers for one model; see ``vllm_layers.VllmLayers`` for shapes."""

    name: str
    mode: str
    compiled: bool
    device: str
    spec: ModelSpec
    fingerprint: Fingerprint
    qk_weights: tuple[torch.Tensor | None, torch.Tensor | None]
    norm_weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def rope(self, positions: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def experts(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def stream(self, residual: torch.Tensor, *deltas: torch.Tensor) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class Case:
    """One draw of inputs: number of tokens, seed, magnitude."""

    tokens: int
    seed: int
    scale: float

    def __str__(self) -> str:
        return f"tokens={self.tokens} seed={self.seed} scale={self.scale:g}"


# odd and even numbers of tokens; no single token: a compiler would make a kernel of its own for it
CASES = tuple(Case(t, s, m) for t in (7, 34) for s in (0, 1) for m in (2.0**-4, 1.0, 2.0**4))


@dataclass(frozen=True)
class Difference:
    """The first element in which a candidate differs from the engine."""

    case: str
    output: str
    index: tuple[int, ...]
    engine: float
    candidate: float

    def __str__(self) -> str:
        place = f"{self.output}[{', '.join(map(str, self.index))}]"
        return f"{place} engine {self.engine!r}, region {self.candidate!r} ({self.case})"


@dataclass(frozen=True)
class Row:
    """What the probe found at one site kind.

    Args:
        engine, mode, kind, region: what was probed.
        verdict: ``exact`` (one answer), ``ambiguous`` (several subsets match), ``no match``.
        points: the stored points without inert ones, if exact, else None.
        matches: every subset that matches on all elements.
        inert: points without effect on any output here.
        best, share: the subset with the largest share of equal elements, and that share.
        runner_up, runner_up_share: the same for the best subset that is another answer than ``best``.
        elements: number of output elements compared per subset.
        differs: where ``best`` first differs, if nothing matches.
    """

    engine: str
    mode: str
    kind: str
    region: str
    verdict: str
    points: Points | None
    matches: tuple[Points, ...]
    inert: Points
    best: Points
    share: float
    runner_up: Points | None
    runner_up_share: float
    elements: int
    differs: Difference | None = None


@dataclass(frozen=True)
class Site:
    """How to probe one site kind.

    Args:
        kind: a key of ``KINDS``.
        outputs: names of the engine's outputs that are compared.
        engine: case -> the engine's outputs.
        candidates: case -> (subset of the region's points, reader, outputs) for every subset and reader.
    """

    kind: str
    outputs: tuple[str, ...]
    engine: Callable[[Case], Sequence[torch.Tensor]]
    candidates: Callable[[Case], Iterable[tuple[Points, str, Sequence[torch.Tensor]]]]


def subsets(points: Iterable[str]) -> tuple[Points, ...]:
    """Return every subset, smallest first.

    >>> [sorted(s) for s in subsets(["a", "b"])]
    [[], ['a'], ['b'], ['a', 'b']]
    """
    points = tuple(points)
    return tuple(frozenset(s) for n in range(len(points) + 1) for s in combinations(points, n))


@dataclass
class _Tally:
    equal: int = 0
    differs: Difference | None = None
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


@dataclass(frozen=True)
class _Comparison:
    """One output of one candidate in one case, beside the engine's."""

    got: torch.Tensor
    digest: bytes
    equal: int
    index: tuple[int, ...] | None

    @classmethod
    def of(cls, want: torch.Tensor, got: torch.Tensor) -> _Comparison:
        assert want.shape == got.shape and want.dtype == got.dtype, (
            f"{want.shape} {want.dtype}, {got.shape} {got.dtype}"
        )
        digest = hashlib.sha256(got.contiguous().cpu().view(torch.uint8).numpy().tobytes()).digest()
        equal = (want == got) | (want.isnan() & got.isnan())
        different = (~equal).nonzero()
        return cls(got, digest, int(equal.sum()), tuple(different[0].tolist()) if len(different) else None)


def probe_site(site: Site, cases: Iterable[Case], engine: str = "", mode: str = "") -> Row:
    """Compare the engine with every subset of the region's points at one site kind."""
    tallies: dict[tuple[Points, str], _Tally] = {}
    elements = 0
    for case in cases:
        wanted = [x.detach().clone() for x in site.engine(case)]
        elements += sum(x.numel() for x in wanted)
        done: dict[tuple[str, int], _Comparison] = {}  # subsets share outputs; the entry keeps its tensor alive
        for points, reader, outputs in site.candidates(case):
            tally = tallies.setdefault((points, reader), _Tally())
            for name, want, got in zip(site.outputs, wanted, outputs, strict=True):
                if (name, id(got)) not in done:
                    done[name, id(got)] = _Comparison.of(want, got)
                found = done[name, id(got)]
                tally.equal += found.equal
                tally.digest.update(found.digest)
                if tally.differs is None and found.index is not None:
                    values = want[found.index].item(), got[found.index].item()
                    tally.differs = Difference(str(case), name, found.index, *values)
    if not elements:
        raise ValueError(f"{site.kind}: no case to probe")
    return _judge(site.kind, tallies, elements, engine, mode)


def _judge(kind: str, tallies: Mapping[tuple[Points, str], _Tally], elements: int, engine: str, mode: str) -> Row:
    region = REGIONS[KINDS[kind]]
    digests = {key: tally.digest.digest() for key, tally in tallies.items()}
    inert = frozenset(p for p in region.points if all(digests[s, r] == digests[s ^ {p}, r] for s, r in digests))
    best_of: dict[Points, _Tally] = {}
    for (points, _), tally in tallies.items():
        if points not in best_of or tally.equal > best_of[points].equal:
            best_of[points] = tally
    ranked = sorted(best_of, key=lambda s: (-best_of[s].equal, len(s), sorted(s)))
    matches = tuple(s for s in ranked if best_of[s].equal == elements)
    answers = {s - inert for s in matches}
    best = ranked[0]
    others = [s for s in ranked if s - inert != best - inert]
    return Row(
        engine=engine,
        mode=mode,
        kind=kind,
        region=region.name,
        verdict=EXACT if len(answers) == 1 else AMBIGUOUS if answers else NO_MATCH,
        points=answers.pop() if len(answers) == 1 else None,
        matches=matches,
        inert=inert,
        best=best - inert,
        share=best_of[best].equal / elements,
        runner_up=others[0] - inert if others else None,
        runner_up_share=best_of[others[0]].equal / elements if others else 0.0,
        elements=elements,
        differs=best_of[best].differs,
    )


# ---- inputs


def _generator(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(case.seed)


def _integers(case: Case, bound: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return integers in [-bound, bound], uniform, times the case's scale (a power of two)."""
    draw = (2 * torch.rand(case.tokens, len(bound), generator=generator) - 1) * (bound + 0.49)
    return draw.round() * case.scale


def residual_rows(case: Case, hidden_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return (residual, three deltas), each (tokens, hidden_size): every running sum has an exact sum of squares.

    Twelve columns hold integers up to 255, the others up to 1; a running sum of four is at most 1020 or 4, and
    12 * 1020^2 + 4^2 * hidden_size < 2^24 for hidden sizes below 268,000. Integers up to 255 are exact in bf16; sums
    beyond 256 are not, so that storing them shows.
    """
    generator = _generator(case)
    bound = torch.ones(hidden_size)
    bound[torch.randperm(hidden_size, generator=generator)[:12]] = 255
    return [_integers(case, bound, generator).to(dtype) for _ in range(4)]


def qkv_rows(case: Case, width: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (tokens, width): integers whose squares sum exactly over a head, head_dim * bound^2 <= 2^24."""
    bound = min(255, int((2**24 / head_dim) ** 0.5))
    return _integers(case, torch.full((width,), float(bound)), _generator(case)).to(dtype)


def random_rows(case: Case, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (tokens, width), normally distributed with the case's scale."""
    return (case.scale * torch.randn(case.tokens, width, generator=_generator(case))).to(dtype)


# ---- sites


def sites(engine: Engine) -> Iterator[Site]:
    """Yield how to probe each site kind that the engine's model has."""
    spec, backend = engine.spec, "compile" if engine.compiled else "eager"

    def run(function, rows, points: Points, **kwargs):
        with torch.no_grad():
            rows = {name: x.contiguous() for name, x in rows.items()}
            return backends.run(function, rows, Rounding(points), backend, **kwargs)

    def rope_inputs(case: Case):
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        positions = torch.randint(0, spec.max_position, (case.tokens,), generator=_generator(case))
        return positions.to(engine.device), qkv_rows(case, width, spec.head_dim, spec.dtype).to(engine.device)

    def rope_candidates(case: Case):
        positions, qkv = rope_inputs(case)
        q, k, _ = qkv.view(case.tokens, -1, spec.head_dim).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        cos, sin = (x.unsqueeze(1) for x in engine.cos_sin(positions))
        params = dict(zip(("q_weight", "k_weight"), engine.qk_weights, strict=True)) if spec.qk_norm else {}
        live = frozenset(REGIONS["rope"].points) - (frozenset() if spec.qk_norm else {"qk_normed", "qk_norm"})
        out = {s: run(rope, dict(q=q, k=k, cos=cos, sin=sin), s, params=params, eps=spec.eps) for s in subsets(live)}
        for points in subsets(REGIONS["rope"].points):
            yield points, "", out[points & live]

    yield Site("attention", ("q", "k"), lambda case: engine.rope(*rope_inputs(case)), rope_candidates)

    def activation(kind: str, size: int, call: Callable) -> Site:
        def inputs(case: Case):
            return random_rows(case, 2 * size, spec.dtype).to(engine.device)

        def candidates(case: Case):
            gate, up_ = inputs(case).chunk(2, dim=-1)
            for points in subsets(REGIONS["swiglu"].points):
                yield points, "", (run(swiglu, dict(gate=gate, up_=up_), points),)

        return Site(kind, ("act",), lambda case: (call(inputs(case)),), candidates)

    yield activation("mlp", spec.intermediate_size, engine.swiglu)
    if spec.expert_size is not None:
        yield activation("experts", spec.expert_size, engine.experts)

    def rows(case: Case):
        return [x.to(engine.device) for x in residual_rows(case, spec.hidden_size, spec.dtype)]

    def add_norm(add: int, delta, residual, points: Points):
        weight = dict(weight=engine.norm_weights[add])
        # a stored stream read in fp32 has the same values, and needs no graph of its own
        return run(add_rms_norm, dict(delta=delta, residual=residual.float()), points, params=weight, eps=spec.eps)

    def histories(case: Case, add: int) -> dict[str, torch.Tensor]:
        """Return the stream before add number ``add``, by which earlier sums were stored."""
        residual, *deltas = rows(case)
        streams = {"": residual.float()}
        for n in range(add):
            kept = {name: deltas[n].float() + stream for name, stream in streams.items()}
            streams = {f"{name} carry {'stored' if store else 'kept'}": x.to(spec.dtype).float() if store else x
                       for name, x in kept.items() for store in (False, True)}  # fmt: skip
        return streams

    def add_site(add: int) -> Site:
        last = add == len(ADDS) - 1

        def candidates(case: Case):
            _, *deltas = rows(case)
            every = subsets(REGIONS["add_rms_norm"].points)
            readers = [s for s in every if "carry" not in s]
            for history, stream in histories(case, add).items():
                here = {s: add_norm(add, deltas[add], stream, s) for s in every}
                if last:  # nothing reads the stream any more
                    for points in every:
                        yield points, history, here[points][:1]
                    continue
                read = {}
                for store in (False, True):
                    carry = here[frozenset({"carry"} if store else ())][1]
                    for reader in readers:
                        read[store, reader] = add_norm(add + 1, deltas[add + 1], carry, reader)[0]
                for points in every:
                    for reader in readers:
                        yield points, f"{history} {sorted(reader)}", (here[points][0], read["carry" in points, reader])

        outputs = ("norm",) if last else ("norm", "next norm")
        return Site(ADDS[add], outputs, lambda case: engine.stream(*rows(case))[add : add + len(outputs)], candidates)

    for add in (1, 0, 2):  # the order of KINDS
        yield add_site(add)


def probe(
    engine: Engine, cases: Sequence[Case] = CASES, progress: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Probe every site kind of an engine's model.

    Args:
        engine: the layers.
        cases: the draws.
        progress: called with a line of text before each site kind.
    """
    rows = []
    for site in sites(engine):
        progress(f"{engine.name} {engine.mode}: {site.kind}")
        rows.append(probe_site(site, cases, engine.name, engine.mode))
    return rows


# ---- answers


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 if there are rows and each has exactly one answer, else 1."""
    return 0 if rows and all(row.verdict == EXACT for row in rows) else 1


def refute(rows: Iterable[Row], preset: Preset) -> list[str]:
    """Return one line for each row that contradicts a preset; inert points cannot.

    A row without a match contradicts nothing unless the preset's own subset is not its best one.
    """
    lines = []
    for row in rows:
        claimed = preset.at(row.kind) - row.inert
        found = row.points if row.verdict == EXACT else row.best
        agrees = claimed in {s - row.inert for s in row.matches} if row.matches else claimed == found
        if not agrees:
            lines.append(
                f"{preset.name}: {row.kind}: claims {Rounding(claimed)}, {row.engine} {row.mode} stores {Rounding(found)}"
                f" ({row.verdict}, {row.share:.4%} of {row.elements} elements)"
            )
    return lines


def to_json(rows: Iterable[Row], **header) -> str:
    """Return rows as JSON with a header (model, versions); sets of points become sorted lists."""

    def plain(value):
        return sorted(value) if isinstance(value, frozenset) else str(value)

    return json.dumps({**header, "rows": [asdict(row) for row in rows]}, default=plain, indent=2)


def render(rows: Iterable[Row]):
    """Return the rows as a ``rich`` table."""
    from rich.table import Table

    table = Table("engine", "mode", "site kind", "verdict", "stored points", "share", "runner-up", "share", "inert")
    for row in rows:
        answer = " | ".join(str(Rounding(s)) for s in sorted({m - row.inert for m in row.matches}, key=sorted))
        table.add_row(
            row.engine,
            row.mode,
            row.kind,
            row.verdict,
            answer or f"best {Rounding(row.best)}\nfirst at {row.differs}",
            f"{row.share:.4%}",
            "-" if row.runner_up is None else str(Rounding(row.runner_up)),
            f"{row.runner_up_share:.1%}",
            ", ".join(sorted(row.inert)) or "-",
        )
    return table
