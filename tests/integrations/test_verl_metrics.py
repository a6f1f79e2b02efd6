"""What the trainer logs: this package's mismatch beside verl's, phantom clipping, the trend alarm, and the number of sites
that the workers patched; and the log-probs that join verl's rollout dump.

Contract: the keys are in every step's log; numbers of sites come from the workers and are checked against the config;
a metric that cannot be computed says why, is never zero, and never stops the training.
"""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
import torch
from omegaconf import OmegaConf

from verl_rounding_align.integrations.verl import trainer as hooked
from verl_rounding_align.monitor.mismatch import Mismatch, mismatch
from verl_rounding_align.monitor.phantom import Phantom, phantom
from verl_rounding_align.monitor.trend import CHANCE, Detector, Reading

pytestmark = pytest.mark.verl
NAMES = {f"rounding_align/{name}" for name in Mismatch().values()}
LATER = {f"rounding_align/{name}" for name in (*Phantom().values(), *Reading().values())}  # known when verl logs a step


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(hooked._Trainer, "metrics", True)
    monkeypatch.setattr(hooked._Trainer, "said", set())
    for name in ("detector", "history", "columns"):
        monkeypatch.setattr(hooked._Trainer, name, None)
    monkeypatch.setattr(hooked._Trainer, "masks", {})


def data(**change):
    """Return verl's padded batch after the trainer's forward pass: 4 prompts of 3 tokens, 5 response tokens."""
    from verl.protocol import DataProto

    g = torch.Generator().manual_seed(0)
    trainer = -3 * torch.rand(4, 5, generator=g)
    tensors = dict(
        responses=torch.zeros(4, 5, dtype=torch.long),
        old_log_probs=trainer,
        rollout_log_probs=trainer + 0.01 * torch.randn(4, 5, generator=g),
        response_mask=torch.arange(5) < torch.tensor([[5], [3], [1], [4]]),
    )
    tensors.update(change)
    return DataProto.from_dict({name: x for name, x in tensors.items() if x is not None})


def debug_metrics(batch):
    from verl.utils.debug.metrics import calculate_debug_metrics

    return calculate_debug_metrics(batch)


