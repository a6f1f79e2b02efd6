"""Contract of the settings that triage reads: they mean what they mean in verl, and each is named as its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triage_cases import CASES, outliers

from verl_rounding_align.triage import facts
from verl_rounding_align.triage.causes import CAUSES
from verl_rounding_align.triage.detect import NEXT, triage, triage_rollouts
from verl_rounding_align.triage.facts import Facts
from verl_rounding_align.triage.rows import ROUNDING, Finding

VERL = {
    "actor_rollout_ref": {
        "actor": {"strategy": "fsdp2", "optim": {"lr": 1e-6}},
        "rollout": {"temperature": 1.0, "top_p": 1, "top_k": -1, "logprobs_mode": "processed_logprobs", "calculate_log_probs": True},
    },
    "algorithm": {"rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}},
}  # fmt: skip


def of(**changes):
    config = json.loads(json.dumps(VERL))
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return facts.of_verl(config)


ROLLOUT, CORRECTION = "actor_rollout_ref__rollout__", "algorithm__rollout_correction__"


@pytest.mark.parametrize(
    "changes, cause, evidence",
    [
        (
            {f"{ROLLOUT}calculate_log_probs": False},
            "missing-log-probs",
            "rollout.calculate_log_probs=False: the rollout engine returns no log-probs",
        ),
        (
            {f"{CORRECTION}bypass_mode": True},
            "missing-log-probs",
            "rollout_correction.bypass_mode=True: the trainer takes the rollout's log-probs for its own",
        ),
        (
            {f"{ROLLOUT}top_p": 0.9, f"{ROLLOUT}top_k": 50},
            "kept-mass",
            "top_p=0.9 and top_k=50: the trainer's log-probs are of all tokens, the rollout's samples are not",
        ),
        (
            {f"{ROLLOUT}temperature": 0.6, f"{ROLLOUT}logprobs_mode": "raw_logprobs"},
            "processed-against-raw",
            "logprobs_mode=raw_logprobs at temperature 0.6, and the trainer divides by 0.6",
        ),
        (
            {f"{ROLLOUT}temperature": 0.6, f"{ROLLOUT}engine_kwargs": {"vllm": {"logprobs_mode": "raw_logprobs"}}},
            "processed-against-raw",
            "logprobs_mode=raw_logprobs at temperature 0.6, and the trainer divides by 0.6",
        ),
        (
            {f"{CORRECTION}rollout_is": "sequence", f"{CORRECTION}rollout_rs": "token_k1,seq_sum_k1"},
            "sequence-level-ratio",
            "algorithm.rollout_correction.rollout_is=sequence and algorithm.rollout_correction.rollout_rs=seq_sum_k1: without "
            "200 tokens' log-probs the spread of the product is not known",
        ),
        (
            {"actor_rollout_ref__actor__strategy": "megatron"},
            "unsupported-backend",
            "actor.strategy=megatron: alignment works with fsdp, fsdp2; nothing is aligned here",
        ),
    ],
)  # fmt: skip
def test_a_setting_of_verl_is_named_without_log_probs(changes, cause, evidence):
    (finding,) = triage(None, of(**changes))
    assert (finding.cause, finding.evidence) == (cause, evidence)
    assert finding.next_step == next(row.next_step for row in CAUSES if row.name == cause)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ROLLOUT}temperature": 0.6},
        {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_rs": "seq_mean_k3"},
    ],
)
def test_settings_that_agree_are_not_named(changes):
    (finding,) = triage(None, of(**changes))
    assert finding == Finding(ROUNDING, "possible", "no setting explains a mismatch; no log-probs were given", NEXT)


@pytest.mark.verl
def test_verls_default_config_has_nothing_to_name():
    verl = pytest.importorskip("verl")
    file = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"
    known = facts.of_yaml(file)
    assert (known.temperature, known.logprobs_mode, known.top_k, known.sequence_ratio) == (
        1.0,
        "processed_logprobs",
        0,
        "",
    )
    assert [f.cause for f in triage(None, known)] == [ROUNDING]


def test_what_a_rollout_file_says_of_raw_log_probs_is_used():
    """Both sides are of one distribution: a note, beside what the log-probs show, and not instead of it."""
    chosen = next(c for c in CASES if c.size == "eager, raw at T = 0.6, scored at 1").pairs
    assert [f.cause for f in triage(chosen)] == [ROUNDING]  # log-probs agree: they cannot show it
    meta = {"temperature": 0.6, "logprobs_mode": "raw_logprobs"}
    clean, note = triage_rollouts(chosen, meta)
    assert (clean.cause, note.cause, note.confidence) == (ROUNDING, "sampled-elsewhere", "possible")
    assert note.evidence == (
        "tokens are sampled with temperature=0.6; both sides' log-probs are raw, of all tokens at temperature 1: no part of the "
        "mismatch"
    )
    far = triage_rollouts(outliers(chosen), meta, Facts(experts=64))
    assert [f.cause for f in far] == ["moe-routing", "sampled-elsewhere"]
    top_p = next(c for c in CASES if c.size == "eager, raw at top-p 0.9").pairs
    found = triage_rollouts(top_p, {"temperature": 1.0, "top_p": 0.9, "logprobs_mode": "raw_logprobs"})
    assert [f.cause for f in found] == [ROUNDING, "sampled-elsewhere"]
    assert found[1].evidence.startswith("tokens are sampled with top_p=0.9; ")
    assert [f.cause for f in triage_rollouts(chosen, {**meta, "temperature": 1.0})] == [ROUNDING]


def test_a_config_that_is_not_verls_is_an_error(tmp_path):
    (tmp_path / "c.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError) as error:
        facts.of_yaml(tmp_path / "c.yaml")
    assert str(error.value) == (
        f"config='{tmp_path / 'c.yaml'}': expected verl's config, with actor_rollout_ref or algorithm at its root"
    )
    with pytest.raises(ValueError) as error:
        facts.of_yaml(tmp_path / "none.yaml")
    assert str(error.value) == f"config='{tmp_path / 'none.yaml'}': cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("actor_rollout_ref.rollout.temperature", "hot"),
        ("actor_rollout_ref.rollout.top_p", [0.9]),
        ("actor_rollout_ref.rollout.top_k", "all"),
        ("actor_rollout_ref.actor.optim.lr", True),
    ],
)
def test_a_setting_that_should_be_a_number_and_is_none_is_an_error(path, value, tmp_path):
    config = json.loads(json.dumps(VERL))
    *sections, key = path.split(".")
    place = config
    for section in sections:
        place = place[section]
    place[key] = value
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        facts.of_yaml(tmp_path / "c.yaml")
    assert str(error.value) == f"config='{tmp_path / 'c.yaml'}': {path}={value!r}: expected a number"
    place[key] = 1
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    assert 1 in vars(facts.of_yaml(tmp_path / "c.yaml")).values()


def test_experts_are_read_from_a_models_config():
    assert facts.of_model({"num_experts": 128}).experts == 128
    assert facts.of_model({"hidden_size": 64}).experts == 0
