"""The trend alarm on simulated series: how often it is wrong, how soon it is right, and that its parts are what they claim.

Contract: at most 1 % of runs of 1,000 steps without growth raise an alarm, with independent, autocorrelated (0.5, 0.8) and
heavy-tailed noise (slow wander exceeds it, as docs/pages/alarm.md says). Growth and jumps are found within the steps asserted
below. A fall never alarms, nor does a rise below the smallest that matters. There is one alarm per run, kept over a resume.

The simulation (`simulate`) calls the module's own functions on many series at once, and one test holds it against the
online detector. `python tests/monitor/test_trend.py` prints the operating characteristics that docs/pages/alarm.md tabulates.
"""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from verl_rounding_align.monitor import trend
from verl_rounding_align.monitor.trend import (
    BLOCK,
    BLOCKS,
    LEAST,
    RECENT,
    REFERENCE,
    SMALLEST,
    Detector,
    growing,
    growth_evidence,
    held,
    jumped,
    slope,
)

SD = 0.2  # of log(value), a step: 20 % scatter
NEVER = 10**6


def noise(kind: str, series: int, steps: int, seed: int) -> np.ndarray:
    """Return stationary noise (series, steps) of standard deviation SD: iid, t3, ar0.5 (AR(1) with that rho), wander."""
    rng = np.random.default_rng(seed)
    if kind == "t3":
        return SD * rng.standard_t(3, (series, steps)) / math.sqrt(3)
    if kind == "wander":  # a slow part of half the size below the noise of single steps
        return noise("ar0.95", series, steps, seed + 1) / 2 + noise("iid", series, steps, seed + 2)
    x = rng.standard_normal((series, steps))
    if kind.startswith("ar"):
        rho = float(kind[2:])
        for t in range(1, steps):
            x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * x[:, t]
    return SD * x