def test_mismatch_joins_verls_own_metrics():
    batch = data()
    found = debug_metrics(batch)
    expected = mismatch(*(batch.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")))
    assert {k: v for k, v in found.items() if k in NAMES} == {
        f"rounding_align/{k}": v for k, v in expected.values().items()
    }
    assert found["training/rollout_probs_diff_valid"] == 1
    assert expected.mismatch_kl != 0 and expected.tokens == 13


def test_equal_to_rollout_corr_on_the_same_batch():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    batch = data()
    found = debug_metrics(batch)
    _, theirs = compute_rollout_correction_and_add_to_batch(batch, OmegaConf.create({}))
    # 13 fp32 terms of size 1e-2, each exact to half an eps of a log-prob of size 3
    eps = torch.finfo(torch.float32).eps
    assert found["rounding_align/mismatch_kl"] == pytest.approx(theirs["rollout_corr/kl"], abs=3 * eps)
    assert found["rounding_align/mismatch_k3"] == pytest.approx(theirs["rollout_corr/k3_kl"], abs=2 * eps)
    assert found["rounding_align/mismatch_kl"] != pytest.approx(-theirs["rollout_corr/kl"], abs=3 * eps)  # control


def test_an_attention_mask_counts_its_response_part_only():
    """verl falls back to the attention mask, which is longer by the prompt."""
    mask = data().batch["response_mask"]
    attention = torch.cat([torch.ones(4, 3, dtype=torch.bool), mask], 1)
    found = debug_metrics(data(response_mask=None, attention_mask=attention))
    assert found["rounding_align/mismatch_kl"] == debug_metrics(data())["rounding_align/mismatch_kl"]


def test_switched_off():
    hooked._Trainer.metrics = False
    assert not NAMES & set(debug_metrics(data()))


def test_no_response_tokens_is_reported_and_never_zero(capsys):
    found = debug_metrics(data(response_mask=torch.zeros(4, 5, dtype=torch.bool)))
    assert found["rounding_align/missing"] == 1 and found["rounding_align/tokens"] == 0
    assert all(math.isnan(found[f"rounding_align/{name}"]) for name in ("mismatch_kl", "mismatch_k3", "abs_diff_max"))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "rounding_align: mismatch metrics missing: the batch has no response tokens"
    )


def test_a_failing_metric_reports_itself_and_harms_nothing(monkeypatch, capsys):
    def fail(*args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("verl_rounding_align.monitor.mismatch.mismatch", fail)
    for _ in range(2):
        found = debug_metrics(data())
    assert found["training/rollout_probs_diff_valid"] == 1 and found["rounding_align/missing"] == 1
    assert capsys.readouterr().out.count("mismatch metrics missing: ZeroDivisionError: a bug\n") == 1


def test_names_survive_verls_aggregation():
    """Steps made of several updates are aggregated by words in the name: means stay means, the maximum a maximum."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator
    from verl.utils.metric import reduce_metrics

    first, second = ({name: float(value) for name in NAMES} for value in (1, 3))  # the others are added after it
    aggregator = MetricsAggregator()
    for metrics in (first, second):
        aggregator.add_step_metrics(metrics, sample_count=4)
    found = aggregator.get_aggregated_metrics()
    expected = {name: 3.0 if name == "rounding_align/abs_diff_max" else 2.0 for name in NAMES}
    assert {name: found[name] for name in NAMES} == expected
    assert reduce_metrics({name: [1.0, 3.0] for name in NAMES}) == expected
    for role in ("actor", "ref"):
        assert aggregator._get_aggregation_type(f"rounding_align/sites_{role}") == "weighted_avg"


# ----------------------------------------------------------------------------------------------------------- trainer


class Group:
    """Stand-in for verl's worker group: one report per rank."""

    def __init__(self, *reports):
        self.reports, self.asked = reports, 0

    def rounding_align_report(self):
        self.asked += 1
        return list(self.reports)


def entry(sites=9, plan="rope: hf_eager -> vllm_compiled", forwards=1, idle=()):
    return {"plan": plan, "sites": sites, "forwards": forwards, "idle": list(idle)}


VALUE = {"regions": "rope", "engine": "vllm_compiled"}


class Queue:
    """Stand-in for verl's TransferQueue: nested rows of a step's sequences, by field."""

    def __init__(self, **change):
        batch = data().batch
        self.lengths = batch["response_mask"].sum(1).tolist()
        fields = {name: batch[name] for name in ("old_log_probs", "rollout_log_probs", "responses")}
        fields["advantages"] = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 5)
        fields["response_mask"] = torch.ones(4, 5, dtype=torch.long)
        self.rows = {name: [row[:n] for row, n in zip(x, self.lengths, strict=True)] for name, x in fields.items()}
        self.rows["prompts"] = [torch.arange(2 + i) for i in range(4)]
        self.rows.update(change)

    def kv_batch_get(self, keys, partition_id, select_fields):
        from tensordict import TensorDict

        assert list(keys) == KEYS and partition_id == "train"
        known = [name for name in select_fields if self.rows.get(name) is not None]
        nested = {name: torch.nested.as_nested_tensor(list(self.rows[name]), layout=torch.jagged) for name in known}
        return TensorDict(nested, batch_size=4)


KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
BATCH = SimpleNamespace(keys=KEYS, partition_id="train")


def trainer_class(queue=None):
    class PPOTrainer:
        global_steps = 0

        def __init__(self, group, actor=..., ref=..., reference=True, ref_group=None, **extra):
            clip = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
            section = {"actor": clip, "ref": {}, "rollout": {"calculate_log_probs": True}}
            for role, value in (("actor", actor), ("ref", ref)):
                if value is not ...:
                    section[role]["rounding_align"] = value
            config = {"actor_rollout_ref": section, "trainer": {}, "algorithm": {}}
            self.config = OmegaConf.merge(config, OmegaConf.create(extra))
            self.group, self.ref_group, self.use_reference_policy = group, ref_group, reference

        def _setup(self):
            self.actor_rollout_wg, self.ref_policy_wg = self.group, self.ref_group or self.group

        def fit(self, agent_loop_manager):
            self.global_steps += 1

        def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
            metrics["training/global_step"] = global_steps

        def step(self, number=1, **metrics):
            self._compute_metrics(BATCH, metrics, {}, global_steps=number, epoch=0)
            return metrics

        def _compute_advantage(self, batch, metrics):
            return batch

        def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
            infos = {"uid": [batch.keys[i] for i in (2, 0, 1, 3)]}  # verl sorts the rows
            self._dump_generations("inputs", "outputs", "gts", "scores", reward_extra_infos_dict=infos, dump_path="d")

        def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
            self.dumped = reward_extra_infos_dict

    hooked.on_trainer(SimpleNamespace(PPOTrainer=PPOTrainer, tq=queue or Queue()))
    return PPOTrainer


def trainer(*args, queue=None, **kwargs):
    made = trainer_class(queue)(*args, **kwargs)
    made._setup()
    return made


def others(found):
    """Return what is logged beside phantom clipping and the trend, which must be there."""
    assert set(found) >= LATER
    return {name: value for name, value in found.items() if name not in LATER}


GAP = {name: 0.5 for name in NAMES}


def test_sites_are_what_every_worker_reports_at_every_step():
    group = Group(*[{"actor": entry(9), "ref": entry(2)}] * 2)
    made = trainer(group, VALUE, VALUE)
    assert group.asked == 1
    for asked in (2, 3):
        found = others(made.step(asked, **GAP))
        assert found == {
            **GAP,
            "training/global_step": asked,
            "rounding_align/sites_actor": 9,
            "rounding_align/sites_ref": 2,
            "rounding_align/engine_verified": 0,  # nobody has asked an engine: fit has not begun
        }
        assert group.asked == asked


def test_sites_of_an_alignment_that_is_none():
    group = Group({"actor": entry(0, "none", 0), "ref": entry(0, "none", 0)})
    found = trainer(group, "none", "none").step(**GAP)
    assert (found["rounding_align/sites_actor"], found["rounding_align/sites_ref"]) == (0, 0)


def test_without_the_key_no_worker_is_asked():
    group = Group()
    assert others(trainer(group).step(**GAP)) == {**GAP, "training/global_step": 1}
    assert group.asked == 0


def test_a_reference_in_a_group_of_its_own_or_none_at_all():
    found = trainer(Group({"actor": entry(9)}), VALUE, VALUE, ref_group=Group({"ref": entry(9)})).step(**GAP)
    assert found["rounding_align/sites_ref"] == 9
    found = trainer(Group({"actor": entry(9)}), VALUE, VALUE, reference=False).step(**GAP)
    assert found["rounding_align/sites_ref"] == 0
    found = trainer(Group({"actor": entry(9)}), VALUE, VALUE).step(**GAP)  # LoRA: the actor without its adapter
    assert found["rounding_align/sites_ref"] == 9


KEY = "actor_rollout_ref.actor.rounding_align"


@pytest.mark.parametrize(
    "group, message",
    [
        (Group({"actor": entry(0, "none", 0), "ref": entry()}), f"{KEY}={VALUE!r} was asked for, and no worker has applied it"),
        (Group({"actor": entry(), "ref": entry(0, "none", 0)}), f"actor_rollout_ref.ref.rounding_align={VALUE!r} was asked for, and no worker has applied it"),
        (Group({"actor": entry(9), "ref": entry()}, {"actor": entry(8), "ref": entry()}), "rounding_align: the ranks of actor disagree: [('rope: hf_eager -> vllm_compiled', 8), ('rope: hf_eager -> vllm_compiled', 9)]"),
        (Group({"actor": entry(idle=["layers.1.mlp"]), "ref": entry()}), "rounding_align: actor never reached ['layers.1.mlp']"),
        (SimpleNamespace(), "rounding_align was asked for, and verl's workers were built without verl_rounding_align"),
    ],
)  # fmt: skip
def test_what_was_asked_for_and_not_done_stops_the_training(group, message):
    with pytest.raises(RuntimeError) as error:
        trainer(group, VALUE, VALUE)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "extra, reason",
    [
        (
            {"actor_rollout_ref": {"rollout": {"calculate_log_probs": False}}},
            "actor_rollout_ref.rollout.calculate_log_probs=False: the rollout engine returns no log-probs",
        ),
        (
            {"algorithm": {"rollout_correction": {"bypass_mode": True}}},
            "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own",
        ),
        ({}, "verl has not compared log-probs in this step"),
    ],
)
def test_a_step_without_log_probs_says_why(extra, reason, capsys):
    made = trainer(Group(), **extra)
    for number in (1, 2):
        found = made.step(number)
    assert found["rounding_align/missing"] == 1 and math.isnan(found["rounding_align/mismatch_k3"])
    assert capsys.readouterr().out == f"rounding_align: mismatch metrics missing: {reason}\n"


