"""Arms of a measurement: which rounding points the trainer moves to the engine's, by groups or one by one.

An arm is named as the key's value is (``rope``, ``paper``, ``a+b``), or by single points (``product+act``). What it *does*
is the set of points that it moves. ``all`` and its groups joined are therefore one arm, scored once, and any sets of points
can be the players of an attribution. Names and points are those of ``plan.arms()`` and the table of regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from ..engines.presets import TRAINER, Preset, get
from ..plan import NONE, Plan, arms, parse_plan
from ..regions import GROUPS, KINDS, REGIONS
from ..regions.table import Derived
from ..rounding import Rounding

POINTS = Derived(REGIONS, lambda region: ((point, region.name) for point in region.points))  # point -> region's name
SUBSETS = "subsets"


def check(arm: str) -> None:
    """Check the names of an arm, before its engine is known.

    Raises:
        ValueError: a name that is none; the message lists the legal ones.
    """
    for name in (name.strip() for name in arm.split("+")):
        if name not in (NONE, *arms(), *POINTS):
            raise ValueError(
                f"regions={name!r}: choose from {', '.join(dict.fromkeys((NONE, *arms(), *POINTS, SUBSETS)))} (join with +)"
            )


def player(name: str) -> frozenset[str]:
    """Return the points of a group, or the one point that ``name`` is.

    Raises:
        ValueError: no such group or point; the message lists the legal ones.

    >>> sorted(player("add_rms_norm")), sorted(player("act"))
    (['normed', 'sum'], ['act'])
    """
    if name in GROUPS:
        return GROUPS[name].points
    if name in POINTS:
        return frozenset({name})
    raise ValueError(f"players={name!r}: choose from {', '.join(dict.fromkeys((*GROUPS, *POINTS)))}")


def moved(name: str, preset: Preset) -> frozenset[str]:
    """Return the points that one name of an arm moves: a name of the key's value, or a point.

    Raises:
        ValueError: no such name, or one that the preset says nothing about.

    >>> sorted(moved("add_rms_norm", get("vllm_compiled"))), sorted(moved("act", get("vllm_compiled")))
    (['normed', 'sum'], ['act'])
    """
    check(name)
    if name in (NONE, *arms()):
        return frozenset().union(*(GROUPS[group].points for group in parse_plan(name, engine=preset).groups))
    kinds = [kind for kind, region in KINDS.items() if region == POINTS[name]]
    if not any(preset.knows(kind) for kind in kinds):
        raise ValueError(f"regions={name!r}: preset {preset.name} says nothing about the {POINTS[name]} region")
    return frozenset({name})


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
        if here and preset.knows(kind):
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
    """Return arms without ``none``, each once.

    Args:
        regions: arms; ``subsets`` stands for all subsets of the groups and ``all``, ``subsets:a:b`` for those of these players.

    >>> expand(["rope", "subsets:act:carry"])
    ['rope', 'act', 'carry', 'act+carry']
    """
    found: list[str] = []
    for name in regions:
        head, *players = name.split(":")
        found += [*subsets(players or list(GROUPS)), *([] if players else ["all"])] if head == SUBSETS else [name]
    return [arm for arm in dict.fromkeys(found) if arm != NONE]
