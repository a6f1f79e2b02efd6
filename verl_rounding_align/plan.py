"""From a config value to a plan: which groups of rounding points are aligned, to which engine, at which sites.

Every user-facing error about the *value* of the key is raised here, with the key, the value and the legal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import backend as backends
from . import formats
from .engines import presets
from .formats import Format
from .regions import GROUPS, KINDS
from .rounding import Rounding

PAPER = ("rope", "swiglu", "add_rms_norm")
CHOICES = ("none", *GROUPS, "paper", "all", "auto")
FIELDS = ("regions", "engine", "backend")
AUTO = "auto"
TRAINER = presets.TRAINER


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

    @property
    def format(self) -> Format | None:
        """The emulated format that everything is stored in, or None for the model dtype."""
        return next((rnd.format for _, rnd in self.roundings), None)

    def __bool__(self) -> bool:
        return bool(self.groups) or self.format is not None

    def __str__(self) -> str:
        name = f"{'+'.join(self.groups)}: {self.trainer} -> {self.engine}" if self.groups else "none"
        return f"{name} in {self.format}" if self.format else name


def build_plan(groups: Sequence[str], engine: presets.Preset, format: Format | None = None) -> Plan:
    """Return the plan that moves the points of ``groups`` from the trainer's preset to the engine's.

    With an emulated ``format`` every site is patched, aligned or not: nothing else would store in it.

    >>> plan = build_plan(["rope"], presets.get("vllm_compiled"))
    >>> print(plan, plan.rounding("attention"), plan.rounding("mlp"))
    rope: hf_eager -> vllm_compiled {cos_sin} None
    """
    groups = tuple(g for g in GROUPS if g in groups)
    trainer = presets.get(TRAINER)
    roundings = []
    for kind, region in KINDS.items():
        moved = frozenset().union(*(points for g in groups for r, points in [GROUPS[g]] if r == region))
        if moved or format is not None:
            points = (trainer.points[kind] - moved) | (engine.points[kind] & moved)
            roundings.append((kind, Rounding(points, format)))
    return Plan(groups, engine.name, tuple(roundings))


@dataclass(frozen=True)
class Request:
    """A config value, checked: what is asked for, before the engine is known.

    Args:
        names: of ``CHOICES``.
        engine: what the value says of the engine: None, a preset's name, ``auto``, a probe's file, or a preset's fields.
        backend: how the regions run.
        value, key: as the user wrote them, for messages.
    """

    names: tuple[str, ...]
    engine: str | Mapping | None
    backend: str
    value: object
    key: str

    @property
    def auto(self) -> bool:
        """Whether the engine is to be probed."""
        return self.engine == AUTO or (self.engine is None and AUTO in self.names)

    def __bool__(self) -> bool:
        return self.names != ("none",)

    def plan(self, preset: presets.Preset, format: Format | None = None) -> Plan:
        """Return the plan for an engine, in an emulated format if one is given.

        Raises:
            ValueError: ``auto`` with an engine that was not probed.
        """
        groups: set[str] = set()
        for name in self.names:
            if name == AUTO and not preset.probed:
                raise ValueError(
                    f"{self.key}={self.value!r}: 'auto' takes the plan from a probe of the engine, and {preset.name} is a "
                    "preset; give the file that `verl-rounding-align probe --json` wrote as the engine, or choose from "
                    f"{', '.join(c for c in CHOICES if c != AUTO)}"
                )
            if name == "paper":
                groups.update(PAPER)
            elif name in ("all", AUTO):
                groups.update(g for g in GROUPS if preset.evidence[g] != presets.UNPROVEN)
            elif name != "none":
                groups.add(name)
        return replace(build_plan(tuple(groups), preset, format), backend=self.backend)


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


def parse_request(value, key: str = "rounding_align") -> Request:
    """Return what a config value asks for; see :func:`parse_plan` for the values.

    Raises:
        ValueError: unknown region or field, or ``none`` or ``auto`` joined with another name.
    """
    backend, engine = "auto", None
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(FIELDS))
        if unknown or "regions" not in value:
            problem = f"unknown field {unknown[0]!r}" if unknown else "no field 'regions'"
            raise ValueError(f"{key}={dict(value)!r}: {problem}; a mapping has regions and optionally engine, backend")
        backend = backends.check(value.get("backend") or backend, key=f"{key}.backend")
        engine, value = value.get("engine") or None, value["regions"]
        key = f"{key}.regions"
    names = _names(value, key)
    for name in names:
        if name not in CHOICES:
            raise ValueError(
                f"{key}={value!r}: unknown region {name!r}; choose from {', '.join(CHOICES)} (join with +)"
            )
        if name in ("none", AUTO) and len(names) > 1:
            raise ValueError(f"{key}={value!r}: {name!r} cannot be joined with another region")
    return Request(tuple(names), engine, backend, value, key)


def find_preset(engine: str | Mapping | presets.Preset, key: str = "engine", **known) -> presets.Preset:
    """Return the preset that a config names: by its name, by a probe's JSON file, or by its fields.

    Args:
        engine: one of these, or a preset.
        key: the config key, for messages.
        known: ``spec`` and ``mode`` for a probe's file, see :func:`engine.result.load`.

    Raises:
        ValueError: unknown name, or a file that is no probe's.
    """
    if isinstance(engine, presets.Preset):
        return engine
    if isinstance(engine, Mapping):
        return presets.Preset.from_dict(engine, key)
    if engine == AUTO:
        raise ValueError(
            f"{key}='auto': the engine is probed by verl's driver or by `verl-rounding-align plan --auto`; elsewhere give "
            "the file that `verl-rounding-align probe --json` wrote, or a preset's name"
        )
    from .engines.probe import result

    return result.load(engine, key=key, **known) if result.is_file(engine) else presets.get(engine, key=key)


def parse_plan(
    value,
    engine: str | Mapping | presets.Preset = "vllm_compiled",
    key: str = "rounding_align",
    format: str | Format | None = None,
    **known,
) -> Plan:
    """Return the plan for a config value.

    Args:
        value: None, ``none``, ``rope``, ``swiglu``, ``add_rms_norm``, ``carry``, ``paper`` (the first three groups),
            ``all`` (every group for which the engine's preset has evidence), ``auto`` (the same, of a probed engine),
            names joined with ``+``, a list of names, or a mapping ``{regions: <any of these>, engine: <preset name, or a
            probe's JSON file>, backend: auto|compile|eager}``, the last two optional, whose engine wins over the argument.
        engine: the engine's preset: its name (see ``presets.PRESETS``), a probe's JSON file, or a Preset.
        key: the config key the value came from, for messages.
        format: an emulated format (``formats.CHOICES``) instead of the model dtype.
        known: ``spec`` and ``mode``, checked against a probe's file.

    Raises:
        ValueError: unknown region or engine, or ``none`` joined with another name; the message holds key, value, choices.

    >>> print(parse_plan("rope+carry", engine="vllm_compiled"))
    rope+carry: hf_eager -> vllm_compiled
    >>> parse_plan("ropee")
    Traceback (most recent call last):
    ...
    ValueError: rounding_align='ropee': unknown region 'ropee'; choose from none, rope, swiglu, add_rms_norm, carry, \
paper, all, auto (join with +)
    """
    request = parse_request(value, key)
    preset = find_preset(request.engine or engine, f"{request.key} engine", **known)
    return request.plan(preset, formats.parse(format))