def test_metrics_switched_off_are_not_missing():
    assert trainer(Group(), trainer={"rounding_align_metrics": False}).step() == {"training/global_step": 1}


# ------------------------------------------------------------------------------------------- phantom clipping, trend


def padded(queue, name):
    return torch.nn.utils.rnn.pad_sequence(queue.rows[name], batch_first=True)


@pytest.mark.parametrize(
    "sides, limits", [((None, None), (0.2, 0.2)), ((0.1, 0.28), (0.1, 0.28)), ((0.0, None), (0, 0.2))]
)
def test_phantom_clipping_is_of_the_steps_batch_with_verls_range(sides, limits):
    gap = [torch.linspace(-0.5, 0.5, n) for n in (5, 3, 1, 4)]
    queue = Queue()
    queue.rows["rollout_log_probs"] = [x + d for x, d in zip(queue.rows["old_log_probs"], gap, strict=True)]
    actor = {"clip_ratio_low": sides[0], "clip_ratio_high": sides[1]}
    found = trainer(Group(), queue=queue, actor_rollout_ref={"actor": actor}).step(**GAP)
    fields = ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
    expected = phantom(*(padded(queue, name) for name in fields), *limits)
    assert {name: found[f"rounding_align/{name}"] for name in expected.values()} == expected.values()
    assert 0 < expected.phantom_clip_positive < expected.phantom_clip and expected.phantom_clip_negative > 0


