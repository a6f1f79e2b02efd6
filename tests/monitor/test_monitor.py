"""The monitor, driven as a training loop drives it, without any framework.

Contract: `observe` returns the metrics of the table METRICS, no others, each within its range and none NaN. What it cannot
compute it leaves out, sets a flag and says why once. It never raises, and all that it knows lives in the instance. Log-probs
of different weights are called staleness and never alarm. A resumed run goes on where the history ends. What a framework
makes of several sub-steps still means what the table says.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch

from verl_rounding_align.monitor import HISTORY, METRICS, Batch, Missing, Monitor, Resume
from verl_rounding_align.monitor import monitor as module
from verl_rounding_align.monitor.mismatch import mismatch
from verl_rounding_align.monitor.phantom import phantom
from verl_rounding_align.monitor.trend import CHANCE, Detector

STALE = {name for name in METRICS if name.startswith("staleness_")}
SAME = {name for name in METRICS if name not in STALE}
APART = {name for name in METRICS if not name.startswith(("mismatch_", "abs_diff_", "phantom_clip", "trend", "alarm"))}
TREND = {"trend", "trend_low", "trend_high"}


def batch(gap=1e-2, seed=0, **change) -> Batch:
    """Return the batch of a step: 8 sequences of up to 20 tokens, with junk behind the responses."""
    g = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(8, 20, generator=g)
    rollout = trainer + gap * torch.randn(8, 20, generator=g)
    mask = torch.arange(20) < torch.randint(2, 20, (8, 1), generator=g)
    fields = dict(
        trainer=trainer,
        rollout=torch.where(mask, rollout, 1e3),
        response_mask=mask,
        loss_mask=mask & (torch.rand(8, 1, generator=g) < 0.9),
        advantages=torch.randn(8, 1, generator=g).expand(8, 20),
        clip=(0.2, 0.28),
    )
    return Batch(**{**fields, **change})


def quiet(**options) -> tuple[Monitor, list[str]]:
    """Return a monitor and the lines that it says."""
    lines: list[str] = []
    return Monitor(say=lines.append, **options), lines


def short(found: dict[str, float]) -> dict[str, float]:
    """Return the metrics by their names in METRICS."""
    assert all(name.startswith("rounding_align/") for name in found)
    return {name.removeprefix("rounding_align/"): value for name, value in found.items()}


def run(monitor: Monitor, steps, factor=lambda step: 1.0, **change) -> dict[str, float]:
    """Drive the monitor through ``steps``, with log-prob differences of ``factor(step)`` times 1e-2."""
    found = {}
    for step in steps:
        found = short(monitor.observe(step, batch(1e-2 * factor(step), seed=step, **change)))
    return found


# ---------------------------------------------------------------------------------------------------------- the table


def in_range(value: float, text: str) -> bool:
    if match := re.fullmatch(r">= (-?\d+)", text):
        return value >= float(match[1])
    return {"any": True, "0 or 1": value in (0, 1), "0 to 1": 0 <= value <= 1}[text]


def test_the_metrics_are_those_of_the_table_within_their_ranges():
    monitor, _ = quiet()
    same = run(monitor, range(1, 41))
    assert set(same) == SAME
    apart = run(quiet()[0], range(1, 41), stale="the rollout is a step behind")
    assert set(apart) == APART and set(same) | set(apart) == set(METRICS)
    for name, value in {**same, **apart}.items():
        assert in_range(value, METRICS[name].range), (name, value)
    assert not in_range(2, METRICS["alarm"].range) and not in_range(-1, METRICS["mismatch_k3"].range)  # control


def test_a_row_of_the_table_is_one_line_with_unit_and_range():
    for metric in METRICS.values():
        assert metric.meaning and metric.unit and metric.range and "\n" not in metric.meaning + metric.unit
        assert metric.combined in ("mean", "max", "total")


def test_values_are_those_of_the_estimators_on_the_same_tensors():
    one = batch(0.2)
    found = short(quiet()[0].observe(1, one))
    compared = mismatch(one.trainer, one.rollout, one.response_mask).values()
    for name in ("mismatch_kl", "mismatch_kl_se", "mismatch_k3", "mismatch_k3_se", "abs_diff_mean", "abs_diff_max"):
        assert found[name] == compared[name] != 0
    assert (found["tokens_total"], found["nonfinite_total"]) == (compared["tokens"], 0)
    clipped = phantom(one.trainer, one.rollout, one.loss_mask, one.advantages, 0.2, 0.28).values()
    assert {name: found[name] for name in clipped} == clipped and clipped["phantom_clip_positive"] > 0
    other = phantom(one.trainer, one.rollout, one.response_mask, one.advantages, 0.2, 0.28)
    assert other.phantom_clip != clipped["phantom_clip"]  # control: clipping is over the loss's mask


def test_without_a_loss_mask_clipping_is_over_the_response_mask():
    one = batch(0.2, loss_mask=None)
    expected = phantom(one.trainer, one.rollout, one.response_mask, one.advantages, 0.2, 0.28)
    assert short(quiet()[0].observe(1, one))["phantom_clip"] == expected.phantom_clip


def test_the_prefix_stands_before_every_name(capsys):
    found = Monitor(prefix="gap").observe(1, Batch(missing="a reason"))
    assert set(found) == {
        f"gap/{n}" for n in ("missing", "tokens_total", "nonfinite_total", "stale", "alarm", "trend_missing")
    }
    assert capsys.readouterr().out == "gap: mismatch metrics missing: a reason\n"


def test_what_is_not_known_yet_is_left_out_and_not_missing():
    monitor, lines = quiet()
    first, last = run(monitor, range(1, 30)), run(monitor, [30])
    assert set(first) == SAME - TREND and set(last) == SAME  # a trend needs 30 steps
    alone = short(monitor.observe(31, batch(response_mask=torch.eye(8, 20), loss_mask=None)))
    assert set(alone) == SAME
    one = Batch(*(x[:1] for x in (batch().trainer, batch().rollout, batch().response_mask)))
    found = short(monitor.observe(32, one))
    assert "mismatch_k3" in found and not {"mismatch_k3_se", "mismatch_kl_se"} & set(found)  # one sequence
    assert lines == []


def test_log_probs_that_require_gradients_are_read_without_any():
    one = batch()
    found = quiet()[0].observe(1, batch(trainer=one.trainer.requires_grad_()))
    assert found == quiet()[0].observe(1, batch())


# ------------------------------------------------------------------------------------------- what cannot be computed

MASK = torch.ones(8, 20)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"missing": "bypass_mode=True: no log-probs"}, "bypass_mode=True: no log-probs"),
        ({"trainer": None}, "the batch has no trainer"),
        ({"rollout": [[-1.0]]}, "rollout is a list, not a tensor (sequences, tokens)"),
        ({"response_mask": 0 * MASK}, "the batch has no response tokens"),
        ({"rollout": MASK * math.nan, "response_mask": MASK}, "none of 160 response tokens has two finite log-probs"),
        ({"rollout": MASK * math.inf, "response_mask": MASK}, "none of 160 response tokens has two finite log-probs"),
        (
            {"rollout": MASK[:, 1:]},
            "trainer (8, 20), rollout (8, 19), response_mask (8, 20) must have one shape (sequences, tokens)",
        ),
        (
            {"trainer": MASK[0], "rollout": MASK[0], "response_mask": MASK[0]},
            "trainer (20,), rollout (20,), response_mask (20,) must have one shape (sequences, tokens)",
        ),
        ({"trainer": MASK.to("meta")}, "trainer on meta, rollout on cpu, response_mask on cpu must be on one device"),
        (
            {"trainer": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            "trainer is a nested tensor, and a padded one (sequences, tokens) is needed",
        ),
    ],
)
def test_log_probs_that_cannot_be_compared_are_missing_and_never_zero(change, reason, caplog):
    monitor, lines = quiet()
    for step in (1, 2):
        found = short(monitor.observe(step, batch(**{"clip": None, **change})))
    assert set(found) == {"missing", "tokens_total", "nonfinite_total", "stale", "alarm", "trend_missing"}
    assert (found["missing"], found["tokens_total"]) == (1, 0)
    assert lines == [f"mismatch metrics missing: {reason}"]
    assert caplog.records == []  # no fault of the program
    assert short(monitor.observe(3, batch()))["missing"] == 0  # control: the next step is as good as any


def test_a_reason_with_other_numbers_is_not_said_again():
    monitor, lines = quiet()
    for step in (1, 2, 3):
        monitor.observe(step, batch(rollout=MASK[:, step:]))
    monitor.observe(4, batch(rollout=None))  # control: another reason is
    assert [line.split(",")[0] for line in lines] == [
        "mismatch metrics missing: trainer (8",
        "phantom clipping missing: trainer (8",
        "mismatch metrics missing: the batch has no rollout",
        "phantom clipping missing: the batch has no rollout",
    ]


def test_what_is_not_finite_is_left_out_and_counted():
    one = batch()
    rollout = one.rollout.clone()
    rollout[0, 0] = math.nan
    found, clean = (short(quiet()[0].observe(1, b)) for b in (batch(rollout=rollout), one))
    assert (found["nonfinite_total"], found["missing"]) == (1, 0)
    assert found["tokens_total"] == clean["tokens_total"] - 1 and found["mismatch_k3"] != clean["mismatch_k3"]


def test_a_value_that_is_too_large_is_left_out_and_said():
    rollout = batch().rollout.clone()
    rollout[0, 0] = -1e4  # r = e^1e4
    monitor, lines = quiet()
    found = short(monitor.observe(1, batch(rollout=rollout)))
    assert "mismatch_k3" not in found and found["abs_diff_max"] > 9990 and found["missing"] == 0
    assert lines == ["mismatch_k3 is too large for a number and is left out"]


@pytest.mark.parametrize(
    "change, left, reason",
    [
        ({"clip": None, "no_clip": "gspo has no range"}, set(), "gspo has no range"),
        ({"advantages": None}, {"phantom_clip"}, "the batch has no advantages"),
        (
            {"loss_mask": 0 * MASK},
            set(),
            "the batch has no response tokens with two finite log-probs",
        ),
        (
            {"advantages": MASK[:4]},
            set(),
            "trainer (8, 20), rollout (8, 20), loss_mask (8, 20), advantages (4, 20) must have one shape "
            "(sequences, tokens)",
        ),
    ],
)
def test_clipping_that_cannot_be_computed_says_why_once(change, left, reason):
    monitor, lines = quiet()
    for step in (1, 2):
        found = short(monitor.observe(step, batch(**change)))
    assert {name for name in found if name.startswith("phantom_clip")} == left
    assert (found["phantom_missing"], found["missing"]) == (1, 0)
    assert lines == [f"phantom clipping missing: {reason}"]


def test_without_a_clip_range_or_a_reason_nobody_asked_for_clipping():
    found = short(quiet()[0].observe(1, batch(clip=None)))
    assert not any(name.startswith("phantom") for name in found)


def test_without_log_probs_the_reason_is_said_for_both():
    monitor, lines = quiet()
    found = short(monitor.observe(1, batch(missing="a reason")))
    assert (found["missing"], found["phantom_missing"]) == (1, 1)
    assert lines == ["mismatch metrics missing: a reason"]


# --------------------------------------------------------------------------------------- faults of the program itself


@pytest.mark.parametrize(
    "name, what, flag",
    [
        ("mismatch", "mismatch metrics missing", "missing"),
        ("phantom", "phantom clipping missing", "phantom_missing"),
    ],
)
def test_a_fault_of_the_program_is_logged_once_with_its_traceback(name, what, flag, monkeypatch, caplog):
    calls = []

    def broken(*args):
        calls.append(args)
        raise KeyError(f"object at {'abcdef'[len(calls)]}x{len(calls)}")  # a text that differs at every step

    monkeypatch.setattr(module, name, broken)
    monitor, lines = quiet()
    found = [short(monitor.observe(step, batch())) for step in (1, 2, 3)]
    assert [f[flag] for f in found] == [1, 1, 1] and len(calls) == 3
    assert lines == [f"{what}: KeyError: 'object at bx1'"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("verl_rounding_align", logging.ERROR)
    assert record.getMessage() == f"rounding_align: an unexpected error, and training goes on. {what}"
    assert record.exc_info[1].args == ("object at bx1",) and record.exc_info[2] is not None
    others = {"missing", "phantom_missing", "trend_missing"} - {flag}
    assert all(f[other] == 0 for f in found for other in others)


def test_a_fault_of_the_trend_is_logged_once_and_the_alarm_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(Detector, "update", lambda *args: 1 / 0)
    monitor, lines = quiet()
    found = [short(monitor.observe(step, batch())) for step in (1, 2)][-1]
    assert found["trend_missing"] == 1 and "alarm" not in found and "mismatch_k3" in found
    assert lines == ["trend of mismatch_k3 missing: ZeroDivisionError: division by zero"]
    assert len(caplog.records) == 1 and caplog.records[0].exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("wrong", [None, {"trainer": 1}, "batch"])
def test_an_integration_that_hands_over_something_else_does_not_stop_the_run(wrong, caplog):
    monitor, _ = quiet()
    for step in (1, 2):
        found = short(monitor.observe(step, wrong))
    assert (found["missing"], found["phantom_missing"]) == (1, 1)
    assert [record.exc_info[0] for record in caplog.records] == [AttributeError] * 2  # mismatch and clipping, once each


def test_a_say_that_fails_harms_nothing(caplog):
    def say(line):
        raise BrokenPipeError

    assert short(Monitor(say=say).observe(1, Batch(missing="a reason")))["missing"] == 1
    (record,) = caplog.records
    assert record.getMessage() == "rounding_align: a line could not be said: mismatch metrics missing: a reason"


def test_steps_must_go_on():
    monitor, lines = quiet()
    monitor.observe(5, batch())
    found = [short(monitor.observe(5, batch())) for _ in range(2)][-1]
    assert (found["trend_missing"], found["missing"]) == (1, 0) and "alarm" not in found
    assert lines == ["trend of mismatch_k3 missing: step 5 is not after step 5"]


def test_the_guard_keeps_what_an_integration_does_from_the_run(caplog):
    monitor, lines = quiet()
    for number in (1, 2):
        with monitor.guard("the dump"):
            raise Missing(f"{number} of 3 rows are unknown")
        with monitor.guard("the file"):
            raise FileNotFoundError(errno.ENOENT, "No such file", f"part{number}")
        with monitor.guard("the queue"):
            {}["a key"]
    assert lines == [
        "the dump: 1 of 3 rows are unknown",
        "the file: FileNotFoundError: [Errno 2] No such file: 'part1'",
        "the queue: KeyError: 'a key'",
    ]
    assert [record.exc_info[0] for record in caplog.records] == [KeyError]
    with pytest.raises(KeyboardInterrupt), monitor.guard("a user's wish"):
        raise KeyboardInterrupt


def test_nothing_is_shared_between_two_monitors():
    (one, said), (other, heard) = quiet(), quiet()
    one.observe(7, Batch(missing="a reason"))
    one.observe(8, batch())
    assert heard == [] and other.state()["steps"] == [] and one.state()["steps"] == [8]
    other.observe(1, Batch(missing="a reason"))
    assert said == heard == ["mismatch metrics missing: a reason"]
    for cls in (Monitor, Detector):
        assert not [n for n, v in vars(cls).items() if isinstance(v, list | dict | set) and not n.startswith("__")]


# ------------------------------------------------------------------------------------------------ trend and staleness


def grows(step: int) -> float:
    return 1.001 ** max(step - 60, 0)  # of a log-prob: k3, its square, doubles in 350 steps


def test_growth_warns_once_and_the_alarm_stays():
    monitor, lines = quiet(dump="trainer.rollout_data_dir")
    assert run(monitor, range(1, 61), grows)["alarm"] == 0 and lines == []
    found = run(monitor, range(61, 600), grows)
    assert found["alarm"] == 1 and 0 < found["trend_low"] <= found["trend"] <= found["trend_high"]
    number = r"\d+\.\d\d"
    (line,) = lines
    assert re.fullmatch(
        rf"WARNING: step \d+: mismatch_k3 rising: x{number} per 100 steps \(95 % interval {number} to {number}\); "
        rf"{re.escape(CHANCE)}\. To see where it comes from: `verl-rounding-align triage` on a rollout dump "
        r"\(trainer\.rollout_data_dir\), `verl-rounding-align gap` on fixed weights",
        line,
    )


def test_staleness_is_named_as_such_said_once_and_never_alarms():
    monitor, lines = quiet()
    found = run(monitor, range(1, 600), grows, stale="trainer.v1.mode=separate_async")
    assert set(found) == APART and found["stale"] == 1
    assert lines == [
        "rollout and trainer log-probs are of different weights (trainer.v1.mode=separate_async): the metrics staleness_* "
        "say how far apart the weights are, rounding included; mismatch_*, trend and alarm are left out"
    ]
    assert monitor.state()["steps"] == []
    one = short(monitor.observe(600, batch(stale="so")))
    same = short(quiet()[0].observe(600, batch()))
    for name in ("kl", "kl_se", "k3", "k3_se"):
        assert one[f"staleness_{name}"] == same[f"mismatch_{name}"]
    for name in ("abs_diff_mean", "abs_diff_max"):
        assert one[f"staleness_{name}"] == same[name]
    for name in ("clip", "clip_positive", "clip_negative"):
        assert one[f"staleness_{name}"] == same[f"phantom_{name}"]


def test_a_stale_step_without_log_probs_has_no_alarm_either():
    found = short(quiet()[0].observe(1, Batch(missing="a reason", stale="a step behind")))
    assert found == {"missing": 1, "tokens_total": 0, "nonfinite_total": 0, "stale": 1}


# -------------------------------------------------------------------------------------------------- several sub-steps


def aggregators() -> dict:
    """Return verl's two ways to combine the metrics of sub-steps: name -> function of a list of dictionaries."""
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator as FullyAsync
    from verl.trainer.ppo.v1.utils import MetricsAggregator as V1

    def combine(aggregator, steps):
        for metrics in steps:
            aggregator.add_step_metrics(metrics, sample_count=4)
        return aggregator.get_aggregated_metrics(), aggregator

    return {"v1": lambda steps: combine(V1(), steps), "fully_async": lambda steps: combine(FullyAsync(8), steps)}


