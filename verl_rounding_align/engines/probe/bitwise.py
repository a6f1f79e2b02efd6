"""Which rounding points does an engine store? Its own layers against every subset of points, bit for bit.

The probe runs an engine's layer code on drawn inputs and our region, with each subset of its points stored, on the same
inputs. A subset *matches* if all output elements of all cases are equal bit for bit. Candidates run as the engine runs:
compiled (with interior rounding points kept) for a compiled engine, op by op for an eager one.

A point is *inert* at a site if storing it or not changes no output element of any candidate in any case: it does not
exist there (``qk_norm`` without a Q/K norm, ``carry`` after the last add) or its value is already representable in the
model dtype. This is a fact about the regions and the inputs' dtypes, not about the engine; subsets that differ only in
inert points are one answer.

This file is pure: it knows no engine and no region's function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from ...regions import KINDS, REGIONS

EXACT, AMBIGUOUS, NO_MATCH = "exact", "ambiguous", "no match"
Points = frozenset[str]


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