@pytest.mark.parametrize(
    "queue, extra, reason",
    [
        (Queue(advantages=None), {}, "the batch has no advantages"),
        (Queue(rollout_log_probs=None), {}, 'KeyError: \'key "rollout_log_probs" not found in TensorDict'),
        (SimpleNamespace(), {}, "AttributeError: 'types.SimpleNamespace' object has no attribute 'kv_batch_get'"),
        (
            Queue(),
            {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}},
            "ValueError: actor_rollout_ref.actor.policy_loss.loss_mode='gspo' has no clip range for a token's ratio (vanilla, "
            "clip_cov have)",
        ),
    ],
)
def test_phantom_clipping_that_cannot_be_computed_says_why_once(queue, extra, reason, capsys):
    made = trainer(Group(), queue=queue, **extra)
    for number in (1, 2):
        found = made.step(number, **GAP)
    assert found["rounding_align/phantom_missing"] == 1 and math.isnan(found["rounding_align/phantom_clip_positive"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"rounding_align: phantom clipping missing: {reason}")


def test_in_bypass_mode_phantom_clipping_is_missing_and_not_zero():
    """verl then copies the rollout's log-probs to old_log_probs: every ratio would be 1."""
    extra = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    found = trainer(Group(), **extra).step()
    assert math.isnan(found["rounding_align/phantom_clip"]) and found["rounding_align/phantom_missing"] == 1


def values(steps, seed):
    """Return a series of mismatch_k3 without growth: 20 % scatter around 1e-4."""
    g = torch.Generator().manual_seed(seed)
    return (1e-4 * (0.2 * torch.randn(steps, generator=g, dtype=torch.float64)).exp()).tolist()


def run_steps(made, first, series):
    for number, value in enumerate(series, first):
        found = made.step(number, **{**GAP, "rounding_align/mismatch_k3": value})
    return {name: found[f"rounding_align/{name}"] for name in Reading().values()}


def test_growth_warns_once_and_the_alarm_stays(capsys):
    made = trainer(Group())
    made.fit(None)
    quiet = run_steps(made, 1, values(100, seed=0))
    assert quiet["alarm"] == 0 and abs(quiet["trend"]) < 0.5
    grown = run_steps(made, 101, [value * 1.005**step for step, value in enumerate(values(300, seed=1))])
    assert grown["alarm"] == 1 and 0 < grown["trend_low"] <= grown["trend"] <= grown["trend_high"]
    (line,) = capsys.readouterr().out.splitlines()
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"rounding_align: WARNING: step \d+: mismatch_k3 rising: x{number} per 100 steps "
        rf"\(95 % interval {number} to {number}\); {re.escape(CHANCE)}\. To see where it comes from: `verl-rounding-align "
        r"triage` on a rollout dump \(trainer\.rollout_data_dir\), `verl-rounding-align gap` on fixed weights",
        line,
    )