@pytest.mark.verl
@pytest.mark.parametrize("kind", ["v1", "fully_async"])
def test_verl_combines_sub_steps_as_the_table_says(kind):
    names = [f"rounding_align/{name}" for name in METRICS]
    found, _ = aggregators()[kind]([dict.fromkeys(names, 1.0), dict.fromkeys(names, 3.0)])
    expected = {"mean": 2.0, "max": 3.0, "total": 4.0}
    assert found == {f"rounding_align/{name}": expected[metric.combined] for name, metric in METRICS.items()}
    old, _ = aggregators()[kind]([{"rounding_align/tokens": 1.0}, {"rounding_align/tokens": 3.0}])
    assert old == {"rounding_align/tokens": 2.0}  # control: a name without `total` is averaged


@pytest.mark.verl
@pytest.mark.parametrize("kind", ["v1", "fully_async"])
def test_a_sub_step_that_is_missing_spoils_no_average(kind):
    monitor, _ = quiet()
    good, empty = batch(), batch(response_mask=0 * MASK)
    parts = [monitor.measure(one) for one in (empty, good, batch(seed=1))]
    found = short(aggregators()[kind](parts)[0])
    alone = [short(part) for part in parts[1:]]
    for name in ("mismatch_k3", "mismatch_kl", "abs_diff_mean", "mismatch_k3_se", "phantom_clip"):
        assert found[name] == pytest.approx(sum(part[name] for part in alone) / 2, rel=1e-12, abs=0)
    assert found["tokens_total"] == sum(part["tokens_total"] for part in alone)
    assert found["abs_diff_max"] == max(part["abs_diff_max"] for part in alone)
    assert found["missing"] == pytest.approx(1 / 3, rel=1e-12, abs=0)
    spoilt = aggregators()[kind]([{"x": math.nan}, {"x": 1.0}])[0]
    assert math.isnan(spoilt["x"])  # control: what a NaN would do


