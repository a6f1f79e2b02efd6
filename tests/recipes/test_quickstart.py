"""Contract of the quickstart: real GRPO runs with and without alignment, ends non-zero when anything is wrong, and cannot
pass with weights that did not reach the engine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stale

from verl_rounding_align.engines.probe import result
from verl_rounding_align.monitor import METRICS
from verl_rounding_align.plan import parse_plan
from verl_rounding_align.regions import KINDS

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"


@pytest.fixture(scope="module")
def quickstart():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUICKSTART)
        import quickstart

    return quickstart


def rows(mismatch=(1.2e-6, 1.1e-6, 1.7e-6), clipped=(0.18, 0.19, 0.14), sites=(0, 0, 0), seconds=(20.0, 3.0, 5.0)):
    """Metrics of three steps, of the size measured without alignment."""
    return [
        {
            "step": step + 1,
            "rounding_align/mismatch_k3": mismatch[step],
            "rounding_align/mismatch_k3_se": 0.1 * mismatch[step],
            "rounding_align/sites_actor": sites[step],
            "actor/pg_clipfrac": clipped[step],
            "critic/rewards/mean": 0.1 * (step + 1),
            "timing_s/step": seconds[step],
        }
        for step in range(3)
    ]


# ---------------------------------------------------------------------------------------------------- the check's logic


def test_k3_against_its_definition(quickstart):
    """r - log r - 1 by hand: r = 1.2 -> 0.2 - 0.1823216, r = 0.8 -> -0.2 + 0.2231436."""
    assert quickstart.k3(0.0) == 0.0
    assert quickstart.k3(math.log(1.2)) == pytest.approx(0.0176784, abs=1e-7)
    assert quickstart.k3(math.log(0.8)) == pytest.approx(0.0231436, abs=1e-7)


def lost(step: int, mismatch: str, least: str, clipped: str) -> str:
    """Return the pattern of the whole message of ``check_weights``."""
    said = (
        f"step {step}: mismatch_k3 {mismatch} is not below {least}, the least that stale weights would show (0.0177 * "
        f"pg_clipfrac {clipped}): the trainer's weights did not reach the engine, or moved too little to tell"
    )
    return f"^{re.escape(said)}$"


def test_rounding_sized_mismatch_with_moving_weights_passes(quickstart):
    assert quickstart.check_weights(rows()) is None  # it raised nothing


@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_lost_synchronisation_fails(quickstart, step):
    """Whichever step it is: the mismatch of that step alone is as large as the weights' movement (0.0177 * 0.2)."""
    mismatch = [1e-6] * 3
    mismatch[step - 1] = 3.6e-3
    with pytest.raises(RuntimeError, match=lost(step, "3.60e-03", "3.54e-03", "0.2")):
        quickstart.check_weights(rows(mismatch, clipped=[0.2] * 3))


def test_weights_that_do_not_move_fail(quickstart):
    with pytest.raises(RuntimeError, match=lost(3, "1.70e-06", "0.00e+00", "0")):
        quickstart.check_weights(rows(clipped=(0.1, 0.0, 0.1)))


def test_a_mismatch_that_is_not_a_number_fails(quickstart):
    with pytest.raises(RuntimeError, match=lost(2, "nan", "3.18e-03", "0.18")):
        quickstart.check_weights(rows((1e-6, math.nan, 1e-6)))


def test_metrics_that_are_missing_fail(quickstart):
    broken = rows()
    del broken[1]["rounding_align/mismatch_k3"]
    with pytest.raises(KeyError, match="^'rounding_align/mismatch_k3'$"):
        quickstart.check_weights(broken)


@pytest.mark.parametrize(
    "arm, sites, ok",
    [
        ("none", (0, 0, 0), True),
        ("rope", (2, 2, 2), True),
        ("rope", (0, 0, 0), False),
        ("none", (2, 2, 2), False),
        ("rope", (2, 2, 0), False),
    ],
)
def test_sites_must_fit_the_arm_at_every_step(quickstart, arm, sites, ok):
    if ok:
        quickstart.check_sites(arm, rows(sites=sites))
        return
    with pytest.raises(RuntimeError) as error:
        quickstart.check_sites(arm, rows(sites=sites))
    found = sorted(set(sites))
    assert str(error.value) == f"rounding_align={arm}: rounding_align/sites_actor over the steps is {found}"


