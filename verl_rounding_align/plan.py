"""From a config value to a plan: which groups of rounding points are aligned, to which engine, at which sites.

Every user-facing error about the *value* of the key is raised here, with the key, the value and the legal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from . import backend as backends
from . import formats
from .engines import presets
from .formats import Format
from .regions import GROUPS, KINDS
from .rounding import Rounding

NONE, PAPER, ALL, AUTO = "none", "paper", "all", "auto"
FIELDS = ("regions", "engine", "backend")
TRAINER = presets.TRAINER
VERSION = 1  # of what Plan.as_dict writes


def meanings() -> dict[str, str]:
    """Return every legal name of the key's value with what it means, in the order in which messages list them."""
    paper = " + ".join(name for name, group in GROUPS.items() if group.paper)
    return {
        NONE: "nothing is aligned",
        **{name: group.meaning for name, group in GROUPS.items()},
        PAPER: f"the paper's three regions: {paper}",
        ALL: "every group for which the engine's preset has evidence",
        AUTO: "like all, from a probe of the engine at hand",
    }


def choices() -> tuple[str, ...]:
    """Return every legal name of the key's value.

    >>> choices()
    ('none', 'rope', 'swiglu', 'add_rms_norm', 'carry', 'paper', 'all', 'auto')
    """
    return tuple(meanings())


def arms() -> tuple[str, ...]:
    """Return the names that a measurement can run as they are: every one but ``none`` and ``auto``.

    >>> arms()
    ('rope', 'swiglu', 'add_rms_norm', 'carry', 'paper', 'all')
    """
    return tuple(name for name in choices() if name not in (NONE, AUTO))