def test_a_failing_trend_reports_itself_and_harms_nothing(monkeypatch, capsys):
    monkeypatch.setattr(Detector, "update", lambda *args: 1 / 0)
    made = trainer(Group())
    found = [made.step(number, **GAP) for number in (1, 2)]
    assert all(math.isnan(found[-1][f"rounding_align/{name}"]) for name in Reading().values())
    line = "rounding_align: trend of mismatch_k3 missing: ZeroDivisionError: division by zero\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("resume_mode", ["auto", "resume_path"])
def test_a_resumed_run_knows_the_steps_before(resume_mode, tmp_path, capsys):
    """A new process, a jump at the resume; the steps after the checkpoint are run again and are not counted twice."""
    folder = tmp_path / "checkpoints"
    config = {"save_freq": 50, "default_local_dir": str(folder), "resume_mode": resume_mode}
    first = trainer(Group(), trainer=config)
    first.fit(None)
    run_steps(first, 1, values(107, seed=2))
    assert [file.name for file in folder.iterdir()] == [hooked.HISTORY]
    hooked._Trainer.detector = None
    if resume_mode == "resume_path":
        config |= {"resume_from_path": f"{folder}/global_step_100/", "default_local_dir": str(tmp_path / "elsewhere")}
    again = trainer(Group(), trainer=config)
    again.global_steps = 100
    again.fit(None)
    assert hooked._Trainer.detector.steps == list(range(1, 101))
    assert run_steps(again, 101, [1.8 * value for value in values(6, seed=3)])["alarm"] == 1
    said, warned = capsys.readouterr().out.splitlines()
    assert said == (
        f"rounding_align: trend of mismatch_k3: resumed at step 100 with 100 steps of {folder}/{hooked.HISTORY}"
    )
    assert re.search(
        r"step 106: mismatch_k3 jumped: x\d\.\d\d since training resumed from step 100, against the 100 steps before\. ",
        warned,
    )


def test_a_resume_without_a_history_says_so(tmp_path, capsys):
    made = trainer(Group(), trainer={"save_freq": 5, "default_local_dir": str(tmp_path)})
    made.global_steps = 10
    made.fit(None)
    assert capsys.readouterr().out == (
        "rounding_align: trend of mismatch_k3: starts anew at step 10, a jump at this resume cannot be seen: "
        f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/{hooked.HISTORY}'\n"
    )
    assert made.step(11, **GAP)["rounding_align/alarm"] == 0


