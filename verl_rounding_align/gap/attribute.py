"""What closes how much of the gap: Shapley values over groups or points (the players), by exact enumeration.

The game's value of a set S of players is the reduction it brings, v(S) = k3(none) - k3(S), on the same tokens. A player's
Shapley value is its marginal reduction averaged over all orders in which players can be switched on,

    phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! * (v(S + i) - v(S)),

so that the values of all players sum to v(all) exactly (efficiency). The interaction of two players is what they bring
together beyond what each brings alone, averaged likewise (Grabisch and Roubens 1999). It is positive where they need each
other.

Every value is linear in the sets' k3, and so a sum over sequences like any other. Intervals are those of
:mod:`verl_rounding_align.logprobs.intervals`, and differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import factorial

import numpy as np

from ..logprobs.intervals import intervals

Coalition = frozenset[str]


@dataclass(frozen=True)
class Attribution:
    """One player's part of the reduction, or two players' interaction; nats per token, 95 % interval.

    Args:
        players: one name, or two.
        value: (estimate, low, high).
        share: percent of the whole reduction, None where its interval includes zero or for interactions.
    """

    players: tuple[str, ...]
    value: tuple[float, float, float]
    share: float | None = None


def coalitions(players: Sequence[str]) -> list[Coalition]:
    """Return every subset, the empty one first.

    >>> [sorted(s) for s in coalitions(["a", "b"])]
    [[], ['a'], ['b'], ['a', 'b']]
    """
    return [frozenset(s) for n in range(len(players) + 1) for s in combinations(players, n)]


def shapley(value: Mapping[Coalition, np.ndarray], players: Sequence[str], player: str):
    """Return ``player``'s Shapley value.

    Args:
        value: of every coalition of ``players``: floats, or arrays of one shape (sums per sequence).

    >>> glove = {s: float({"left", "right"} <= s or {"left", "other"} <= s) for s in coalitions(["left", "right", "other"])}
    >>> round(shapley(glove, ["left", "right", "other"], "left"), 4)
    0.6667
    """
    n = len(players)
    others = [p for p in players if p != player]
    total = 0.0
    for s in coalitions(others):
        weight = factorial(len(s)) * factorial(n - len(s) - 1) / factorial(n)
        total = total + weight * (value[s | {player}] - value[s])
    return total


def interaction(value: Mapping[Coalition, np.ndarray], players: Sequence[str], pair: tuple[str, str]):
    """Return the Shapley interaction index of two players.

    >>> both = {s: float(s == {"a", "b"}) for s in coalitions(["a", "b"])}
    >>> interaction(both, ["a", "b"], ("a", "b"))
    1.0
    """
    n, (i, j) = len(players), pair
    total = 0.0
    for s in coalitions([p for p in players if p not in pair]):
        weight = factorial(len(s)) * factorial(n - len(s) - 2) / factorial(n - 1)
        total = total + weight * (value[s | {i, j}] - value[s | {i}] - value[s | {j}] + value[s])
    return total


def attribute(
    k3: Mapping[Coalition, np.ndarray], tokens: np.ndarray, players: Sequence[str]
) -> tuple[Attribution, list[Attribution], list[Attribution]]:
    """Return (whole reduction, one row per player, one row per pair).

    Args:
        k3: coalition -> sum of k3 over each sequence's tokens, (sequences,); every coalition of ``players``.
        tokens: (sequences,) tokens of each sequence.

    Raises:
        ValueError: a coalition is missing; the message names it.
    """
    every = coalitions(players)
    missing = [s for s in every if s not in k3]
    if missing:
        raise ValueError(
            f"no k3 for {len(missing)} of {len(every)} sets, {'+'.join(sorted(missing[0])) or 'none'} first"
        )

    reduction = {s: k3[frozenset()] - k3[s] for s in every}  # linear in the sums, as every value below is
    pairs = list(combinations(players, 2))
    games = [reduction[frozenset(players)]]
    games += [shapley(reduction, players, player) for player in players]
    games += [interaction(reduction, players, pair) for pair in pairs]
    whole, *values = intervals([(x, tokens) for x in games])
    clear = whole[1] > 0 or whole[2] < 0
    rows = [
        Attribution((player,), value, 100 * value[0] / whole[0] if clear else None)
        for player, value in zip(players, values, strict=False)
    ]
    found = [Attribution(pair, value) for pair, value in zip(pairs, values[len(players) :], strict=True)]
    return Attribution(tuple(players), whole), rows, found


def as_json(whole: Attribution, rows: Sequence[Attribution], pairs: Sequence[Attribution]) -> dict:
    """Return the rows as JSON."""
    return {"whole": asdict(whole), "players": list(map(asdict, rows)), "interactions": list(map(asdict, pairs))}