def test_the_worker_must_have_said_what_it_aligned(quickstart, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("(WorkerDict) rounding_align: qwen3, 2 layers, rope 2 sites, a -> b (actor, rank 0)\n")
    assert quickstart.proof("rope", log) == "qwen3, 2 layers, rope 2 sites, a -> b"
    with pytest.raises(RuntimeError, match=f"^rounding_align=none: 1 lines of proof from the actor in {log}$"):
        quickstart.proof("none", log)
    log.write_text("(WorkerDict) rounding_align: qwen3, 2 layers, rope 2 sites, a -> b (ref, rank 0)\n")
    assert quickstart.proof("none", log) == "none"
    with pytest.raises(RuntimeError, match=f"^rounding_align=rope: 0 lines of proof from the actor in {log}$"):
        quickstart.proof("rope", log)


# -------------------------------------------------------------------------------------------------------------- the table


def test_summary_of_an_arm(quickstart):
    """By hand: mean of 1.2, 1.1, 1.7 = 4/3; s.e. = 0.1 * sqrt(1.44 + 1.21 + 2.89) / 3; median of the later steps 4."""
    summary = quickstart.summarise("none", "none", rows())
    assert (summary.steps, summary.sites_actor, summary.seconds_per_step) == (3, 0, 4.0)
    assert (summary.reward_first, summary.reward_last) == (pytest.approx(0.1), pytest.approx(0.3))
    # abs=0: the default, 1e-12, would be 1e-5 of the second; fp64 sums of three terms are exact to 1e-15
    assert summary.mismatch_k3 == pytest.approx(4e-6 / 3, rel=1e-12, abs=0)
    assert summary.mismatch_k3_se == pytest.approx(1e-7 * math.sqrt(5.54) / 3, rel=1e-12, abs=0)


def test_written_files(quickstart, tmp_path):
    arms = {"none": rows(), "all": rows(sites=(9, 9, 9))}
    summaries = [quickstart.summarise(arm, f"plan of {arm}", arms[arm]) for arm in arms]
    quickstart.write(summaries, arms, 61.4, tmp_path)
    record = json.loads((tmp_path / "summary.json").read_text())
    assert [arm["arm"] for arm in record["arms"]] == ["none", "all"] and record["seconds"] == 61
    assert set(record["versions"]) >= {"verl", "vllm", "torch"}
    text = (tmp_path / "summary.md").read_text()
    assert "| all | 3 | 0.100 | 0.300 | 1.33e-06 | 7.8e-08 | 9 | 4.0 |" in text
    assert "- all: plan of all" in text and quickstart.NOTE in text
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_file_is_read_up_to_its_last_whole_line(quickstart, tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert quickstart.read_metrics(file) == []
    file.write_text('{"step": 1, "data": {"a": 0.5}}\n{"step": 2, "da')
    assert quickstart.read_metrics(file) == [{"step": 1, "a": 0.5}]


def test_reward_is_the_share_of_right_characters(monkeypatch):
    monkeypatch.syspath_prepend(QUICKSTART)
    from reward import compute_score

    assert compute_score("digit", "33333333", "3") == 1.0
    assert compute_score("digit", "3a30", "3") == 0.25
    assert compute_score("digit", "", "3") == 0.0


@pytest.mark.parametrize("mismatch, fails", [((1e-6, 1e-6, 1e-6), False), ((1e-6, 3.6e-3, 1e-6), True)])
def test_the_command_ends_with_the_check_that_failed(quickstart, monkeypatch, tmp_path, mismatch, fails):
    """Its own training replaced: rows of a run in which the second synchronisation was lost, and of one without a fault."""
    monkeypatch.setattr(quickstart, "train", lambda *args: rows(mismatch, clipped=[0.2] * 3))
    monkeypatch.setattr(quickstart, "proof", lambda arm, log: arm)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--arms", "none", "--steps", "3", "--out", str(tmp_path)])
    if fails:
        with pytest.raises(RuntimeError, match=lost(2, "3.60e-03", "3.54e-03", "0.2")):
            quickstart.main()
    else:
        quickstart.main()
    assert (tmp_path / "summary.json").exists() != fails


# ------------------------------------------------------------------------------------------------ verl's rollout dump


def estimates(d: list[float]) -> tuple[float, float]:
    """Return the means of k1 and k3 over tokens; d = rollout - trainer log-prob."""
    return math.fsum(d) / len(d), math.fsum(math.expm1(-x) + x for x in d) / len(d)


def check_dump(row: dict, file: Path) -> None:
    """The log-probs of verl's rollout dump are the ones that the step's logged mismatch was computed from."""
    d = []
    for line in map(json.loads, file.read_text().splitlines()):
        assert line["step"] == row["step"]
        columns = (line["trainer_log_probs"], line["rollout_log_probs"], line["response_mask"])
        d += [rollout - trainer for trainer, rollout, counts in zip(*columns, strict=True) if counts]
    assert len(d) == row["rounding_align/tokens_total"] > 1
    kl, k3 = estimates(d)
    # Both sides take the same fp32 log-probs to fp64 and sum them in another order. A sum of n terms is exact to
    # n * 2^-53 of the sum of their sizes. A term of k3 is the difference of two numbers of size |d|, each exact to 2^-53.
    size = math.fsum(map(abs, d)) / len(d)
    kl_error = 2 * len(d) * 2**-53 * size
    k3_error = 2 * len(d) * 2**-53 * k3 + 4 * 2**-53 * size
    assert kl == pytest.approx(row["rounding_align/mismatch_kl"], abs=kl_error)
    assert k3 == pytest.approx(row["rounding_align/mismatch_k3"], abs=k3_error)
    # Controls. Trainer and rollout swapped turn the sign of kl. They need not show in k3, whose two forms differ by d^3 / 3:
    # over tokens that may cancel. A token less changes k3 by 1/n of what it exceeds the mean by; the largest does exceed it.
    assert -kl != pytest.approx(row["rounding_align/mismatch_kl"], abs=kl_error)
    less = sorted(d, key=abs)[:-1]
    assert estimates(less)[1] != pytest.approx(row["rounding_align/mismatch_k3"], abs=k3_error)


# mean of d^3 is zero: k3 is the same with trainer and rollout swapped, to 1e-10 of it; 6e-7, as in a run
ALIKE = [2.0**-10] * 8 + [-(2.0**-9)]


def a_dump(file: Path, trainer: str = "trainer_log_probs", rollout: str = "rollout_log_probs") -> dict:
    """Write two sequences of verl's dump, log-prob differences ``ALIKE`` and one masked token each; return the logged row."""
    columns = {trainer: [-1.0] * 10, rollout: [d - 1 for d in ALIKE] + [-7.0], "response_mask": [1] * 9 + [0]}
    file.write_text(2 * (json.dumps({"step": 1, **columns}) + "\n"))
    kl, k3 = estimates(2 * ALIKE)
    return {
        "step": 1,
        "rounding_align/tokens_total": 18,
        "rounding_align/mismatch_kl": kl,
        "rounding_align/mismatch_k3": k3,
    }


def test_a_dump_passes_also_where_k3_cannot_tell_trainer_from_rollout(tmp_path):
    assert estimates([-d for d in ALIKE])[1] == pytest.approx(estimates(ALIKE)[1], rel=1e-9, abs=0)
    check_dump(a_dump(tmp_path / "1.jsonl"), tmp_path / "1.jsonl")


def test_a_dump_of_swapped_log_probs_fails(tmp_path):
    row = a_dump(tmp_path / "1.jsonl", trainer="rollout_log_probs", rollout="trainer_log_probs")
    with pytest.raises(AssertionError):
        check_dump(row, tmp_path / "1.jsonl")


@pytest.mark.parametrize("name", ["mismatch_kl", "mismatch_k3"])
def test_a_mismatch_that_is_off_by_one_fp32_rounding_of_one_token_fails(tmp_path, name):
    """Half an fp32 step of a log-prob of size one, 2^-25, in one of a run's 1,024 tokens; in k3 times its d, 2^-9: 6e-14."""
    row = a_dump(tmp_path / "1.jsonl")
    row[f"rounding_align/{name}"] += 2**-25 / 1024 * (2**-9 if name == "mismatch_k3" else 1)
    with pytest.raises(AssertionError):
        check_dump(row, tmp_path / "1.jsonl")


# ---------------------------------------------------------------------------------------------------------- the real thing
# Three starts of verl, Ray and vLLM: a run that others resume and look at, the resumed one, and one that must not begin.


def run(out: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, QUICKSTART / "quickstart.py", *options, "--out", out]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def saved(folder: Path) -> list[str]:
    """verl's overrides that keep checkpoints in ``folder``, at every third step and at the last."""
    return [f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.save_freq=3"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """The quickstart's folder after three steps with ``auto``: compiled vLLM rollouts, FSDP2 actor and reference."""
    folder = tmp_path_factory.mktemp("quickstart")
    more = [f"trainer.rollout_data_dir={folder / 'rollouts'}", *saved(folder)]
    words = [word for override in more for word in ("--verl", override)]
    kept = str(folder / "kept")
    done = run(folder, "--arms", "auto", "--steps", "3", *words, VERL_ROUNDING_ALIGN_CACHE=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def two_more(quickstart, three_steps) -> tuple[list[dict], Path]:
    """Rows and folder of the same run resumed from verl's checkpoint, with ``all``, by an engine that does not take the
    weights of step 4: the rollouts of step 4 are made with the checkpoint's weights, those of step 5 as well."""
    folder = three_steps / "resumed"
    more = [*saved(three_steps), "trainer.resume_mode=auto"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", stale.path(three_steps / "stale"))
        return quickstart.train("all", 5, folder, three_steps / "assets", more=more, first=4), folder


def slow(test):
    for mark in (pytest.mark.slow, pytest.mark.verl, pytest.mark.vllm):
        test = mark(test)
    return test


@slow
def test_grpo_aligned_to_what_the_engine_was_asked(quickstart, three_steps):
    """The driver probes vLLM, and the running workers say that they are what was probed. Two layers have five add-norm, two
    RoPE and two SwiGLU sites."""
    (arm,) = json.loads((three_steps / "summary.json").read_text())["arms"]
    assert arm["steps"] == 3 and arm["sites_actor"] == 9
    (kept,) = (three_steps / "kept").glob("*.json")  # and its lock
    found = result.load(kept)
    assert f"hf_eager -> {found.name}" in arm["plan"]
    plan, preset = parse_plan("auto", found), parse_plan("all", "vllm_compiled")
    assert all(plan.rounding(k) == preset.rounding(k) for k in KINDS if k != "experts")  # the model has none
    for role in ("actor", "ref"):
        assert f"rounding_align: {role}: engine verified; {found.verified[0]}" in log(three_steps / "auto")
    logged = quickstart.read_metrics(three_steps / "auto" / "metrics.jsonl")
    assert [row["rounding_align/engine_verified"] for row in logged] == [1, 1, 1]
    assert [row["rounding_align/sites_ref"] for row in logged] == [9, 9, 9]


@slow
def test_every_step_logs_the_mismatch_that_verl_logs(quickstart, three_steps):
    logged = quickstart.read_metrics(three_steps / "auto" / "metrics.jsonl")
    assert len(logged) == 3
    for row in logged:
        assert set(row) >= {
            f"rounding_align/{name}" for name in METRICS if name.startswith(("mismatch", "abs_diff", "tokens"))
        }
        assert row["rounding_align/missing"] == row["rounding_align/nonfinite_total"] == 0
        # verl computes both in fp32. exp(d) is rounded to 2^-24 near 1, and so is exp(d) - d, hence 2 * 2^-24 in k3. Of kl
        # only the sum is rounded, 10 additions deep for 1,024 tokens in pairs, each to 2^-24 of what it sums
        kl_error = 10 * 2**-24 * row["rounding_align/abs_diff_mean"]
        assert row["rounding_align/mismatch_kl"] == pytest.approx(row["rollout_corr/kl"], abs=kl_error)
        assert row["rounding_align/mismatch_kl"] != pytest.approx(-row["rollout_corr/kl"], abs=kl_error)  # control
        assert row["rounding_align/mismatch_k3"] == pytest.approx(row["rollout_corr/k3_kl"], abs=2**-23)
    assert "missing: " not in log(three_steps / "auto")


@slow
def test_the_rollout_dump_holds_the_log_probs_of_every_step(quickstart, three_steps):
    for row in quickstart.read_metrics(three_steps / "auto" / "metrics.jsonl"):
        file = three_steps / "rollouts" / f"{row['step']}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == 128  # 16 prompts, 8 rollouts each
        for line in lines:
            assert {"input", "output", "score", "uid"} <= set(line)
            assert line["prompt_length"] > 0 and len(line["response_ids"]) == len(line["advantages"]) <= 8
        assert len({round(line["advantages"][0], 6) for line in lines}) > 2
        check_dump(row, file)
    assert "rollout dump" not in log(three_steps / "auto")  # it is said when a column cannot be joined


@slow
def test_a_small_mismatch_clips_nothing_and_three_steps_are_no_trend(quickstart, three_steps):
    """A mismatch of 1e-6 moves no ratio by 20 %. Three steps are too few for a trend, and that is not a failure."""
    logged = quickstart.read_metrics(three_steps / "auto" / "metrics.jsonl")
    assert len(logged) == 3
    for row in logged:
        shares = [row[f"rounding_align/phantom_clip{side}"] for side in ("", "_positive", "_negative")]
        assert shares == [0, 0, 0] and row["rounding_align/phantom_missing"] == 0
        assert "rounding_align/trend" not in row and row["rounding_align/alarm"] == 0
    assert "trend of mismatch_k3" not in log(three_steps / "auto")  # a run that starts says nothing


@slow
def test_a_resumed_run_is_aligned_again_and_says_so_once_a_role(two_more):
    found, folder = two_more
    for row in found:
        assert row["rounding_align/sites_actor"] == row["rounding_align/sites_ref"] == 9
    groups = "add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites"
    assert sorted(re.findall(r"rounding_align: qwen3.*", log(folder))) == [
        f"rounding_align: qwen3, 2 layers, {groups}, hf_eager -> vllm_compiled ({role}, rank 0)"
        for role in ("actor", "ref")
    ]


@slow
def test_a_resumed_run_goes_on_with_the_history_of_the_trend(quickstart, three_steps, two_more):
    found, folder = two_more
    history = three_steps / "checkpoints" / "rounding_align_trend.json"
    assert f"trend of mismatch_k3: resumed at step 3 with 3 steps of {history}" in log(folder)
    assert [row["rounding_align/alarm"] for row in found] == [0, 0]
    # what it holds: the five steps' mismatch, of two processes
    held = json.loads(history.read_text())
    logged = [*quickstart.read_metrics(three_steps / "auto" / "metrics.jsonl"), *found]
    values = [math.log(step["rounding_align/mismatch_k3"]) for step in logged]
    assert held["steps"] == [1, 2, 3, 4, 5] and held["x"] == pytest.approx(values)


@slow
def test_weights_that_did_not_reach_the_engine_are_found_at_the_step_that_needed_them(quickstart, two_more):
    found, _ = two_more
    quickstart.check_weights(found[:1])
    clipped = found[0]["actor/pg_clipfrac"]
    mismatch, least = found[1]["rounding_align/mismatch_k3"], quickstart.k3(math.log(1.2)) * clipped
    with pytest.raises(RuntimeError, match=lost(5, f"{mismatch:.2e}", f"{least:.2e}", f"{clipped:.3g}")):
        quickstart.check_weights(found)


@slow
def test_an_engine_that_rounds_elsewhere_stops_the_run_before_its_first_step(tmp_path):
    """Negative control of ``engine verified``: a variable that the driver's config does not show moves vLLM's rounding."""
    done = run(tmp_path, "--arms", "all", "--steps", "1", TORCHINDUCTOR_EMULATE_PRECISION_CASTS="1")
    assert done.returncode == 1
    assert (
        "actor_rollout_ref.actor.rounding_align: the running engine contradicts the plan: the engine has "
        "emulate_precision_casts=True, vllm_compiled was verified with False" in done.stderr
    )
    assert not (tmp_path / "all" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.verl
def test_a_trainer_that_fails_fails_the_quickstart(tmp_path):
    """verl ends in its driver, before Ray starts."""
    done = run(tmp_path, "--arms", "ropee", "--steps", "1")
    assert done.returncode == 1
    assert "unknown region 'ropee'" in done.stderr
    assert "quickstart failed: " in done.stderr and "ropee: verl's trainer ended with status 1" in done.stderr