def simulate(x: np.ndarray, growth=trend.GROWTH, jump=trend.JUMP, first=0) -> tuple[np.ndarray, np.ndarray]:
    """Return (step of the growth test's first alarm, of the jump test's), (series,); NEVER where there is none.

    Args:
        x: (series, steps) logs of the values; looks before step ``first`` are left out.
    """
    series, steps = x.shape
    found = np.full((2, series), NEVER)

    def raised(test, alarm, step):
        found[test, alarm & (found[test] == NEVER)] = step

    medians = np.median(x[:, : steps // BLOCK * BLOCK].reshape(series, -1, BLOCK), -1)
    for u in range(2, medians.shape[1] + 1):
        if u * BLOCK >= first:
            raised(0, growing(medians[:, max(0, u - BLOCKS) : u], growth), u * BLOCK)
    h = held(x)
    for step in range(max(LEAST + RECENT, first), steps + 1):
        window = h[:, max(0, step - REFERENCE - RECENT) : step - RECENT + 1]
        raised(1, jumped(window, jump), step)
    return found[0], found[1]


# -------------------------------------------------------------------------------------------------------- false alarms


@pytest.mark.parametrize("kind", ["iid", "ar0.5", "ar0.8", "t3"])
def test_false_alarms_in_a_thousand_steps(kind):
    """200 series each. At a true rate of 1 % there would be more than 4 with probability 5 %: 4 is the allowance."""
    x = noise(kind, 200, 1000, seed=1)
    assert (np.minimum(*simulate(x)) < NEVER).sum() <= 4


def test_control_without_the_correction_for_many_looks_there_are_too_many():
    """Each test at the level of one look: 1/0.01 by Ville's inequality for one start, and the limit of a resume. At a
    rate of 1 % there would be 5 or more in 100 series with probability 0.3 %."""
    for alarms in simulate(noise("iid", 100, 1000, seed=2), growth=100, jump=trend.RESUMED):
        assert (alarms < NEVER).sum() >= 5


@pytest.mark.parametrize("kind", ["iid", "ar0.5", "ar0.8", "t3"])
def test_false_alarms_of_the_one_look_after_a_resume(kind):
    """2,000 series: 1 % and two standard errors of a rate of 1 % (0.22 %)."""
    found = jumped(held(noise(kind, 2000, LEAST + 100 + RECENT, seed=3)), trend.RESUMED)
    assert found.mean() <= 0.01 + 2 * math.sqrt(0.01 * 0.99 / 2000)


def test_the_evidence_is_an_e_value():
    """Over all orders of 6 blocks, each as likely: the mean of M_1 is 1, exactly. Control: the largest M_s has a larger
    mean, which is what the union bound pays for; and P(M >= c) <= starts / c."""
    orders = np.array(list(permutations(range(6))), float)
    both = growth_evidence(orders)
    only = [math.prod(e(o, u) for u in range(6)) for o in orders]
    assert np.mean(only) == pytest.approx(1, rel=1e-12, abs=0)
    assert np.mean(both) > 1.2
    assert all((both >= c).mean() <= 6 / c for c in (10, 30, 100))
    for order, value in zip(orders[::50], both[::50], strict=True):
        assert value == pytest.approx(max(math.prod(e(order[s:], u) for u in range(6 - s)) for s in range(6)))


def e(order, u):
    """The e of docs/pages/alarm.md for block ``u``, as it is written there."""
    n, k = u + 1, sum(value >= order[u] for value in order[: u + 1])
    return np.mean([n * ((k / n) ** a - ((k - 1) / n) ** a) for a in trend.BETS])


def test_a_constant_series_and_a_fall_never_alarm():
    for x in (np.zeros((1, 600)), -np.arange(600.0)[None] / 100, noise("iid", 50, 600, 4) - np.arange(600) / 300):
        assert (np.minimum(*simulate(x)) == NEVER).all()


STEPS = np.arange(1500)
SHAPES = {  # each rises from 0 to 1
    "a jump": (STEPS >= 700) * 1.0,
    "growth": np.clip(STEPS - 300, 0, 1000) / 1000,
    "fast growth": np.clip(STEPS - 300, 0, 300) / 300,
}


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rise_below_the_smallest_that_matters_never_alarms(shape, spread):
    """However quiet the series: 1e-7 and 9 % stay silent. The control is the smallest rise that the shape must alarm at.

    The newest value or block is compared with the median of those before it. A jump lies above that median by all of its
    size. Of growth that is spread evenly over the 50 blocks that are looked back on, half lies above it.
    """
    x = spread * np.random.default_rng(15).uniform(-1, 1, len(STEPS))
    for rise in (1e-7, 0.09):
        found = x + math.log1p(rise) * SHAPES[shape]
        assert (np.minimum(*simulate(found[None])) == NEVER).all()
    control = x + (1 if shape == "a jump" else 2.2) * math.log1p(SMALLEST + 0.01) * SHAPES[shape]
    assert (np.minimum(*simulate(control[None])) < NEVER).all()


@pytest.mark.parametrize("rise, expected", [(1e-7, []), (0.09, []), (0.11, [305])])
def test_a_rise_below_the_smallest_that_matters_never_alarms_at_a_resume(rise, expected):
    part, _ = feed(np.zeros(300))
    _, warnings = feed(np.full(20, math.log1p(rise)), Detector.restore(part.state(), 300), first=301)
    assert list(warnings) == expected  # the fifth value after the resume: all of the last six but one are higher


# ----------------------------------------------------------------------------------------------------------- detection


@pytest.mark.parametrize("kind", ["iid", "ar0.5", "t3"])
@pytest.mark.parametrize("over, within", [(200, 300), (1000, 800)])
def test_a_doubling_is_found(kind, over, within):
    """x2 over ``over`` steps from step 300 on, then held: 95 % of 100 series raise the alarm within ``within`` steps."""
    x = noise(kind, 100, 300 + within, seed=5) + math.log(2) * np.clip(np.arange(300 + within) - 300, 0, over) / over
    found = np.minimum(*simulate(x, first=300))
    assert (found < NEVER).mean() >= 0.95


@pytest.mark.parametrize("kind, within", [("iid", 8), ("t3", 8), ("ar0.5", 60)])
def test_a_jump_is_found(kind, within):
    """x3 at step 300. With sd 0.2 and rho 0.5 a few jumps wait for the growth test."""
    x = noise(kind, 100, 300 + within, seed=6)
    x[:, 300:] += math.log(3)
    assert (np.minimum(*simulate(x, first=300)) < NEVER).mean() >= 0.95


@pytest.mark.parametrize("kind", ["iid", "ar0.5", "t3"])
def test_a_jump_at_a_resume_is_found_in_six_steps(kind):
    x = noise(kind, 100, 306, seed=7)
    x[:, 300:] += math.log(3)
    assert jumped(held(x[:, -REFERENCE - RECENT :]), trend.RESUMED).mean() >= 0.95
    control = jumped(held(noise(kind, 100, 306, seed=7)[:, -REFERENCE - RECENT :]), trend.RESUMED)
    assert control.mean() <= 0.02


# ---------------------------------------------------------------------------------------------------------------- slope


@pytest.mark.parametrize("kind", ["iid", "ar0.5", "t3"])
@pytest.mark.parametrize("rate", [0.0, 0.004])
def test_the_interval_covers_the_slope(kind, rate):
    """200 windows of 100 steps: 95 % less 3 standard errors (1.5 % each) less 1.5 % for r, which is biased low."""
    steps = np.arange(100.0)
    found = [slope(steps, x + rate * steps) for x in noise(kind, 200, 100, seed=8)]
    assert np.mean([low <= rate <= high for _, low, high in found]) >= 0.89
    assert abs(np.mean([middle for middle, _, _ in found]) - rate) < 3e-4


def test_control_an_interval_for_independent_noise_is_too_short(monkeypatch):
    monkeypatch.setattr(trend.np, "clip", lambda *args: 0.0)
    found = [slope(np.arange(100.0), x) for x in noise("ar0.5", 200, 100, seed=8)]
    assert np.mean([low <= 0 <= high for _, low, high in found]) < 0.8


def test_slope_by_hand():
    """Pairs of (0, 0), (1, 1), (2, 5), (4, 4): slopes 1, 5/2, 1, 4, 1, -1/2; the median is 1."""
    assert slope(np.array([0.0, 1, 2, 4]), np.array([0.0, 1, 5, 4]))[0] == 1.0


def test_the_trend_is_relative_growth_per_100_steps():
    detector = Detector()
    readings = [detector.update(step, 1e-6 * 1.01**step) for step in range(1, 41)]
    assert all(math.isnan(reading.trend) for reading in readings[:29])
    assert readings[-1].trend == pytest.approx(1.01**100 - 1, rel=1e-9, abs=0)
    assert readings[-1].trend_low <= readings[-1].trend <= readings[-1].trend_high
    assert readings[-1].alarm == 0 and set(readings[-1].values()) == {"trend", "trend_low", "trend_high", "alarm"}


# ------------------------------------------------------------------------------------------------------------- detector


def feed(x, detector=None, first=1):
    """Return (detector, step -> warning) after the values exp(x) at the steps from ``first`` on."""
    detector, warnings = detector or Detector(), {}
    for step, value in enumerate(x, first):
        reading = detector.update(step, math.exp(value))
        if reading.warning:
            warnings[step] = reading.warning
        assert reading.alarm == (detector.alarm is not None)
    return detector, warnings


def test_the_detector_is_the_simulation_step_by_step(monkeypatch):
    monkeypatch.setattr(trend, "slope", lambda steps, x: (0.0, 0.0, 0.0))  # has no part in it
    x = noise("iid", 6, 1300, seed=9)  # longer than what is kept
    x[1] += np.arange(1300) / 1000
    x[2, 1100:] += 1.2
    x[3] += np.clip(np.arange(1300) - 1000, 0, None) / 200
    x[4, 70:] += 2
    expected = np.minimum(*simulate(x))
    assert (expected < NEVER).tolist() == [False, True, True, True, True, False]
    for row, step in zip(x, expected, strict=True):
        _, warnings = feed(row)
        assert list(warnings) == [step] * int(step < NEVER)


def test_messages():
    x = noise("iid", 1, 400, seed=10)[0]
    _, warnings = feed(x + np.clip(np.arange(400) - 100, 0, None) / 150)
    ((_, growing),) = warnings.items()
    x[300:] += math.log(3)
    _, warnings = feed(x)
    ((step, jumped),) = warnings.items()
    number = r"\d+\.\d\d"
    interval = rf"x{number} per 100 steps \(95 % interval {number} to {number}\)"
    assert re.fullmatch(rf"rising: {interval}; {re.escape(trend.CHANCE)}", growing)
    assert re.fullmatch(rf"jumped: x{number} in the last 6 steps, against the 200 steps before", jumped)
    assert 300 < step <= 308


def test_what_is_not_a_positive_number_is_left_out():
    x = noise("iid", 1, 100, seed=11)[0]
    detector, _ = feed(x)
    for step, value in enumerate((math.nan, math.inf, 0.0, -1.0), 101):
        reading = detector.update(step, value)
    assert (len(detector.x), detector.count) == (100, 100) and math.isfinite(reading.trend)


def test_steps_must_go_on():
    detector, _ = feed(np.zeros(5))
    with pytest.raises(ValueError) as error:
        detector.update(5, 1.0)
    assert str(error.value) == "step 5 is not after step 5"


# --------------------------------------------------------------------------------------------------------------- resume


def test_a_resumed_detector_is_the_one_that_never_stopped(monkeypatch):
    monkeypatch.setattr(trend, "slope", lambda steps, x: (0.0, 0.0, 0.0))  # has no part in it
    x = noise("iid", 1, 1300, seed=12)[0]
    x[1200:] += 1.2
    whole, expected = feed(x)
    part, _ = feed(x[:1150])
    state = json.loads(json.dumps(part.state()))
    again, warnings = feed(x[1130:], Detector.restore(state, 1130), first=1131)
    assert warnings == expected and len(expected) == 1
    assert again.state() == whole.state()


@pytest.mark.parametrize("factor, expected", [(1.0, []), (1.9, [306])])
def test_a_jump_at_a_resume_needs_less(factor, expected):
    """x1.9 within a run is below what one step in a thousand could be, at a resume it is not."""
    x = noise("iid", 1, 306, seed=13)[0]
    x[300:] += math.log(factor)
    part, _ = feed(x[:300])
    _, warnings = feed(x[300:], Detector.restore(part.state(), 300), first=301)
    assert list(warnings) == expected
    if expected:
        what = r"jumped: x\d\.\d\d since training resumed from step 300, against the 200 steps before"
        assert re.fullmatch(what, warnings[306])
    assert feed(x)[1] == {}  # control: the same series without the resume


def test_an_alarm_is_kept_over_a_resume_unless_its_step_is_undone():
    x = noise("iid", 1, 400, seed=14)[0]
    x[300:] += 2
    detector, warnings = feed(x)
    (step,) = warnings
    assert Detector.restore(detector.state(), step).alarm == step
    before = Detector.restore(detector.state(), step - 1)
    assert before.alarm is None and before.steps[-1] == step - 1 and before.count == step - 1


def test_a_foreign_or_damaged_state_is_refused():
    good = feed(np.zeros(3))[0].state()
    damage = [{"version": 2}, {"steps": [1]}, {"steps": [1, 3, 2]}, {"x": [0, 0, "a"]}, {"x": [0, 0, math.nan]}]
    damage += [{"count": None}, {"count": 2}, {"alarm": "soon"}, {"alarm": math.inf}]
    for state in ([], None, {"version": 1}, *({**good, **change} for change in damage)):
        with pytest.raises(ValueError) as error:
            Detector.restore(state, 0)
        assert str(error.value) == "not the state of a trend detector"
    assert Detector.restore(good, 3).state() == good  # control


# -------------------------------------------------------------------------------------------- operating characteristics

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_alarm_says_what_the_code_has():
    page = " ".join((ROOT / "docs" / "pages" / "alarm.md").read_text().split())
    bets = ", ".join(map(str, trend.BETS))
    rate = 1000 / BLOCK / trend.GROWTH
    for claim in (
        f"consecutive blocks of {BLOCK}.",
        f"mean over a in {{{bets}}}",
        f"reaches {trend.GROWTH:,.0f} for one of the last {BLOCKS} starts s ({BLOCK * BLOCKS:,} steps)",
        f"is at most (N / {BLOCK}) / {trend.GROWTH:,.0f}. That is {rate:.1%}".replace("%", " %"),
        f"the second lowest of the last {RECENT} values",
        f"the h of the {REFERENCE} steps before those six ({LEAST} at least)",
        f"raised at z >= {trend.JUMP:g}. Once, six steps after a resume, it is raised at z >= {trend.RESUMED:g}",
        f"alarms below a rise of {SMALLEST:.0%}".replace("%", " %"),
        f"over the last {trend.WINDOW} steps ({trend.WINDOW_LEAST} at least)",
        trend.CHANCE,
    ):
        assert claim in page, claim
    runs = json.loads((ROOT / "recipes" / "quickstart" / "results" / "summary.json").read_text())["arms"]
    errors = [run["mismatch_k3_se"] / run["mismatch_k3"] for run in runs]
    k3 = {run["arm"]: run["mismatch_k3"] for run in runs}
    assert f"{min(errors):.0%} to {max(errors):.0%}" == "3% to 7%" and f"{k3['none'] / k3['all']:.1f}" == "2.8"
    assert {run["steps"] for run in runs} == {12}


def test_the_page_has_every_table_and_row_that_is_printed(capsys):
    """The figures are of 2,000 series. Five suffice for the names of rows and columns."""
    characteristics(5)
    printed = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    lines = (ROOT / "docs" / "pages" / "alarm.md").read_text().splitlines()
    page = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert [row[0] for row in page] == [row[0] for row in printed]
    heads = [row for row in printed if row[1] == " iid "]
    assert [row for row in page if row[1] == " iid "] == heads and len(heads) == 3


def characteristics(series: int) -> None:
    """Print the tables of docs/pages/alarm.md, from ``series`` series for false alarms and a fifth of them for the rest."""
    kinds = ("iid", "ar0.5", "ar0.8", "t3", "wander")

    def head(name):
        print(f"| {name} | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}")

    def row(name, cell):
        print(f"| {name} | {' | '.join(map(cell, kinds))} |", flush=True)

    head("false alarms")
    null = {kind: simulate(noise(kind, series, 1000, seed=100)) for kind in kinds}
    for name, found in (("growth test", lambda g, j: g), ("jump test", lambda g, j: j), ("both", np.minimum)):
        row(name, lambda kind, found=found: f"{100 * (found(*null[kind]) < NEVER).mean():.2f} %")
    one = {
        kind: jumped(held(noise(kind, 10 * series, REFERENCE + RECENT, seed=101)), trend.RESUMED).mean()
        for kind in kinds
    }
    row("one look at a resume", lambda kind: f"{100 * one[kind]:.2f} %")
    head("change")
    t = np.arange(1400) - 300
    shapes = {
        "x2 over 200 steps": np.log(2) * np.clip(t, 0, 200) / 200,
        "x2 over 1000 steps": np.log(2) * np.clip(t, 0, 1000) / 1000,
        "jump x3": np.log(3) * (t >= 0),
        "jump x2": np.log(2) * (t >= 0),
    }
    for name, shape in shapes.items():
        steps = 700 if "jump" in name or "200" in name else 1400

        def cell(kind, shape=shape, steps=steps):
            found = np.minimum(*simulate(noise(kind, series // 5, steps, seed=102) + shape[:steps], first=300)) - 300
            median, most = np.quantile(found, [0.5, 0.95], method="higher")
            return ", ".join(f"{value}" if value <= steps else "later" for value in (median, most))

        row(name, cell)
    head("change at a resume")
    for factor in (3, 2):

        def found(kind, factor=factor):
            x = noise(kind, series // 5, REFERENCE + 2 * RECENT, seed=103)
            x[:, -RECENT:] += math.log(factor)
            return f"{100 * jumped(held(x)[:, RECENT:], trend.RESUMED).mean():.0f} %"

        row(f"jump x{factor}", found)


if __name__ == "__main__":
    characteristics(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
