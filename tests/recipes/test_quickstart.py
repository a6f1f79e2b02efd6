"""Contract of the quickstart: real GRPO runs with and without alignment, ends non-zero when anything is wrong, and cannot
pass with weights that did not reach the engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_rounding_align.engines.probe import result
from verl_rounding_align.plan import parse_plan
from verl_rounding_align.regions import KINDS

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(QUICKSTART)
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


def test_rounding_sized_mismatch_with_moving_weights_passes(quickstart):
    quickstart.check_weights(rows())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_lost_synchronisation_fails(quickstart, step):
    """Whichever step it is: the mismatch of that step alone is as large as the weights' movement (0.0177 * 0.2)."""
    mismatch = [1e-6] * 3
    mismatch[step - 1] = 3.6e-3
    with pytest.raises(
        RuntimeError, match=rf"^step {step}: mismatch_k3 3\.60e-03 is not below 3\.54e-03, the least that "
    ):
        quickstart.check_weights(rows(mismatch, clipped=[0.2] * 3))


def test_weights_that_do_not_move_fail(quickstart):
    with pytest.raises(RuntimeError, match=r"^step 3: .* or moved too little to tell$"):
        quickstart.check_weights(rows(clipped=(0.1, 0.0, 0.1)))


def test_a_mismatch_that_is_not_a_number_fails(quickstart):
    with pytest.raises(RuntimeError, match=r"^step 2: mismatch_k3 nan is not below"):
        quickstart.check_weights(rows((1e-6, math.nan, 1e-6)))


def test_metrics_that_are_missing_fail(quickstart):
    broken = rows()
    del broken[1]["rounding_align/mismatch_k3"]
    with pytest.raises(KeyError, match="rounding_align/mismatch_k3"):
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
    with pytest.raises(RuntimeError, match=rf"^rounding_align={arm}: rounding_align/sites_actor over the steps is \["):
        quickstart.check_sites(arm, rows(sites=sites))


