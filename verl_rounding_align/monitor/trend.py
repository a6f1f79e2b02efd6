"""Is a noisy positive series, one value per training step, growing, or has it jumped? An online test with an error rate.

The series is a run's `mismatch_k3`, and the tests look at x = log(value), where growth is a slope and a jump is a shift.
The spread is learnt from the series itself, because a step's own standard error covers its tokens only, not what differs
from step to step. Only order statistics of x are used, so heavy tails need no model. A fall never alarms.

**Growth** compares the medians of consecutive blocks of ``BLOCK`` steps by their ranks. It assumes that these medians are
exchangeable where nothing grows. Then a false alarm has probability at most 0.5 % per 1,000 steps, and this adds up to
5 % in 10,000. Noise that wanders slowly over many blocks breaks the assumption.

**Jump** asks whether all of the last ``RECENT`` values but one lie far above the ``REFERENCE`` steps before them. Its limits
were found by simulation: at most 0.5 % of false alarms in 1,000 steps, and at most 0.5 % at the one look after a resume.

**Smallest change.** Neither alarms below a rise of ``SMALLEST``, however quiet the series is.

**Slope** is a description and takes no part in the alarm: Theil-Sen over the last ``WINDOW`` steps with Sen's (1968) 95 %
interval, corrected for autocorrelation.

The page `docs/pages/alarm.md` derives the tests and tabulates how often they are wrong and how soon they are right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK, BLOCKS = 20, 50  # steps in a block; starts that are looked back on: 1,000 steps
BETS = (0.1, 0.3, 0.5, 0.7)
GROWTH = 200 * 1000 / BLOCK  # 0.5 % in 1,000 steps, by Ville's inequality and a union bound
CHANCE = "a false alarm has probability at most 0.5 % per 1,000 steps if blocks of 20 are exchangeable"
RECENT, REFERENCE, LEAST = 6, 200, 60
JUMP, RESUMED = 7.0, 4.0  # simulated: at most 0.5 % in 1,000 steps; at most 0.5 % at one look
# The smallest rise of k3 that matters. k3 is half a mean square, so the log-prob differences rise by 5 %. The standard error
# of k3 in the quickstart's runs is 3 to 7 % over all their steps, and aligning all regions divides it by 2.8 there.
SMALLEST = 0.10
WINDOW, WINDOW_LEAST = 200, 30
KEEP = BLOCK * BLOCKS
NAN = float("nan")


def starts_evidence(blocks: np.ndarray) -> np.ndarray:
    """Return the evidence for growth since every block, M_s of docs/pages/alarm.md.

    For each start s it is a martingale with mean 1 where nothing grows.

    Args:
        blocks: (..., blocks), medians of the blocks, oldest first.

    Returns:
        (..., blocks), one M_s for each start s.
    """
    size = blocks.shape[-1]
    n, k = np.arange(1, size + 1)[:, None], np.arange(1, size + 1)
    k = np.minimum(k, n)
    table = np.mean([n * ((k / n) ** a - ((k - 1) / n) ** a) for a in BETS], 0)
    new, start = np.arange(size)[:, None], np.arange(size)
    above = (blocks[..., None, :] >= blocks[..., :, None]) & (start < new)  # [new, old]: old is at least as high
    rank = np.flip(np.cumsum(np.flip(above, -1), -1), -1)  # [new, start]: of those, how many since start
    e = np.where(start <= new, table[np.maximum(new - start, 0), rank], 1.0)
    return e.prod(-2)


def growth_evidence(blocks: np.ndarray) -> np.ndarray:
    """Return the largest M_s over all starts, (...), for block medians (..., blocks), oldest first.

    >>> float(growth_evidence(np.arange(10.0))) > GROWTH, float(growth_evidence(-np.arange(10.0))) <= 1
    (True, True)
    """
    return starts_evidence(blocks).max(-1)


def growing(blocks: np.ndarray, limit: float = GROWTH) -> np.ndarray:
    """Return whether the series grows: (..., blocks) -> (...), bool.

    There must be a start with enough evidence since when the newest block lies ``SMALLEST`` above the median of the blocks
    before it.
    """
    enough = starts_evidence(blocks) >= limit
    for start in range(blocks.shape[-1] - 1):
        if enough[..., start].any():
            rise = blocks[..., -1] - np.median(blocks[..., start:-1], -1)
            enough[..., start] &= rise >= math.log1p(SMALLEST)
    enough[..., -1] = False  # nothing lies between the newest block and itself
    return enough.any(-1)


def held(x: np.ndarray) -> np.ndarray:
    """Return the second lowest of every ``RECENT`` consecutive values: (..., n) -> (..., n - RECENT + 1)."""
    windows = np.lib.stride_tricks.sliding_window_view(x, RECENT, -1)
    return np.partition(windows, 1, -1)[..., 1]


def jumped(h: np.ndarray, limit: float) -> np.ndarray:
    """Return whether the last entry of ``h`` has jumped, against those that share no step with it: (..., n) -> (...), bool.

    It lies ``limit`` spreads, and ``SMALLEST``, above their median. The spread is 1.4826 times the median absolute
    deviation, which is the standard deviation of normal noise.

    Args:
        h: what :func:`held` returns.
        limit: ``JUMP`` or ``RESUMED``.
    """
    reference = h[..., :-RECENT]
    middle = np.median(reference, -1)
    spread = 1.4826 * np.median(np.abs(reference - middle[..., None]), -1)
    return h[..., -1] - middle >= np.maximum(limit * spread, math.log1p(SMALLEST))


def slope(steps: np.ndarray, x: np.ndarray) -> tuple[float, float, float]:
    """Return the Theil-Sen slope of ``x`` over ``steps`` and its 95 % interval (Sen 1968), in units of x per step.

    Neighbouring steps are correlated, so the variance of Kendall's S is multiplied by (1 + r) / (1 - r), where r is the
    lag-1 autocorrelation of the residuals, at least 0.

    Args:
        steps: (n,), increasing.
        x: (n,).
    """
    n = len(x)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort((x[j] - x[i]) / (steps[j] - steps[i]))
    middle = float(np.median(slopes))
    rest = x - middle * steps
    rest = rest - np.median(rest)
    r = float(np.clip((rest[1:] @ rest[:-1]) / max(rest @ rest, 1e-300), 0.0, 0.95))
    reach = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18 * (1 + r) / (1 - r)) / 2
    low = slopes[max(math.floor(len(slopes) / 2 - reach), 0)]
    high = slopes[min(math.ceil(len(slopes) / 2 + reach), len(slopes) - 1)]
    return middle, float(low), float(high)


@dataclass(frozen=True)
class Reading:
    """What is known after a step. The trend is NaN until there are ``WINDOW_LEAST`` steps.

    Args:
        trend: relative growth per 100 steps, exp(100 * slope) - 1. 0 is flat, 1 is doubling.
        trend_low, trend_high: its 95 % interval.
        alarm: 1 from the step on at which the alarm was raised, else 0.
        warning: what to tell the user, at that step only. It is empty at all others.
    """

    trend: float = NAN
    trend_low: float = NAN
    trend_high: float = NAN
    alarm: int = 0
    warning: str = ""

    def values(self) -> dict[str, float]:
        """Return name -> number for a logger."""
        return {name: value for name, value in vars(self).items() if name != "warning"}


class Detector:
    """The tests of the module's docstring, fed one step at a time. There is one alarm, then silence.

    >>> detector = Detector()
    >>> readings = [detector.update(step, 1e-4 * 2 ** (step / 20)) for step in range(1, 201)]
    >>> [reading.warning.split("; ")[0] for reading in readings if reading.warning]
    ['rising: x32.00 per 100 steps (95 % interval 32.00 to 32.00)']
    """

    def __init__(self):
        self.steps: list[int] = []
        self.x: list[float] = []  # log of the values at these steps, the last KEEP
        self.count = 0  # values ever taken, which says where blocks end
        self.alarm: int | None = None  # the step that raised it
        self.resumed: int | None = None  # the step that training resumed from

    def update(self, step: int, value: float) -> Reading:
        """Take the value of a step. One that is not a positive number is left out.

        Raises:
            ValueError: the step is not after the last one.
        """
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step {step} is not after step {self.steps[-1]}")
        warning = ""
        if math.isfinite(value) and value > 0:
            self.steps, self.x = [*self.steps, step][-KEEP:], [*self.x, math.log(value)][-KEEP:]
            self.count += 1
            warning = self._look() if self.alarm is None else ""
            if warning:
                self.alarm = step
        trend = (NAN,) * 3
        if len(self.x) >= WINDOW_LEAST:
            found = slope(np.array(self.steps[-WINDOW:], float), np.array(self.x[-WINDOW:]))
            trend = tuple(math.expm1(min(100 * b, 700)) for b in found)
        if warning == "rising":
            one, low, high = (1 + value for value in trend)
            warning = f"rising: x{one:.2f} per 100 steps (95 % interval {low:.2f} to {high:.2f}); {CHANCE}"
        return Reading(*trend, int(self.alarm is not None), warning)

    def _look(self) -> str:
        x = np.array(self.x)
        blocks = min(self.count, len(x)) // BLOCK
        if self.count % BLOCK == 0 and blocks > 1:
            medians = np.median(x[-blocks * BLOCK :].reshape(blocks, BLOCK), -1)
            if growing(medians):
                return "rising"
        if len(x) < LEAST + RECENT:
            return ""
        resumed = self.resumed is not None and sum(step > self.resumed for step in self.steps[-RECENT - 1 :]) == RECENT
        x = x[-REFERENCE - RECENT :]
        if not jumped(held(x), RESUMED if resumed else JUMP):
            return ""
        factor = math.exp(np.median(x[-RECENT:]) - np.median(x[:-RECENT]))
        since = f"since training resumed from step {self.resumed}" if resumed else f"in the last {RECENT} steps"
        return f"jumped: x{factor:.2f} {since}, against the {len(x) - RECENT} steps before"

    def state(self) -> dict:
        """Return what :meth:`restore` needs, as JSON has it."""
        return {"version": 1, "count": self.count, "steps": self.steps, "x": self.x, "alarm": self.alarm}

    @classmethod
    def restore(cls, state: dict, step: int) -> Detector:
        """Return the detector as it was after ``step``, from which training resumes. Later steps are forgotten.

        Raises:
            ValueError: the state is not one of :meth:`state`.
        """
        try:
            steps, x = [int(s) for s in state["steps"]], [float(v) for v in state["x"]]
            count, alarm = int(state["count"]), None if state["alarm"] is None else int(state["alarm"])
            sound = state["version"] == 1 and len(steps) == len(x) <= count and all(map(math.isfinite, x))
            sound = sound and all(a < b for a, b in zip(steps, steps[1:], strict=False))
        except (KeyError, TypeError, ValueError, OverflowError):
            sound = False
        if not sound:
            raise ValueError("not the state of a trend detector")
        found = cls()
        kept = sum(s <= step for s in steps)
        found.steps, found.x = steps[:kept], x[:kept]
        found.count = count - (len(steps) - kept)
        found.alarm = alarm if alarm is not None and alarm <= step else None
        found.resumed = step
        return found
