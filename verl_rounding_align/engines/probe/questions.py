"""How an engine is asked at each site kind: one row of ``QUESTIONS`` a kind.

A row takes an engine and returns the Site to compare, or None where the engine's model has no such place. Candidates run
as the engine runs: compiled (with interior rounding points kept) for a compiled engine, op by op for an eager one.

``carry`` shows only when the next add reads the stream. The engine runs three successive adds, and a subset's ``carry``
is judged by the next norm's output, under whichever points of that next norm (a *reader*) explain it best.

A site kind without a row is not asked, and a probe's preset then says nothing about its region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ... import backend as backends
from ...regions import KINDS, REGIONS
from ...regions.add_rms_norm import add_rms_norm
from ...regions.rope import rope
from ...regions.swiglu import swiglu
from ...rounding import Rounding
from ..fingerprint import Fingerprint
from ..spec import ModelSpec
from .bitwise import CASES, Case, Points, Row, Site, probe_site, subsets
from .inputs import generator, qkv_rows, random_rows, residual_rows

ADDS = ("mlp_add", "attn_add", "final")  # in the order in which a stream meets them


class Engine(Protocol):
    """An engine's layers for one model; see ``engines/vllm/layers.py`` for shapes.

    An engine that has a region of its own has one more method, which that region's row of ``QUESTIONS`` calls.
    """

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


def candidate(engine: Engine, function: Callable, rows: dict[str, torch.Tensor], points: Points, **kwargs):
    """Run a region on an engine's inputs with some points stored, compiled if the engine is.

    Args:
        engine: says how the candidate runs.
        function: a function of ``regions/``.
        rows: its arguments of shape (tokens, ...).
        points: the points that are stored.
        kwargs: see :func:`backend.run`.
    """
    with torch.no_grad():
        rows = {name: x.contiguous() for name, x in rows.items()}
        return backends.run(function, rows, Rounding(points), "compile" if engine.compiled else "eager", **kwargs)


def _attention(engine: Engine) -> Site:
    spec = engine.spec
    live = frozenset(REGIONS["rope"].points) - (frozenset() if spec.qk_norm else {"qk_normed", "qk_norm"})

    def inputs(case: Case):
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        positions = torch.randint(0, spec.max_position, (case.tokens,), generator=generator(case))
        return positions.to(engine.device), qkv_rows(case, width, spec.head_dim, spec.dtype).to(engine.device)

    def candidates(case: Case):
        positions, qkv = inputs(case)
        q, k, _ = qkv.view(case.tokens, -1, spec.head_dim).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        cos, sin = (x.unsqueeze(1) for x in engine.cos_sin(positions))
        rows = dict(q=q, k=k, cos=cos, sin=sin)
        params = dict(zip(("q_weight", "k_weight"), engine.qk_weights, strict=True)) if spec.qk_norm else {}
        out = {s: candidate(engine, rope, rows, s, params=params, eps=spec.eps) for s in subsets(live)}
        for points in subsets(REGIONS["rope"].points):
            yield points, "", out[points & live]

    return Site("attention", ("q", "k"), lambda case: engine.rope(*inputs(case)), candidates)


def _activation(kind: str, engine: Engine, size: int, call: Callable) -> Site:
    def inputs(case: Case):
        return random_rows(case, 2 * size, engine.spec.dtype).to(engine.device)

    def candidates(case: Case):
        gate, up_ = inputs(case).chunk(2, dim=-1)
        for points in subsets(REGIONS["swiglu"].points):
            yield points, "", (candidate(engine, swiglu, dict(gate=gate, up_=up_), points),)

    return Site(kind, ("act",), lambda case: (call(inputs(case)),), candidates)


def _mlp(engine: Engine) -> Site:
    return _activation("mlp", engine, engine.spec.intermediate_size, engine.swiglu)


def _experts(engine: Engine) -> Site | None:
    size = engine.spec.expert_size
    return None if size is None else _activation("experts", engine, size, engine.experts)


def _add(number: int) -> Callable[[Engine], Site]:
    """Return the row of one of the three adds (``ADDS``)."""
    last = number == len(ADDS) - 1
    outputs = ("norm",) if last else ("norm", "next norm")

    def site(engine: Engine) -> Site:
        spec = engine.spec

        def rows(case: Case):
            return [x.to(engine.device) for x in residual_rows(case, spec.hidden_size, spec.dtype)]

        def add_norm(add: int, delta, residual, points: Points):
            weight = dict(weight=engine.norm_weights[add])
            # a stored stream read in fp32 has the same values, and needs no graph of its own
            inputs = dict(delta=delta, residual=residual.float())
            return candidate(engine, add_rms_norm, inputs, points, params=weight, eps=spec.eps)

        def histories(case: Case) -> dict[str, torch.Tensor]:
            """Return the stream before this add, by which earlier sums were stored."""
            residual, *deltas = rows(case)
            streams = {"": residual.float()}
            for n in range(number):
                kept = {name: deltas[n].float() + stream for name, stream in streams.items()}
                streams = {f"{name} carry {'stored' if store else 'kept'}": x.to(spec.dtype).float() if store else x
                           for name, x in kept.items() for store in (False, True)}  # fmt: skip
            return streams

        def candidates(case: Case):
            _, *deltas = rows(case)
            every = subsets(REGIONS["add_rms_norm"].points)
            readers = [s for s in every if "carry" not in s]
            for history, stream in histories(case).items():
                here = {s: add_norm(number, deltas[number], stream, s) for s in every}
                if last:  # nothing reads the stream any more
                    for points in every:
                        yield points, history, here[points][:1]
                    continue
                read = {}
                for store in (False, True):
                    carry = here[frozenset({"carry"} if store else ())][1]
                    for reader in readers:
                        read[store, reader] = add_norm(number + 1, deltas[number + 1], carry, reader)[0]
                for points in every:
                    for reader in readers:
                        yield points, f"{history} {sorted(reader)}", (here[points][0], read["carry" in points, reader])

        return Site(
            ADDS[number], outputs, lambda case: engine.stream(*rows(case))[number : number + len(outputs)], candidates
        )

    return site


QUESTIONS: dict[str, Callable[[Engine], Site | None]] = {
    "attention": _attention,
    "mlp": _mlp,
    "experts": _experts,
    **{kind: _add(number) for number, kind in enumerate(ADDS)},
}


def sites(engine: Engine) -> Iterator[Site]:
    """Yield how to probe each site kind that the engine's model has, in the order of ``KINDS``."""
    for kind in KINDS:
        site = QUESTIONS[kind](engine) if kind in QUESTIONS else None
        if site is not None:
            yield site


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