def test_the_worker_must_have_said_what_it_aligned(quickstart, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("(WorkerDict) rounding_align: qwen3, 2 layers, rope 2 sites, a -> b (actor, rank 0)\n")
    assert quickstart.proof("rope", log) == "qwen3, 2 layers, rope 2 sites, a -> b"
    with pytest.raises(RuntimeError, match=r"^rounding_align=none: 1 lines of proof from the actor in "):
        quickstart.proof("none", log)
    log.write_text("(WorkerDict) rounding_align: qwen3, 2 layers, rope 2 sites, a -> b (ref, rank 0)\n")
    assert quickstart.proof("none", log) == "none"
    with pytest.raises(RuntimeError, match=r"^rounding_align=rope: 0 lines of proof from the actor in "):
        quickstart.proof("rope", log)


# -------------------------------------------------------------------------------------------------------------- the table


def test_summary_of_an_arm(quickstart):
    """By hand: mean of 1.2, 1.1, 1.7 = 4/3; s.e. = 0.1 * sqrt(1.44 + 1.21 + 2.89) / 3; median of the later steps 4."""
    summary = quickstart.summarise("none", "none", rows())
    assert (summary.steps, summary.sites_actor, summary.seconds_per_step) == (3, 0, 4.0)
    assert (summary.reward_first, summary.reward_last) == (pytest.approx(0.1), pytest.approx(0.3))
    assert summary.mismatch_k3 == pytest.approx(4e-6 / 3)
    assert summary.mismatch_k3_se == pytest.approx(1e-7 * math.sqrt(5.54) / 3)


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


# ---------------------------------------------------------------------------------------------------------- the real thing


def run(out: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, QUICKSTART / "quickstart.py", *options, "--out", out]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.vllm
def test_grpo_aligned_to_what_the_engine_was_asked(quickstart, tmp_path):
    """Compiled vLLM rollouts, FSDP2 actor and reference: five add-norm, two RoPE and two SwiGLU sites in two layers. The
    driver probes vLLM, and the running workers say that they are what was probed."""
    dump = f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"
    saved = [f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=3"]
    more = [word for override in (dump, *saved) for word in ("--verl", override)]
    kept = str(tmp_path / "kept")
    done = run(tmp_path, "--arms", "auto", "--steps", "3", *more, VERL_ROUNDING_ALIGN_CACHE=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    (arm,) = json.loads((tmp_path / "summary.json").read_text())["arms"]
    assert arm["steps"] == 3 and arm["sites_actor"] == 9
    (kept,) = (tmp_path / "kept").iterdir()
    found = result.load(kept)
    assert f"hf_eager -> {found.name}" in arm["plan"]
    plan, preset = parse_plan("auto", found), parse_plan("all", "vllm_compiled")
    assert all(plan.rounding(k) == preset.rounding(k) for k in KINDS if k != "experts")  # the model has none
    log = (tmp_path / "auto" / "train.log").read_text()
    for role in ("actor", "ref"):
        assert f"rounding_align: {role}: engine verified; {found.verified[0]}" in log
    logged = quickstart.read_metrics(tmp_path / "auto" / "metrics.jsonl")
    assert [row["rounding_align/engine_verified"] for row in logged] == [1, 1, 1]
    assert [row["rounding_align/sites_ref"] for row in logged] == [9, 9, 9]
    for row in logged:
        # verl computes both in fp32 over the same tokens: rounding only, and k3 is a difference of numbers near 1
        assert row["rounding_align/mismatch_kl"] == pytest.approx(row["rollout_corr/kl"], abs=1e-6)
        assert row["rounding_align/mismatch_k3"] == pytest.approx(row["rollout_corr/k3_kl"], abs=1e-7)
        check_dump(row, tmp_path / "rollouts" / f"{row['step']}.jsonl")
        # a mismatch of 1e-6 moves no ratio by 20 %; three steps are too few for a trend, and that is not a failure
        shares = [row[f"rounding_align/phantom_clip{side}"] for side in ("", "_positive", "_negative")]
        assert shares == [0, 0, 0] and row["rounding_align/phantom_missing"] == 0
        assert row["rounding_align/trend"] is None and row["rounding_align/alarm"] == 0  # verl logs NaN as null
    assert "missing: " not in log and "rollout dump" not in log
    assert "trend of mismatch_k3" not in log  # a run that starts says nothing
    # the same run, resumed from verl's checkpoint, aligned again and with the history of the trend
    resume = [*saved, "trainer.resume_mode=auto"]
    (row,) = quickstart.train("rope", 4, tmp_path / "resumed", tmp_path / "assets", more=resume, first=4)
    assert row["rounding_align/sites_actor"] == 2 and row["rounding_align/alarm"] == 0
    log = (tmp_path / "resumed" / "train.log").read_text()
    history = tmp_path / "checkpoints" / "rounding_align_trend.json"
    assert f"trend of mismatch_k3: resumed at step 3 with 3 steps of {history}" in log
    # what it holds: the four steps' mismatch, of two processes
    held = json.loads(history.read_text())
    values = [math.log(step["rounding_align/mismatch_k3"]) for step in (*logged, row)]
    assert held["steps"] == [1, 2, 3, 4] and held["x"] == pytest.approx(values)


def check_dump(row: dict, file: Path) -> None:
    """The log-probs of verl's rollout dump are the ones that the step's logged mismatch was computed from."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 128  # 16 prompts, 8 rollouts each
    tokens = kl = k3 = swapped = 0
    for line in lines:
        assert {"input", "output", "score", "uid"} <= set(line) and line["step"] == row["step"]
        assert line["prompt_length"] > 0 and len(line["response_ids"]) == len(line["advantages"]) <= 8
        columns = (line["trainer_log_probs"], line["rollout_log_probs"], line["response_mask"])
        for trainer, rollout, counts in zip(*columns, strict=True):
            if counts:
                d = rollout - trainer
                tokens, kl, k3, swapped = tokens + 1, kl + d, k3 + math.expm1(-d) + d, swapped + math.expm1(d) - d
    assert tokens == row["rounding_align/tokens"] > 0
    # the same fp32 numbers, summed in fp64 in another order: 1e-9 is far below one fp32 rounding (6e-8)
    assert k3 / tokens == pytest.approx(row["rounding_align/mismatch_k3"], rel=1e-9)
    assert kl / tokens == pytest.approx(row["rounding_align/mismatch_kl"], rel=1e-9, abs=1e-15)
    assert swapped / tokens != pytest.approx(row["rounding_align/mismatch_k3"], rel=1e-9)  # control: who is who
    assert len({round(line["advantages"][0], 6) for line in lines}) > 2


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.vllm
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
@pytest.mark.vllm
def test_stale_weights_fail(tmp_path):
    """The engine keeps the weights of the first synchronisation: the second step must give it away."""
    done = run(tmp_path, "--arms", "none", "--steps", "2", VERL_ROUNDING_ALIGN_TEST_STALE_WEIGHTS="1")
    assert done.returncode == 1
    assert "quickstart failed: step 2: mismatch_k3 " in done.stderr
    assert "the trainer's weights did not reach the engine" in done.stderr


@pytest.mark.slow
@pytest.mark.verl
def test_a_trainer_that_fails_fails_the_quickstart(tmp_path):
    done = run(tmp_path, "--arms", "ropee", "--steps", "1")
    assert done.returncode == 1
    assert "unknown region 'ropee'" in done.stderr
    assert "quickstart failed: " in done.stderr and "ropee: verl's trainer ended with status 1" in done.stderr