def test_a_new_run_ignores_the_history_of_an_older_one(tmp_path):
    (tmp_path / hooked.HISTORY).write_text("{}")
    made = trainer(Group(), trainer={"save_freq": 5, "default_local_dir": str(tmp_path)})
    made.fit(None)
    made.step(1, **GAP)
    assert json.loads((tmp_path / hooked.HISTORY).read_text())["steps"] == [1]


def test_a_history_that_cannot_be_written_harms_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    made = trainer(Group(), trainer={"save_freq": 5, "default_local_dir": str(tmp_path / "file")})
    made.fit(None)
    found = [made.step(number, **GAP) for number in (1, 2)]
    assert found[-1]["rounding_align/alarm"] == 0
    assert capsys.readouterr().out == (
        "rounding_align: trend of mismatch_k3: its history is not kept for a resume: "
        f"FileExistsError: [Errno 17] File exists: '{tmp_path}/file'\n"
    )


def test_a_run_without_checkpoints_writes_nothing(tmp_path):
    made = trainer(Group(), trainer={"save_freq": -1, "default_local_dir": str(tmp_path / "none")})
    made.fit(None)
    made.step(1, **GAP)
    assert not (tmp_path / "none").exists()


# ------------------------------------------------------------------------------------------------- verl's rollout dump


def dump(queue=None, **extra):
    made = trainer(Group(), queue=queue, **extra)
    made._log_rollout_data(BATCH, {}, "d")
    return made.dumped


UIDS = [KEYS[i] for i in (2, 0, 1, 3)]


def test_the_dump_gains_each_sequences_own_log_probs():
    queue, found = Queue(), dump()
    names = {
        "trainer_log_probs": "old_log_probs",
        "rollout_log_probs": "rollout_log_probs",
        "response_mask": "response_mask",
        "loss_mask": "response_mask",
        "response_ids": "responses",
        "advantages": "advantages",
    }
    assert set(found) == {"uid", "prompt_length", *names} and found["uid"] == UIDS
    assert found["prompt_length"] == [4, 2, 3, 5]
    for name, field in names.items():
        assert found[name] == [queue.rows[field][i].tolist() for i in (2, 0, 1, 3)]
    assert found["trainer_log_probs"] != [row.tolist() for row in queue.rows["old_log_probs"]]  # control: the order
    assert json.loads(json.dumps(found)) == found


def test_the_dumps_mask_is_the_one_before_rejection_and_the_losss_stands_beside_it(capsys):
    """verl's rollout correction overwrites the mask in its queue; the mismatch metrics have counted the tokens before."""
    queue = Queue()
    before = [queue.rows["response_mask"][i].tolist() for i in (2, 0, 1, 3)]
    made = trainer(Group(), queue=queue, trainer={"rollout_data_dir": "d"})

    def reject():
        queue.rows["response_mask"] = [row * (i != 1) for i, row in enumerate(queue.rows["response_mask"])]

    made._compute_advantage(BATCH, metrics={})
    reject()
    made._log_rollout_data(BATCH, {}, "d")
    after = [queue.rows["response_mask"][i].tolist() for i in (2, 0, 1, 3)]
    assert (made.dumped["response_mask"], made.dumped["loss_mask"]) == (before, after) and before != after
    assert hooked._Trainer.masks == {}
    made._log_rollout_data(BATCH, {}, "d")  # control: a step whose mask was not kept
    assert made.dumped["response_mask"] == made.dumped["loss_mask"] == after


def test_no_mask_is_kept_where_nothing_is_dumped():
    trainer(Group(), queue=SimpleNamespace())._compute_advantage(BATCH, metrics={})
    assert hooked._Trainer.masks == {}


def test_a_mask_that_cannot_be_kept_is_said_and_harms_nothing(capsys):
    made = trainer(Group(), queue=SimpleNamespace(), trainer={"rollout_data_dir": "d"})
    for _ in range(2):
        made._compute_advantage(BATCH, metrics={})
    assert capsys.readouterr().out == (
        "rounding_align: the dump's response_mask is the loss's, after rejection: AttributeError: 'types.SimpleNamespace' "
        "object has no attribute 'kv_batch_get'\n"
    )