def test_the_trend_takes_what_the_framework_made_of_the_sub_steps():
    monitor, _ = quiet()
    found = monitor.follow(3, {"rounding_align/mismatch_k3": 2e-4, "rounding_align/stale": 0.0, "actor/loss": 1.0})
    assert short(found) == {"alarm": 0, "trend_missing": 0}
    assert monitor.state()["steps"] == [3] and monitor.state()["x"] == [math.log(2e-4)]
    monitor.follow(4, {"rounding_align/mismatch_k3": 1e-4, "rounding_align/stale": 0.5})  # the others were not stale
    assert monitor.follow(5, {"rounding_align/stale": 1.0}) == {} and monitor.state()["steps"] == [3, 4]
    assert short(monitor.follow(6, {})) == {"alarm": 0, "trend_missing": 0} and monitor.state()["steps"] == [3, 4]


# ------------------------------------------------------------------------------------------------- history and resume


def test_a_resumed_run_goes_on_where_the_history_ends(tmp_path):
    """The run dies at step 107 and resumes from its checkpoint of step 100. Steps 101 to 107 are not counted twice."""
    file = tmp_path / "checkpoints" / HISTORY
    first, _ = quiet(history=file)
    run(first, range(1, 108))
    assert [found.name for found in file.parent.iterdir()] == [HISTORY]  # nothing half written is left
    again, lines = quiet(history=tmp_path / "elsewhere" / HISTORY, resume=Resume(100, file))
    assert again.state()["steps"] == list(range(1, 101))
    assert run(again, range(101, 107), lambda step: 1.2)["alarm"] == 1
    said, warned = lines
    assert said == f"trend of mismatch_k3: resumed at step 100 with 100 steps of {file}"
    assert re.match(r"WARNING: step 106: mismatch_k3 jumped: x\d\.\d\d since training resumed from step 100, ", warned)
    assert json.loads((tmp_path / "elsewhere" / HISTORY).read_text()) == again.state()


