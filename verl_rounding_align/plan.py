"""From a config value to a plan: which groups of rounding points are aligned, to which engine, at which sites.

Every user-facing error about the *value* of the key is raised here, with the key, the value and the legal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import backend as backends
from . import presets
from .regions import GROUPS, KINDS
from .rounding import Rounding

PAPER = ("rope", "swiglu", "add_rms_norm")
CHOICES = ("none", *GROUPS, "paper", "all")
FIELDS = ("regions", "engine", "backend")
TRAINER = "hf_eager"


@dataclass(frozen=True)
class Plan:
    """What will be patched: per site kind, the points the trainer stores today and those it will store.

    Args:
        groups: aligned groups, in the order of ``GROUPS``; empty for ``none``.
        engine: name of the preset that the groups are aligned to.
        roundings: (site kind, Rounding) for every site kind that is patched.
        trainer: name of the preset that describes the unpatched trainer.
        backend: how the regions run: ``auto``, ``compile`` or ``eager`` (``backend.BACKENDS``).
    """

    groups: tuple[str, ...]
    engine: str
    roundings: tuple[tuple[str, Rounding], ...]
    trainer: str = TRAINER
    backend: str = "auto"

    def rounding(self, kind: str) -> Rounding | None:
        """Return the Rounding at site kind ``kind``, or None where nothing is patched."""
        return dict(self.roundings).get(kind)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __str__(self) -> str:
        return f"{'+'.join(self.groups)}: {self.trainer} -> {self.engine}" if self.groups else "none"


def build_plan(groups: Sequence[str], engine: presets.Preset) -> Plan:
    """Return the plan that moves the points of ``groups`` from the trainer's preset to the engine's.

    >>> plan = build_plan(["rope"], presets.get("vllm_compiled"))
    >>> print(plan, plan.rounding("attention"), plan.rounding("mlp"))
    rope: hf_eager -> vllm_compiled {cos_sin} None
    """
    groups = tuple(g for g in GROUPS if g in groups)
    trainer = presets.get(TRAINER)
    roundings = []
    for kind, region in KINDS.items():
        moved = frozenset().union(*(points for g in groups for r, points in [GROUPS[g]] if r == region))
        if moved:
            roundings.append((kind, Rounding((trainer.points[kind] - moved) | (engine.points[kind] & moved))))
    return Plan(groups, engine.name, tuple(roundings))


def _names(value, key: str) -> list[str]:
    """Return the region names of a config value: a string joined with ``+``, a list, or None for none."""
    if value is None:
        return ["none"]
    if isinstance(value, str):
        return [part.strip() for part in value.split("+")]
    if isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return list(value)
    raise ValueError(
        f"{key}={value!r}: expected a name, names joined with +, or a list of names from {', '.join(CHOICES)}"
    )


def parse_plan(value, engine: str = "vllm_compiled", key: str = "rounding_align") -> Plan:
    """Return the plan for a config value.

    Args:
        value: None, ``none``, ``rope``, ``swiglu``, ``add_rms_norm``, ``carry``, ``paper`` (the first three groups),
            ``all`` (every group for which the engine's preset has evidence), names joined with ``+``, a list of names,
            or a mapping ``{regions: <any of these>, engine: <preset name>, backend: auto|compile|eager}``, the last two
            optional, whose engine wins over the argument.
        engine: name of the engine's preset (see ``presets.PRESETS``).
        key: the config key the value came from, for messages.

    Raises:
        ValueError: unknown region or engine, or ``none`` joined with another name; the message holds key, value, choices.

    >>> print(parse_plan("rope+carry", engine="vllm_compiled"))
    rope+carry: hf_eager -> vllm_compiled
    >>> parse_plan("ropee")
    Traceback (most recent call last):
    ...
    ValueError: rounding_align='ropee': unknown region 'ropee'; choose from none, rope, swiglu, add_rms_norm, carry, \
paper, all (join with +)
    """
    backend = "auto"
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(FIELDS))
        if unknown or "regions" not in value:
            problem = f"unknown field {unknown[0]!r}" if unknown else "no field 'regions'"
            raise ValueError(f"{key}={dict(value)!r}: {problem}; a mapping has regions and optionally engine, backend")
        backend = backends.check(value.get("backend") or backend, key=f"{key}.backend")
        engine, value = value.get("engine") or engine, value["regions"]
        key = f"{key}.regions"
    preset = presets.get(engine, key=f"{key} engine")
    names = _names(value, key)
    groups: set[str] = set()
    for name in names:
        if name not in CHOICES:
            raise ValueError(
                f"{key}={value!r}: unknown region {name!r}; choose from {', '.join(CHOICES)} (join with +)"
            )
        if name == "none" and len(names) > 1:
            raise ValueError(f"{key}={value!r}: 'none' cannot be joined with another region")
        if name == "paper":
            groups.update(PAPER)
        elif name == "all":
            groups.update(g for g in GROUPS if preset.evidence[g] != presets.UNPROVEN)
        elif name != "none":
            groups.add(name)
    return replace(build_plan(tuple(groups), preset), backend=backend)
