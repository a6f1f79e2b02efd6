"""What the landing tool returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..logprobs.tally import VERSION
from .quantities import QUANTITIES


@dataclass(frozen=True)
class LandingRow:
    """One quantity.

    Args:
        quantity, kind, point: see :data:`.quantities.QUANTITIES`.
        score: median over layers.
        floor: what as many independent, uniform positions as ``values`` score.
        values: number of values per layer, of the layer with the fewest.
        nonfinite: values that were left out, in all layers.
        layers, scores: index and score of each layer that has the quantity.
        pictured: the middle one of these layers.
        histogram: how many values landed in each 64th of [0, 1) in that layer.
    """

    quantity: str
    kind: str
    point: str
    score: float
    floor: float
    values: int
    nonfinite: int
    layers: tuple[int, ...]
    scores: tuple[float, ...]
    pictured: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Landing:
    """What :func:`.measure.landing` found.

    Args:
        rows: in the order of ``QUANTITIES``.
        absent: what could not be seen, in words.
        tokens: how many were read.
    """

    rows: tuple[LandingRow, ...]
    absent: tuple[str, ...]
    tokens: int


def as_json(found: Landing) -> dict:
    """Return the rows as plain data, each with the definition of its quantity."""
    rows = [{**asdict(row), "formula": QUANTITIES[row.quantity].formula} for row in found.rows]
    head = {"schema": "verl-rounding-align/landing", "schema_version": VERSION}
    return {**head, "tokens": found.tokens, "absent": list(found.absent), "rows": rows}