def test_a_resumed_run_equals_the_one_that_never_stopped(tmp_path):
    whole, _ = quiet()
    run(whole, range(1, 201), grows)
    first, _ = quiet(history=tmp_path / HISTORY)
    run(first, range(1, 121), grows)
    again, _ = quiet(resume=Resume(100, tmp_path / HISTORY))
    last = run(again, range(101, 201), grows)
    other, _ = quiet()
    other.restore(json.loads(json.dumps(first.state())), 100)
    assert run(other, range(101, 201), grows) == last
    assert again.state() == other.state() == whole.state()
    anew, _ = quiet()
    run(anew, range(101, 201), grows)
    assert anew.state() != whole.state()  # control


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "FileNotFoundError: [Errno 2] No such file or directory: '{file}'"),
        ("{", "{file} is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"version": 2}', "not the state of a trend detector"),
        ("[]", "not the state of a trend detector"),
    ],
)
def test_a_resume_without_a_sound_history_starts_anew_and_says_so(content, reason, tmp_path, caplog):
    file = tmp_path / HISTORY
    if content is not None:
        file.write_text(content)
    monitor, lines = quiet(resume=Resume(10, file))
    anew = "trend of mismatch_k3: starts anew at step 10, a jump at this resume cannot be seen: "
    assert lines == [anew + reason.format(file=file)] and caplog.records == []
    assert run(monitor, [11])["alarm"] == 0
    other, lines = quiet()
    if content is not None and content != "{":
        other.restore(json.loads(content), 10)
        assert lines == [anew + reason]


