"""The form of a region's row, and what follows from the rows: site kinds and groups. No row is written here.

A *site kind* is a place in the model where a region runs, so that an engine may round differently, say, at the add after
attention and at the add after the MLP. A *group* is what users switch with one name, and what attribution plays over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Rounding points that users switch with one name.

    Args:
        region: name of the region that the points belong to.
        points: the points.
        meaning: what the group is, in one phrase, for help texts and docs.
        paper: whether the group is one of the paper's three regions (the value ``paper`` of the key).
    """

    region: str
    points: frozenset[str]
    meaning: str
    paper: bool = False


@dataclass(frozen=True)
class Region:
    """A fused region: its function, its rounding points, where it runs, and how users switch it.

    Args:
        name: as presets, probe and messages call it.
        function: the region's maths; takes ``rnd``, a ``Rounding``.
        points: point -> what it means.
        kinds: site kind -> the place in the model.
        groups: group -> Group; together the groups hold every point once.

    Raises:
        ValueError: a group names a point that the region does not have, or the groups do not hold every point once.
    """

    name: str
    function: Callable
    points: Mapping[str, str]
    kinds: Mapping[str, str]
    groups: Mapping[str, Group]

    def __post_init__(self):
        grouped = [point for group in self.groups.values() for point in group.points]
        if sorted(grouped) != sorted(self.points):
            raise ValueError(
                f"region {self.name!r}: its groups hold {sorted(grouped)}, its points are {sorted(self.points)}"
            )


class Derived(Mapping):
    """A read-only view of the regions' rows: it follows a row that is added later.

    Args:
        rows: the table of regions.
        items: row -> (key, value) pairs that the view takes from it.
    """

    def __init__(self, rows: Mapping[str, Region], items: Callable[[Region], Iterator[tuple[str, object]]]):
        self._rows, self._items = rows, items

    def _found(self) -> dict:
        return dict(pair for region in self._rows.values() for pair in self._items(region))

    def __getitem__(self, key):
        return self._found()[key]

    def __iter__(self):
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return repr(self._found())
