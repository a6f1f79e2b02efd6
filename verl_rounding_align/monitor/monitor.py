"""What every framework logs in a step: mismatch, phantom clipping, trend and alarm. It never stops a training run.

An integration fetches the tensors of a step once, puts them into a :class:`Batch` and logs what
:meth:`Monitor.observe` returns. The monitor keeps all that it knows in the instance.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .mismatch import Mismatch, mismatch
from .phantom import Phantom, phantom
from .trend import Detector

logger = logging.getLogger("verl_rounding_align")
HISTORY = "rounding_align_trend.json"  # the usual name of the history, beside a run's checkpoints


class Missing(ValueError):
    """Something that a metric needs is not there. The reason is said once, without a traceback."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of one step, padded, each (sequences, tokens), or the reason why there are none.

    Args:
        trainer: log-probs under the trainer before the update, any floating dtype (nats).
        rollout: log-probs that the engine returned, any floating dtype (nats).
        response_mask: non-zero on response tokens.
        loss_mask: non-zero on the tokens of the loss, after a correction has rejected some. None: ``response_mask``.
        advantages: of which phantom clipping reads the sign. None where there are none.
        clip: (low, high) of the loss's clip range [1 - low, 1 + high]. None where there is none.
        no_clip: why there is no clip range, where phantom clipping is wanted. With neither ``clip`` nor ``no_clip`` there
            are no metrics of phantom clipping.
        missing: why there are no log-probs to compare. The tensors are not read then.
        stale: why rollout and trainer log-probs are of different weights (an asynchronous trainer). Empty where they are
            of the same weights. The metrics are then called staleness.
    """

    trainer: torch.Tensor | None = None
    rollout: torch.Tensor | None = None
    response_mask: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    clip: tuple[float, float] | None = None
    no_clip: str = ""
    missing: str = ""
    stale: str = ""

    def obstacle(self, *names: str) -> str:
        """Return why the fields ``names`` cannot be compared token by token, or an empty string."""
        fields = {name: getattr(self, name) for name in names}
        for name, value in fields.items():
            what = name.replace("_", " ")
            if value is None:
                return f"the batch has no {what}"
            if not isinstance(value, torch.Tensor):
                return f"{what} is a {type(value).__name__}, not a tensor (sequences, tokens)"
            if value.is_nested:
                return f"{what} is a nested tensor, and a padded one (sequences, tokens) is needed"
        if len({value.shape for value in fields.values()}) > 1 or any(value.dim() != 2 for value in fields.values()):
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in fields.items())
            return f"{shapes} must have one shape (sequences, tokens)"
        if len({value.device for value in fields.values()}) > 1:
            devices = ", ".join(f"{name} on {value.device}" for name, value in fields.items())
            return f"{devices} must be on one device"
        return ""


@dataclass(frozen=True)
class Resume:
    """Where training resumes from.

    Args:
        step: the last step of the checkpoint. What the history knows of later steps is forgotten.
        history: the file that the resumed run wrote, or None where there is none.
    """

    step: int
    history: Path | str | None = None


class Monitor:
    """The metrics of a training run, step by step.

    No method raises because of data. Where a metric cannot be computed, a flag (``missing``, ``phantom_missing``,
    ``trend_missing``) is 1 and the reason is said once. An unexpected error is logged once with its traceback too. A value
    that cannot be computed is left out of what is returned, so no value is ever NaN or infinite.

    Args:
        prefix: what stands before the names of ``METRICS``, with a slash between.
        say: takes a line for the user. By default it is printed, with the prefix before it.
        history: the file that keeps the trend for a resume, written at every step, whole or not at all. None: no file.
        resume: where training resumes from. None: a new run, and an older history is overwritten.
        dump: the framework's setting that dumps rollouts, which a warning then names. Empty where there is none.

    Where several processes train together, one of them has a monitor: the one that logs and has the whole batch.

    >>> x = torch.tensor([[-1.0, -2.0]])
    >>> found = Monitor().observe(1, Batch(trainer=x, rollout=x + 0.5, response_mask=torch.ones(1, 2)))
    >>> found["rounding_align/mismatch_kl"], found["rounding_align/tokens_total"]
    (0.5, 2)
    """

    def __init__(
        self,
        prefix: str = "rounding_align",
        say: Callable[[str], None] | None = None,
        history: Path | str | None = None,
        resume: Resume | None = None,
        dump: str = "",
    ):
        self.prefix = prefix
        self._say = say if say is not None else self._print
        self._said: set[str] = set()
        self._history = None if history is None else Path(history)
        self._dump = f" ({dump})" if dump else ""
        self._detector = Detector()
        if resume is not None:
            self._resume(resume)

    # ------------------------------------------------------------------------------------------------- every step

    def observe(self, step: int, batch: Batch) -> dict[str, float]:
        """Return the metrics of a step: :meth:`measure` and :meth:`follow` in one.

        Args:
            step: the training step, larger than at the last call.
            batch: its tensors.
        """
        found = self.measure(batch)
        return found | self.follow(step, found)

    def measure(self, batch: Batch) -> dict[str, float]:
        """Return mismatch and phantom clipping of a batch, without the trend.

        A framework whose step has several sub-steps calls it for each of them, combines what it returns as it combines
        its other metrics, and calls :meth:`follow` once with the result.
        """
        missing = {"tokens_total": 0, "nonfinite_total": 0, "missing": 1}
        with torch.no_grad():
            numbers = self._attempt("mismatch metrics missing", self._mismatch, batch, default=missing)
            missing = {"phantom_missing": 1}
            numbers |= self._attempt("phantom clipping missing", self._phantom, batch, default=missing)
        stale = getattr(batch, "stale", "")
        if stale:
            numbers = {_stale(name): value for name, value in numbers.items()}
            self.say_once(
                f"rollout and trainer log-probs are of different weights ({stale}): the metrics staleness_* say how far apart "
                "the weights are, rounding included; mismatch_*, trend and alarm are left out"
            )
        return self._named(numbers | {"stale": int(bool(stale))})

    def _mismatch(self, batch: Batch) -> dict[str, float]:
        names = ("trainer", "rollout", "response_mask")
        missing = batch.missing or batch.obstacle(*names)
        found = Mismatch(missing=missing) if missing else mismatch(*(getattr(batch, name) for name in names))
        if found.missing:
            self.say_once(f"mismatch metrics missing: {found.missing}")
        numbers = found.values()
        return numbers | {"tokens_total": numbers.pop("tokens"), "nonfinite_total": numbers.pop("nonfinite")}

    def _phantom(self, batch: Batch) -> dict[str, float]:
        if batch.clip is None and not batch.no_clip:
            return {}
        mask = "response_mask" if batch.loss_mask is None else "loss_mask"
        names = ["trainer", "rollout", mask] + ["advantages"] * (batch.advantages is not None)
        missing = batch.missing or ("" if batch.clip is not None else batch.no_clip) or batch.obstacle(*names)
        if missing:
            found = Phantom(missing=missing)
        else:
            found = phantom(batch.trainer, batch.rollout, getattr(batch, mask), batch.advantages, *batch.clip)
        if found.missing and not batch.missing:  # that has been said
            self.say_once(f"phantom clipping missing: {found.missing}")
        return found.values()

    def follow(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take a step's ``mismatch_k3`` into the trend, keep the history, and return the metrics of trend and alarm.

        Nothing is taken and nothing returned where the metrics are of different weights (``stale``).

        Args:
            step: the training step, larger than at the last call.
            metrics: what :meth:`measure` returned, or a framework's combination of it. Other metrics in it do not matter.
        """
        missing = {"trend_missing": 1}
        numbers = self._attempt("trend of mismatch_k3 missing", self._advance, step, metrics, default=missing)
        if numbers:
            self._attempt("trend of mismatch_k3: its history is not kept for a resume", self._keep)
        return self._named(numbers)

    def _advance(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        value = metrics.get(f"{self.prefix}/mismatch_k3")
        if value is None and metrics.get(f"{self.prefix}/stale"):
            return {}
        step = int(step)
        if self._detector.steps and step <= self._detector.steps[-1]:
            raise Missing(f"step {step} is not after step {self._detector.steps[-1]}")
        reading = self._detector.update(step, math.nan if value is None else float(value))
        if reading.warning:
            self.say_once(
                f"WARNING: step {step}: mismatch_k3 {reading.warning}. To see where it comes from: `verl-rounding-align "
                f"triage` on a rollout dump{self._dump}, `verl-rounding-align gap` on fixed weights"
            )
        return reading.values() | {"trend_missing": 0}

    def _named(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers under the prefix, without those that could not be computed."""
        for name, value in numbers.items():
            if math.isinf(value):  # log-probs that differ by more than 700 nats
                self.say_once(f"{name} is too large for a number and is left out")
        return {f"{self.prefix}/{name}": value for name, value in numbers.items() if math.isfinite(value)}

    # -------------------------------------------------------------------------------------------------- history

    def state(self) -> dict:
        """Return what :meth:`restore` needs, as JSON has it, for a framework that keeps it in its own checkpoint."""
        return self._detector.state()

    def restore(self, state: dict, step: int) -> None:
        """Take a state in place of what is known. Later steps than ``step``, which training resumes from, are forgotten."""
        anew = f"trend of mismatch_k3: starts anew at step {step}, a jump at this resume cannot be seen"
        self._detector = self._attempt(anew, _restored, state, step, default=None) or Detector()

    def _resume(self, resume: Resume) -> None:
        anew = f"trend of mismatch_k3: starts anew at step {resume.step}, a jump at this resume cannot be seen"
        with self.guard(anew):
            if resume.history is None:
                raise Missing("there is no history of the run before")
            try:
                state = json.loads(Path(resume.history).read_text())
            except ValueError as error:
                raise Missing(f"{resume.history} is not JSON: {error}") from error
            self._detector = _restored(state, resume.step)
            steps = len(self._detector.steps)
            self.say_once(f"trend of mismatch_k3: resumed at step {resume.step} with {steps} steps of {resume.history}")

    def _keep(self) -> None:
        if self._history is not None:
            write_json(self._history, self.state())

    # ------------------------------------------------------------------------------------------- what users are told

    def say_once(self, line: str, key: str = "") -> None:
        """Say a line, unless it has been said before.

        Args:
            line: one line of text.
            key: lines with the same key count as one. By default lines do that differ in their digits only.
        """
        if not self._first(key or re.sub(r"\d+", "#", line)):
            return
        try:
            self._say(line)
        except Exception:
            logger.exception("rounding_align: a line could not be said: %s", line)

    def _first(self, key: str) -> bool:
        """Return whether ``key`` is new, and remember it."""
        new = key not in self._said
        self._said.add(key)
        return new

    def _print(self, line: str) -> None:
        print(f"{self.prefix}: {line}", flush=True)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Keep errors inside a block from the training run, for what an integration does around the monitor.

        A :class:`Missing` or an ``OSError`` is said once, after ``what``. Any other error is a fault of the program, so its
        traceback is logged once too.
        """
        try:
            yield
        except (Missing, OSError) as error:
            self.say_once(f"{what}: {brief(error)}")
        except Exception as error:
            key = f"{what}: {type(error).__name__}"  # its text may differ at every step
            if self._first(f"traceback of {key}"):
                logger.exception("rounding_align: an unexpected error, and training goes on. %s", what)
            self.say_once(f"{what}: {brief(error)}", key)

    def _attempt(self, what: str, function: Callable, *args, default=None):
        """Return ``function(*args)``, or ``default`` where it fails."""
        with self.guard(what):
            return function(*args)
        return default


def _stale(name: str) -> str:
    """Return the name of a metric where the weights differ."""
    if name.startswith("abs_diff_"):
        return f"staleness_{name}"
    return name if name == "phantom_missing" else re.sub("^(mismatch|phantom)_", "staleness_", name)


def _restored(state: dict, step: int) -> Detector:
    try:
        return Detector.restore(state, step)
    except ValueError as error:
        raise Missing(str(error)) from error


def brief(error: Exception) -> str:
    """Return an error as one line: the reason alone where it was foreseen, with the error's type before it otherwise."""
    text = (str(error).strip().splitlines() or [""])[-1]
    return text if isinstance(error, Missing) else f"{type(error).__name__}: {text}"


def write_json(file: Path, value) -> None:
    """Write a JSON file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(value))
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