def test_a_resume_without_any_history_says_so():
    _, lines = quiet(resume=Resume(10))
    assert lines == [
        "trend of mismatch_k3: starts anew at step 10, a jump at this resume cannot be seen: there is no history of the run "
        "before"
    ]


def test_a_new_run_overwrites_an_older_history(tmp_path):
    (tmp_path / HISTORY).write_text("{}")
    run(quiet(history=tmp_path / HISTORY)[0], [1])
    assert json.loads((tmp_path / HISTORY).read_text())["steps"] == [1]


def test_a_history_that_cannot_be_written_is_said_once_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    monitor, lines = quiet(history=tmp_path / "file" / HISTORY)
    assert run(monitor, (1, 2))["trend_missing"] == 0 and monitor.state()["steps"] == [1, 2]
    assert lines == [
        "trend of mismatch_k3: its history is not kept for a resume: "
        f"FileExistsError: [Errno 17] File exists: '{tmp_path}/file'"
    ]


def test_on_a_full_disk_the_history_before_stays_whole(tmp_path, monkeypatch):
    monitor, lines = quiet(history=tmp_path / HISTORY)
    run(monitor, [1])
    real = Path.write_text

    def full(self, text):
        real(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        run(monitor, (2, 3))
    assert [found.name for found in tmp_path.iterdir()] == [HISTORY]
    assert json.loads((tmp_path / HISTORY).read_text())["steps"] == [1]
    assert lines == [
        "trend of mismatch_k3: its history is not kept for a resume: OSError: [Errno 28] No space left on device"
    ]
    run(monitor, [4])  # there is space again
    assert json.loads((tmp_path / HISTORY).read_text())["steps"] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------ a whole run


def test_nothing_stops_a_run_of_two_hundred_steps(tmp_path, caplog):
    """A toy loop with bad batches, a resume in the middle and a history that cannot be written from step 150 on."""
    bad = {
        20: {"rollout": MASK * math.nan},
        40: {"trainer": MASK * -math.inf},
        60: {"response_mask": 0 * MASK, "loss_mask": 0 * MASK},
        80: {"rollout": MASK[:, :7]},
        110: {"trainer": None},
        130: {"advantages": MASK[0]},
        170: {"clip": None, "no_clip": "the loss has no range"},
    }
    file = tmp_path / "checkpoints" / HISTORY
    monitor, lines = quiet(history=file)
    log, step, resumed = {}, 0, False
    while step < 200:
        step += 1
        log[step] = short(monitor.observe(step, batch(seed=step, **bad.get(step, {}))))
        if step == 105 and not resumed:  # the run dies, and its last checkpoint is of step 100
            resumed, step = True, 100
            monitor = Monitor(say=lines.append, history=file, resume=Resume(100, file))
        if step == 150:
            file.unlink()
            file.mkdir()
    assert sorted(log) == list(range(1, 201))
    assert {step for step, found in log.items() if found["missing"]} == {20, 40, 60, 80, 110}
    assert {step for step, found in log.items() if found["phantom_missing"]} == {20, 40, 60, 80, 110, 130, 170}
    good = [found for step, found in log.items() if step not in bad and step >= 40]
    assert all(set(found) == SAME for found in good)
    assert not any(found["trend_missing"] or found.get("alarm") for found in log.values())
    assert all(math.isfinite(value) for found in log.values() for value in found.values())
    assert monitor.state()["steps"] == [step for step in range(1, 201) if not log[step]["missing"]]
    assert caplog.records == []
    what = [line.split(":")[0] for line in lines]
    assert what.count("mismatch metrics missing") == 4  # NaN and infinity have one reason; each is said once
    assert len(lines) == len(set(lines)) and sum("its history is not kept" in line for line in lines) == 1