@dataclass(frozen=True)
class Plan:
    """What will be patched: per site kind, the points the trainer stores today and those it will store.

    Args:
        groups: aligned groups, in the order of ``GROUPS``; empty for ``none``.
        engine: name of the preset that the groups are aligned to.
        roundings: (site kind, Rounding) for every site kind that is patched.
        trainer: name of the preset that describes the unpatched trainer.
        backend: how the regions run: ``auto``, ``compile`` or ``eager`` (``backend.BACKENDS``).
        preset: the engine's Preset itself, by which a running engine is judged; None for a plan made by hand. It does not
            count when plans are compared.
    """

    groups: tuple[str, ...]
    engine: str
    roundings: tuple[tuple[str, Rounding], ...]
    trainer: str = TRAINER
    backend: str = "auto"
    preset: presets.Preset | None = field(default=None, compare=False, repr=False)

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

    def as_dict(self) -> dict:
        """Return the plan as config files and JSON can hold it: what a driver hands to its workers.

        Raises:
            ValueError: a plan in an emulated format, which is for experiments in one process.
        """
        if self.format is not None:
            raise ValueError(f"plan {self}: a plan in an emulated format cannot be written down")
        return {
            "plan": VERSION,
            "groups": list(self.groups),
            "engine": self.engine,
            "roundings": {kind: sorted(rnd.points) for kind, rnd in self.roundings},
            "trainer": self.trainer,
            "backend": self.backend,
            "preset": None if self.preset is None else self.preset.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping, key: str = "rounding_align") -> Plan:
        """Return the plan that :meth:`as_dict` was made of.

        Raises:
            ValueError: not a plan that this release of the package has written.

        >>> plan = parse_plan("rope", engine="vllm_cpu")
        >>> Plan.from_dict(plan.as_dict()) == plan, Plan.from_dict(plan.as_dict()).preset == plan.preset
        (True, True)
        """
        try:
            if values["plan"] != VERSION:
                raise ValueError(f"version {values['plan']!r}, expected {VERSION}")
            preset = values["preset"]
            return cls(
                groups=tuple(values["groups"]),
                engine=values["engine"],
                roundings=tuple(
                    (kind, Rounding(values["roundings"][kind])) for kind in KINDS if kind in values["roundings"]
                ),
                trainer=presets.get(values["trainer"]).name,
                backend=backends.check(values["backend"]),
                preset=None if preset is None else presets.Preset.from_dict(preset, f"{key} preset"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{key}={values!r}: not a plan written by this package ({type(error).__name__}: {error})"
            ) from error


def build_plan(
    groups: Sequence[str],
    engine: presets.Preset,
    format: Format | None = None,
    trainer: presets.Preset | str = TRAINER,
    key: str = "rounding_align",
) -> Plan:
    """Return the plan that moves the points of ``groups`` from the trainer's preset to the engine's.

    With an emulated ``format`` every site is patched, aligned or not: nothing else would store in it.

    Args:
        groups: names of ``GROUPS``.
        engine: the engine's preset.
        format: an emulated format, or None for the model dtype.
        trainer: the preset that describes the unpatched trainer, or its name.
        key: the config key, for messages.

    Raises:
        ValueError: a group that the engine's preset, or the trainer's, says nothing about.

    >>> plan = build_plan(["rope"], presets.get("vllm_compiled"))
    >>> print(plan, plan.rounding("attention"), plan.rounding("mlp"))
    rope: hf_eager -> vllm_compiled {cos_sin} None
    """
    groups = tuple(group for group in GROUPS if group in groups)
    trainer = presets.get(trainer) if isinstance(trainer, str) else trainer
    for group in groups:
        for preset in (engine, trainer):
            if not any(preset.knows(kind) for kind, region in KINDS.items() if region == GROUPS[group].region):
                known = [
                    g for g, its in GROUPS.items() if any(preset.knows(k) for k, r in KINDS.items() if r == its.region)
                ]
                raise ValueError(
                    f"{key}={group!r}: preset {preset.name} says nothing about {group!r}; choose from {', '.join(known)}"
                )
    roundings = []
    for kind, region in KINDS.items():
        moved = frozenset().union(*(GROUPS[g].points for g in groups if GROUPS[g].region == region))
        moved = moved if engine.knows(kind) else frozenset()
        if moved or format is not None:
            points = (trainer.at(kind) - moved) | (engine.at(kind) & moved)
            roundings.append((kind, Rounding(points, format)))
    return Plan(groups, engine.name, tuple(roundings), trainer.name, preset=engine)


@dataclass(frozen=True)
class Request:
    """A config value, checked: what is asked for, before the engine is known.

    Args:
        names: of :func:`choices`.
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
        return self.names != (NONE,)

    def plan(
        self, preset: presets.Preset, format: Format | None = None, trainer: presets.Preset | str = TRAINER
    ) -> Plan:
        """Return the plan for an engine, in an emulated format if one is given.

        Raises:
            ValueError: ``auto`` with an engine that was not probed, or a group that the preset says nothing about.
        """
        groups: set[str] = set()
        for name in self.names:
            if name == AUTO and not preset.probed:
                raise ValueError(
                    f"{self.key}={self.value!r}: 'auto' takes the plan from a probe of the engine, and {preset.name} is a "
                    "preset; give the file that `verl-rounding-align probe --json` wrote as the engine, or choose from "
                    f"{', '.join(c for c in choices() if c != AUTO)}"
                )
            if name == PAPER:
                groups.update(g for g, group in GROUPS.items() if group.paper)
            elif name in (ALL, AUTO):
                groups.update(g for g in GROUPS if preset.rests_on(g) != presets.UNPROVEN)
            elif name != NONE:
                groups.add(name)
        plan = build_plan(tuple(groups), preset, format, trainer, self.key)
        return replace(plan, backend=self.backend)


def _names(value, key: str) -> list[str]:
    """Return the region names of a config value: a string joined with ``+``, a list, or None for none."""
    if value is None:
        return [NONE]
    if isinstance(value, str):
        return [part.strip() for part in value.split("+")]
    if isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return list(value)
    raise ValueError(
        f"{key}={value!r}: expected a name, names joined with +, or a list of names from {', '.join(choices())}"
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
        if name not in choices():
            raise ValueError(
                f"{key}={value!r}: unknown region {name!r}; choose from {', '.join(choices())} (join with +)"
            )
        if name in (NONE, AUTO) and len(names) > 1:
            raise ValueError(f"{key}={value!r}: {name!r} cannot be joined with another region")
    return Request(tuple(names), engine, backend, value, key)


def find_preset(engine: str | Mapping | presets.Preset, key: str = "engine", **known) -> presets.Preset:
    """Return the preset that a config names: by its name, by a probe's JSON file, or by its fields.

    Args:
        engine: one of these, or a preset.
        key: the config key, for messages.
        known: ``spec`` and ``mode`` for a probe's file, see :func:`engines.probe.result.load`.

    Raises:
        ValueError: unknown name, or a file that is no probe's.
    """
    if isinstance(engine, presets.Preset):
        return engine
    if isinstance(engine, Mapping):
        return presets.Preset.from_dict(engine, key)
    if engine == AUTO:
        raise ValueError(
            f"{key}='auto': the engine is probed by the framework's driver or by `verl-rounding-align plan --auto`; "
            "elsewhere give the file that `verl-rounding-align probe --json` wrote, or a preset's name"
        )
    from .engines.probe import result

    return result.load(engine, key=key, **known) if result.is_file(engine) else presets.get(engine, key=key)


def parse_plan(
    value,
    engine: str | Mapping | presets.Preset = "vllm_compiled",
    key: str = "rounding_align",
    format: str | Format | None = None,
    trainer: presets.Preset | str = TRAINER,
    **known,
) -> Plan:
    """Return the plan for a config value.

    Args:
        value: None, ``none``, a group's name, ``paper`` (the paper's groups), ``all`` (every group for which the engine's
            preset has evidence), ``auto`` (the same, of a probed engine), names joined with ``+``, a list of names, or a
            mapping ``{regions: <any of these>, engine: <preset name, or a probe's JSON file>, backend:
            auto|compile|eager}``, the last two optional, whose engine wins over the argument.
        engine: the engine's preset: its name (see ``presets.PRESETS``), a probe's JSON file, or a Preset.
        key: the config key the value came from, for messages.
        format: an emulated format (``formats.CHOICES``) instead of the model dtype.
        trainer: the preset that describes the unpatched trainer, or its name.
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
    return request.plan(preset, formats.parse(format), trainer)