def test_a_dump_of_validation_is_left_alone():
    made = trainer(Group())
    made._dump_generations("inputs", "outputs", "gts", "scores", {"reward": [1]}, "d")
    assert made.dumped == {"reward": [1]}


def test_log_probs_that_are_not_finite_are_dumped_as_pythons_json_has_them():
    rows = Queue().rows["rollout_log_probs"]
    rows[2] = torch.tensor([math.nan])
    found = json.loads(json.dumps(dump(Queue(rollout_log_probs=rows))))
    assert math.isnan(found["rollout_log_probs"][0][0])


@pytest.mark.parametrize(
    "queue, extra, reason",
    [
        (
            Queue(old_log_probs=[*Queue().rows["old_log_probs"][:3], torch.zeros(2)]),
            {},
            "ValueError: the fields of sequence b_1_0 differ in length: {'rollout_log_probs': 4, 'trainer_log_probs': 2, "
            "'loss_mask': 4, 'response_ids': 4, 'advantages': 4, 'response_mask': 4}",
        ),
        (SimpleNamespace(), {}, "AttributeError: 'types.SimpleNamespace' object has no attribute 'kv_batch_get'"),
        (
            Queue(),
            {"algorithm": {"rollout_correction": {"bypass_mode": True}}},
            "ValueError: algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own",
        ),
    ],
)
def test_a_dump_without_log_probs_is_verls_own_and_says_why_once(queue, extra, reason, capsys):
    made = trainer(Group(), queue=queue, **extra)
    for _ in range(2):
        made._log_rollout_data(BATCH, {}, "d")
    assert made.dumped == {"uid": UIDS}
    assert capsys.readouterr().out == f"rounding_align: no log-probs in verl's rollout dump: {reason}\n"


def test_rows_that_are_not_the_batchs_are_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(hooked._Trainer, "columns", {"x_0_0": {}})
    made = trainer(Group())
    made._dump_generations("inputs", "outputs", "gts", "scores", {"uid": ["y_0_0"]}, "d")
    assert made.dumped == {"uid": ["y_0_0"]}
    assert capsys.readouterr().out == (
        "rounding_align: no log-probs in verl's rollout dump: its rows are not the batch's sequences: y_0_0\n"
    )


def test_switched_off_the_dump_is_verls_own(capsys):
    assert dump(trainer={"rounding_align_metrics": False}) == {"uid": UIDS}
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------------------- real runs


@pytest.mark.slow
@pytest.mark.vllm
def test_two_real_steps_with_all(tmp_path):
    """verl, Ray, FSDP2, compiled vLLM and a reference model: two GRPO steps with every group aligned."""
    folder = Path(__file__).parents[2] / "recipes" / "quickstart"
    sys.path.insert(0, str(folder))
    try:
        quickstart, make_assets = (importlib.import_module(name) for name in ("quickstart", "make_assets"))
    finally:
        sys.path.remove(str(folder))
    make_assets.make_assets(tmp_path / "assets")
    rows = quickstart.train("all", 2, tmp_path / "run", tmp_path / "assets")
    for row in rows:
        assert set(row) >= NAMES and row["rounding_align/missing"] == 0 and row["rounding_align/nonfinite"] == 0
        assert row["rounding_align/sites_actor"] == row["rounding_align/sites_ref"] == 9
        # verl sums in fp32: 2 eps for k3; gaps here are below 1e-2, so kl is exact to about eps of that
        assert row["rounding_align/mismatch_kl"] == pytest.approx(row["rollout_corr/kl"], abs=1e-8)
        assert row["rounding_align/mismatch_k3"] == pytest.approx(row["rollout_corr/k3_kl"], abs=2.4e-7)
    lines = re.findall(r"rounding_align: qwen3.*", (tmp_path / "run" / "train.log").read_text(errors="replace"))
    what = (
        "rounding_align: qwen3, 2 layers, add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites, hf_eager -> vllm_compiled"
    )
    assert sorted(lines) == [f"{what} (actor, rank 0)", f"{what} (ref, rank 0)"]
