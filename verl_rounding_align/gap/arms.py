"""Arms of a measurement: which rounding points the trainer moves to the engine's, by groups or one by one.

An arm is named as the key's value is (``rope``, ``paper``, ``a+b``), or by single points (``product+act``). What it *does*
is the set of points it moves, so ``all`` and the four groups joined are one arm, scored once, and the players of an
attribution are any sets of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from ..engines.presets import TRAINER, Preset, get
from ..plan import NONE, Plan, arms, parse_plan
from ..regions import GROUPS, KINDS, REGIONS
from ..rounding import Rounding

POINTS = {point: region.name for region in REGIONS.values() for point in region.points}
SUBSETS = "subsets"


def moved(name: str, preset: Preset) -> frozenset[str]:
    """Return the points that one region, group or point of an arm's name moves.

    Raises:
        ValueError: no such name; the message lists the legal ones.

    >>> sorted(moved("add_rms_norm", get("vllm_compiled"))), sorted(moved("act", get("vllm_compiled")))
    (['normed', 'sum'], ['act'])
    """
    if name in (NONE, *arms()):
        groups = parse_plan(name, engine=preset).groups
        return frozenset().union(*(GROUPS[group].points for group in groups))
    if name in POINTS:
        return frozenset({name})
    raise ValueError(
        f"regions={name!r}: choose from {', '.join(dict.fromkeys((NONE, *arms(), *POINTS, SUBSETS)))} (join with +)"
    )


def points(arm: str, preset: Preset) -> frozenset[str]:
    """Return the points that an arm moves."""
    return frozenset().union(*(moved(name.strip(), preset) for name in arm.split("+")))


def live(preset: Preset) -> frozenset[str]:
    """Return the points that the trainer and the engine do not store alike, at some site kind."""
    trainer = get(TRAINER)
    return frozenset().union(*(trainer.at(kind) ^ preset.at(kind) for kind in KINDS))


def plan(arm: str, preset: Preset) -> Plan:
    """Return the plan of an arm.

    >>> print(plan("act+carry", get("vllm_compiled")).rounding("attn_add"))
    {normed, sum}
    >>> plan("all", get("vllm_compiled")) == parse_plan("all", engine="vllm_compiled")
    True
    """
    names = [name.strip() for name in arm.split("+")]
    if set(names) <= {NONE, *arms()}:
        return parse_plan(arm, engine=preset)
    chosen, trainer, roundings = points(arm, preset), get(TRAINER), []
    for kind, region in KINDS.items():
        here = chosen & set(REGIONS[region].points)
        if here:
            roundings.append((kind, Rounding((trainer.at(kind) - here) | (preset.at(kind) & here))))
    groups = tuple(group for group, its in GROUPS.items() if its.points & chosen)
    return replace(parse_plan(NONE), groups=groups, engine=preset.name, roundings=tuple(roundings))


def subsets(players: Sequence[str]) -> list[str]:
    """Return every non-empty set of players as an arm, small ones first.

    >>> subsets(["rope", "act"])
    ['rope', 'act', 'rope+act']
    """
    return ["+".join(s) for n in range(1, len(players) + 1) for s in combinations(players, n)]


def expand(regions: Sequence[str]) -> list[str]:
    """Return arms without ``none``; ``subsets`` stands for all subsets of the groups and ``all``, ``subsets:a:b``
    for those of these players.

    >>> expand(["rope", "subsets:act:carry"])
    ['rope', 'act', 'carry', 'act+carry']
    """
    found: list[str] = []
    for name in regions:
        head, *players = name.split(":")
        found += [*subsets(players or list(GROUPS)), *([] if players else ["all"])] if head == SUBSETS else [name]
    return [arm for arm in dict.fromkeys(found) if arm != NONE]
