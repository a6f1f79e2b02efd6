"""What a probe found, kept as JSON, and the preset that follows from it.

The file holds the model's sizes, one fingerprint per mode, and one row per mode and site kind. A preset from it is named
``probed-<fingerprint>`` and is verified on that fingerprint alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..presets import BITWISE, TRAINER, UNPROVEN, Preset
from ..presets import get as get_preset
from ..regions import GROUPS, KINDS
from .fingerprint import Fingerprint
from .probe import EXACT, Difference, Row, to_json
from .spec import ModelSpec


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
        return cls(ModelSpec.from_dict(payload["spec"]), tuple(map(_row, payload["rows"])), prints)

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

        A group has evidence if every site kind of it that the model has gave exactly one answer; kinds that the model
        has not keep the trainer's points. Without an exact answer the best subset stands there, unproven.
        """
        rows = {row.kind: row for row in self.rows if row.mode == mode}
        trainer, found = get_preset(TRAINER).points, self.fingerprints[mode]
        points = {
            kind: trainer[kind]
            if kind not in rows
            else rows[kind].best
            if rows[kind].points is None
            else rows[kind].points
            for kind in KINDS
        }
        evidence = {
            group: BITWISE
            if all(rows[kind].verdict == EXACT for kind, r in KINDS.items() if r == region and kind in rows)
            else UNPROVEN
            for group, (region, _) in GROUPS.items()
        }
        doubts = [
            f"{row.kind}: {row.verdict}, best {{{', '.join(sorted(row.best))}}} on {row.share:.4%}"
            for row in rows.values()
            if row.verdict != EXACT
        ]
        return Preset(
            name=f"probed-{found.key}",
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


def _row(values: Mapping) -> Row:
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
    path, _, named = str(file).partition(".json")
    path, named = Path(path + ".json").expanduser(), named.removeprefix(":") or None
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
    """Return whether an engine is named by a probe's file rather than by a preset's name."""
    return isinstance(engine, str) and ".json" in engine
