"""Is a noisy positive series, one value per training step, growing, or has it jumped? An online test with an error rate.

The series is verl's run of `mismatch_k3`; everything is done on x = log(value), where growth is a slope and a jump a
shift. The spread is learnt from the series itself (a step's own standard error covers its tokens only, not what differs
from step to step), and nothing but order statistics of x is used, so heavy tails need no model. A fall never alarms.

**Growth.** Let b_1, b_2, ... be the medians of consecutive blocks of ``BLOCK`` steps (blocks, because neighbouring steps
are correlated and neighbouring blocks hardly). Where nothing changes from block s on, they are exchangeable, the rank k
(1: highest) of b_u among the n blocks b_s..b_u is uniform on 1..n and independent of the earlier ranks, and

    e(k, n) = mean over a in BETS of n * ((k/n)^a - ((k-1)/n)^a)      has expectation 1, and is large where k is small.

So M_s(u) = e * e * ... over the blocks s..u is a martingale of mean 1 in the filtration of those ranks, and Ville's
inequality gives P(M_s ever >= GROWTH) <= 1 / GROWTH. The alarm is at max over s of M_s(u) >= GROWTH, over the last
``BLOCKS`` starts. A union bound over the starts covers all looks together: in n steps without growth its probability is
at most (n / BLOCK) / GROWTH: 0.5 % per 1,000 steps, and it adds up, to 5 % in 10,000. (Their sum would detect a little
sooner, but the M_s have different filtrations, so it is no submartingale.) Ties count as the lower rank, which only lowers
e. This is the probability of an alarm where nothing grows, not the probability that a series that has alarmed grows; and it
holds where blocks are exchangeable: noise that wanders over many blocks exceeds it (`wander` below).

**Jump.** h_t = the second lowest of the last ``RECENT`` values (so all of them but one are at least that high);
z = (h_t - median h) / (1.4826 * median |h - median h|), over the h of the ``REFERENCE`` steps before those (``LEAST`` at
least). Correlated noise widens h's spread as it widens h_t. Alarm at z >= JUMP; once, ``RECENT`` steps after a resume,
already at z >= RESUMED: the moment is known, so there is one look instead of a thousand. Both limits were found by
simulation.

**Operating characteristics**, by simulation of 2,000 series of 1,000 steps (false alarms) and 400 series (steps from the
change at step 300 to the alarm: median, 95 % of series), printed by `python tests/test_trend.py`. Noise in x has sd 0.2
(false alarms do not depend on it, delays do): independent; AR(1) with rho 0.5 and 0.8; Student's t with 3 degrees of
freedom; `wander`, independent plus AR(1) with rho 0.95 and sd 0.1. "later": not within 400 steps
(1,100 for x2 over 1000).

                             iid      ar0.5      ar0.8         t3     wander
    false alarms           0.30%      0.30%      0.35%      0.40%      1.85%    <- slow wander exceeds 1 %
      at a resume          0.03%      0.04%      0.07%      0.03%      0.05%    one look
    x2 over 200 steps   160, 200   180, 260  220,later   140, 180   180, 280
    x2 over 1000 steps  360, 460   460, 620   620, 820   280, 360   480, 700
    jump x3                 5, 6     5, 180  11, later       5, 5   5, later

**Slope.** Theil-Sen over the last ``WINDOW`` steps with Sen's (1968) 95 % interval, where the variance of Kendall's S is
multiplied by (1 + r) / (1 - r), r = lag-1 autocorrelation of the residuals, at least 0. Given as relative growth per 100
steps, exp(100 * slope) - 1: 0 is flat, 1 is doubling. It is a description and takes no part in the alarm.
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
WINDOW, WINDOW_LEAST = 200, 30
KEEP = BLOCK * BLOCKS
NAN = float("nan")


def growth_evidence(blocks: np.ndarray) -> np.ndarray:
    """Return the largest M_s of the module's docstring, (...), for block medians (..., blocks), oldest first.

    >>> float(growth_evidence(np.arange(10.0))) > GROWTH, float(growth_evidence(-np.arange(10.0))) <= 1
    (True, True)
    """
    size = blocks.shape[-1]
    n, k = np.arange(1, size + 1)[:, None], np.arange(1, size + 1)
    k = np.minimum(k, n)
    table = np.mean([n * ((k / n) ** a - ((k - 1) / n) ** a) for a in BETS], 0)
    new, start = np.arange(size)[:, None], np.arange(size)
    above = (blocks[..., None, :] >= blocks[..., :, None]) & (start < new)  # [new, old]: old is at least as high
    rank = np.flip(np.cumsum(np.flip(above, -1), -1), -1)  # [new, start]: of those, how many since start
    e = np.where(start <= new, table[np.maximum(new - start, 0), rank], 1.0)
    return e.prod(-2).max(-1)


def held(x: np.ndarray) -> np.ndarray:
    """Return the second lowest of every ``RECENT`` consecutive values: (..., n) -> (..., n - RECENT + 1)."""
    windows = np.lib.stride_tricks.sliding_window_view(x, RECENT, -1)
    return np.partition(windows, 1, -1)[..., 1]


def jump_score(h: np.ndarray) -> np.ndarray:
    """Return z of the last entry of ``h = held(x)`` against those that share no step with it: (..., n) -> (...)."""
    reference = h[..., :-RECENT]
    middle = np.median(reference, -1)
    spread = 1.4826 * np.median(np.abs(reference - middle[..., None]), -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((h[..., -1] - middle) / spread, nan=0.0)  # 0/0: a constant series


def slope(steps: np.ndarray, x: np.ndarray) -> tuple[float, float, float]:
    """Return (Theil-Sen slope, 95 % interval) of ``x`` over ``steps``, both (n,), in units of x per step."""
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
    """What is known after a step; NaN until there are ``WINDOW_LEAST`` steps.

    Args:
        trend: relative growth per 100 steps; ``trend_low``, ``trend_high``: its 95 % interval.
        alarm: 1 from the step on at which the alarm was raised, else 0.
        warning: what to tell the user, at that step only; else empty.
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
    """The tests of the module's docstring, fed one step at a time; one alarm, then silence.

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
        """Take the value of a step; one that is not a positive number is left out.

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
            if growth_evidence(medians) >= GROWTH:
                return "rising"
        if len(x) < LEAST + RECENT:
            return ""
        resumed = self.resumed is not None and sum(step > self.resumed for step in self.steps[-RECENT - 1 :]) == RECENT
        x = x[-REFERENCE - RECENT :]
        if jump_score(held(x)) < (RESUMED if resumed else JUMP):
            return ""
        factor = math.exp(np.median(x[-RECENT:]) - np.median(x[:-RECENT]))
        since = f"since training resumed from step {self.resumed}" if resumed else f"in the last {RECENT} steps"
        return f"jumped: x{factor:.2f} {since}, against the {len(x) - RECENT} steps before"

    def state(self) -> dict:
        """Return what :meth:`restore` needs, as JSON has it."""
        return {"version": 1, "count": self.count, "steps": self.steps, "x": self.x, "alarm": self.alarm}

    @classmethod
    def restore(cls, state: dict, step: int) -> Detector:
        """Return the detector as it was after ``step``, from which training resumes; later steps are forgotten.

        Raises:
            ValueError: the state is not one of :meth:`state`.
        """
        if not isinstance(state, dict) or state.get("version") != 1 or len(state["steps"]) != len(state["x"]):
            raise ValueError("not the state of a trend detector")
        found = cls()
        kept = sum(s <= step for s in state["steps"])
        found.steps, found.x = [int(s) for s in state["steps"][:kept]], [float(v) for v in state["x"][:kept]]
        found.count = int(state["count"]) - (len(state["steps"]) - kept)
        found.alarm = state["alarm"] if state["alarm"] is not None and state["alarm"] <= step else None
        found.resumed = step
        return found
