"""What a probe found, kept as JSON, and the preset that follows from it.

The file holds the model's sizes, one fingerprint per mode, and one row per mode and site kind. A preset from it is named
``probed-<digits>``, which follow from its points and its fingerprint, and is verified on that fingerprint alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...regions import GROUPS, KINDS
from ..fingerprint import CONTRADICTED, Fingerprint
from ..presets import BITWISE, TRAINER, UNPROVEN, Preset, resolve
from ..presets import get as get_preset
from ..spec import ModelSpec
from .answers import refute, to_json
from .bitwise import EXACT, Difference, Row


@dataclass(frozen=True)
class Result:
    """Rows of one or both modes of an engine, for one model.

    Args:
        spec: the model's sizes.
        rows: of every mode probed.
        fingerprints: mode -> the engine as it was.
    """

    spec: ModelSpec
    rows: tuple[Row, ...]
    fingerprints: Mapping[str, Fingerprint]

    def to_json(self, **header) -> str:
        """Return everything as JSON, with a header (versions)."""
        prints = {mode: vars(f) for mode, f in self.fingerprints.items()}
        return to_json(self.rows, **header, spec=self.spec.as_dict(), fingerprints=prints)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Return what :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: something else; see :func:`load` for a message.
        """
        payload = json.loads(text)
        prints = {mode: Fingerprint.from_dict(values) for mode, values in payload["fingerprints"].items()}
        return cls(ModelSpec.from_dict(payload["spec"]), tuple(map(row_from_json, payload["rows"])), prints)

    def mode(self, mode: str | None, key: str) -> str:
        """Return ``mode`` if it was probed; None stands for the only one.

        Raises:
            ValueError: it was not probed, or several were.
        """
        if mode in self.fingerprints:
            return mode
        if mode is None and len(self.fingerprints) == 1:
            return next(iter(self.fingerprints))
        what = "which mode is meant" if mode is None else f"no rows for mode {mode!r}"
        raise ValueError(f"{key}: {what}; it holds {', '.join(self.fingerprints)}; write FILE:MODE")

    def preset(self, mode: str) -> Preset:
        """Return what the engine stores in ``mode`` as a preset.

        A group has evidence if every site kind of its region that the model has gave exactly one answer. Kinds that the
        model does not have keep the trainer's points. Without an exact answer the best subset stands there, unproven. The
        preset says nothing about a region that was not probed.
        """
        rows = {row.kind: row for row in self.rows if row.mode == mode}
        trainer, found = get_preset(TRAINER), self.fingerprints[mode]
        probed = {KINDS[kind] for kind in rows}
        points = {kind: trainer.at(kind) for kind, region in KINDS.items() if region in probed}
        points |= {kind: row.best if row.points is None else row.points for kind, row in rows.items()}
        evidence = {
            group: BITWISE
            if all(
                rows[kind].verdict == EXACT for kind, region in KINDS.items() if region == its.region and kind in rows
            )
            else UNPROVEN
            for group, its in GROUPS.items()
            if its.region in probed
        }
        doubts = [
            f"{row.kind}: {row.verdict}, best {{{', '.join(sorted(row.best))}}} on {row.share:.4%}"
            for row in rows.values()
            if row.verdict != EXACT
        ]
        return Preset(
            name=f"probed-{_digest(points, found)}",
            points=points,
            evidence=evidence,
            source=f"probe of {found}",
            engine=found.engine,
            device=found.device,
            eager=mode == "eager",
            versions=(found.version, found.version),
            note="; ".join(doubts),
            verified=(found,),
        )

    def refuted(self, note: Callable[[str], None] = lambda text: None) -> list[str]:
        """Return one line per site at which the preset that covers the engine is wrong.

        Args:
            note: called with a line where no preset claims anything about the engine.
        """
        lines = []
        for mode, found in self.fingerprints.items():
            try:
                preset = resolve(found.engine, found.version, found.device, mode == "eager")
            except ValueError as error:  # a release that no preset covers
                note(f"{mode}: {error}")
                continue
            judgement = preset.judge(found, found.dtype)  # the points are asked about, in whatever dtype
            if judgement.status == CONTRADICTED:  # other settings than the preset is for
                note(f"{mode}: {preset.name} is for another engine: {judgement.why}")
                continue
            lines += refute([row for row in self.rows if row.mode == mode], preset)
        return lines


def _digest(points: Mapping[str, frozenset[str]], found: Fingerprint) -> str:
    text = repr((found.key, sorted((kind, sorted(names)) for kind, names in points.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def row_from_json(values: Mapping) -> Row:
    """Return a Row from its JSON."""

    def points(x):
        return None if x is None else frozenset(x)

    differs = values["differs"] and Difference(**{**values["differs"], "index": tuple(values["differs"]["index"])})
    sets = {name: points(values[name]) for name in ("points", "inert", "best", "runner_up")}
    matches = tuple(map(frozenset, values["matches"]))
    return Row(**{**values, **sets, "matches": matches, "differs": differs})


def load(file: str | Path, spec: ModelSpec | None = None, mode: str | None = None, key: str = "engine") -> Preset:
    """Return the preset of a probe's JSON file.

    Args:
        file: its path; ``FILE.json:compiled`` names a mode where the file holds both.
        spec: sizes of the model that will be aligned; None where they are not known.
        mode: ``compiled`` or ``eager``, if known.
        key: the config key, for messages.

    Raises:
        ValueError: no such file, not a probe's, another model's, or no rows for the mode.
    """
    path, named = re.fullmatch(r"(.*?)(?::(\w+))?", str(file), re.DOTALL).groups()
    path = Path(path).expanduser()
    key = f"{key}={str(file)!r}"
    if named and mode and named != mode:
        raise ValueError(f"{key}: names mode {named!r}, and the engine runs {mode}")
    try:
        result = Result.from_json(path.read_text())
    except OSError as error:
        raise ValueError(f"{key}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{key}: not a result of `verl-rounding-align probe --json` ({type(error).__name__}: {error})"
        ) from error
    if spec is not None and spec != result.spec:
        other = {n: (x, spec.as_dict()[n]) for n, x in result.spec.as_dict().items() if spec.as_dict()[n] != x}
        text = ", ".join(f"{name} {probed!r}, here {here!r}" for name, (probed, here) in other.items())
        raise ValueError(f"{key}: the probe was made for another model ({text}); probe this one")
    return result.preset(result.mode(mode or named, key))


def is_file(engine: object) -> bool:
    """Return whether an engine is named by a probe's file rather than by a preset's name.

    >>> is_file("probe.json"), is_file("probe.json:eager"), is_file("vllm_cpu")
    (True, True, False)
    """
    return isinstance(engine, str) and re.search(r"\.json(:\w+)?$", engine) is not None
