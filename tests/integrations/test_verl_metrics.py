"""What the trainer logs and dumps, and what it leaves alone.

Contract: without the key and the metrics' switch a step gains the mismatch from verl's own tensors, and no transfer, call,
file or column; with one of them there is one transfer a sub-step. Numbers of sites come from the workers and are checked
against the config. A metric that cannot be computed says why and never stops the training; nor does a method of verl that
takes other arguments. Sub-steps are combined as verl combines them. What an asynchronous trainer shows is called staleness.
"""

import importlib
import json
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.debug.metrics import calculate_debug_metrics

from verl_rounding_align.integrations.verl import NotApplied
from verl_rounding_align.integrations.verl import trainer as hooked
from verl_rounding_align.monitor import HISTORY, METRICS
from verl_rounding_align.monitor.mismatch import mismatch
from verl_rounding_align.monitor.phantom import phantom
from verl_rounding_align.plan import parse_plan

pytestmark = pytest.mark.verl
KEY = "actor_rollout_ref.actor.rounding_align"
PLAN = parse_plan("rope", "vllm_compiled")
VALUE = PLAN.as_dict()
KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
LENGTHS = [5, 3, 1, 4]
FREE = {  # what verl's own tensors give
    f"rounding_align/{name}"
    for name in METRICS
    if name.startswith(("mismatch", "abs_diff")) or name in ("tokens_total", "nonfinite_total", "missing", "stale")
}
ON = {"trainer": {"rounding_align_metrics": True}}


def data(seed=0, **change):
    """Return verl's padded batch after the trainer's forward pass: 4 responses of up to 5 tokens."""
    g = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(4, 5, generator=g)
    tensors = dict(
        responses=torch.arange(20).view(4, 5),
        old_log_probs=trainer,
        rollout_log_probs=trainer + 0.01 * torch.randn(4, 5, generator=g),
        response_mask=(torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long(),
    )
    tensors.update(change)
    return DataProto.from_dict({name: x for name, x in tensors.items() if x is not None})


def measured(batch) -> dict:
    found = mismatch(*(batch.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")))
    return {f"rounding_align/{name}": value for name, value in found.values().items()}


class Queue:
    """Stand-in for verl's TransferQueue after rejection and advantages; remembers what was fetched."""

    def __init__(self, **change):
        fields = {"advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 5)}
        fields["response_mask"] = torch.ones(4, 5, dtype=torch.long)
        fields["prompts"] = torch.zeros(4, 5)
        self.rows = {name: [row[:n] for row, n in zip(x, LENGTHS, strict=True)] for name, x in fields.items()}
        self.rows["prompts"] = [torch.arange(2 + i) for i in range(4)]
        self.rows.update(change)
        self.fetched = []

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert partition_id == "train" and len(keys) == 4
        self.fetched.append(list(select_fields))
        known = [name for name in select_fields if self.rows.get(name) is not None]
        nested = {name: torch.nested.as_nested_tensor(list(self.rows[name]), layout=torch.jagged) for name in known}
        return TensorDict(nested, batch_size=4)


class Group:
    """Stand-in for verl's worker group: one report per rank."""

    def __init__(self, *reports):
        self.reports, self.asked = reports, 0

    def rounding_align_report(self):
        self.asked += 1
        return list(self.reports)


def batch_of(names=KEYS, tags=True):
    lengths = [{"prompt_len": 2 + i, "seq_len": 9} if tags else {} for i in range(len(names))]
    return SimpleNamespace(keys=list(names), partition_id="train", tags=lengths)


def entry(sites=9, plan=str(PLAN), forwards=1, idle=()):
    return {"plan": plan, "sites": sites, "forwards": forwards, "idle": list(idle)}


def trainer_class(queue=None, **methods):
    """Return a stand-in for verl's PPOTrainer after the hook, with some methods replaced; None: the method is not there."""
    module = SimpleNamespace(
        tq=queue if queue is not None else Queue(), calculate_debug_metrics=calculate_debug_metrics
    )

    class PPOTrainer:
        global_steps = 0

        def __init__(self, group=None, actor=..., ref=..., reference=True, ref_group=None, **extra):
            clip = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "fsdp_config": {}}
            section = {"actor": clip, "ref": {"fsdp_config": {}}, "rollout": {"calculate_log_probs": True}}
            for role, value in (("actor", actor), ("ref", ref)):
                if value is not ...:
                    section[role]["rounding_align"] = value
            section["model"] = {"path": "/m"}
            config = {"actor_rollout_ref": section, "trainer": {"v1": {"trainer_mode": "sync"}}, "algorithm": {}}
            self.config = OmegaConf.merge(config, OmegaConf.create(extra))
            self.group, self.ref_group, self.use_reference_policy = group, ref_group, reference

        def _setup(self):
            self.actor_rollout_wg, self.ref_policy_wg = self.group, self.ref_group or self.group

        def fit(self, agent_loop_manager=None):
            self.global_steps += 1

        def _compute_old_log_prob(self, batch, metrics):
            bypass = (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode")
            if self.config.actor_rollout_ref.rollout.calculate_log_probs and not bypass:
                metrics.update(module.calculate_debug_metrics(self.now))
            return batch

        def _compute_advantage(self, batch, metrics):
            return batch

        def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
            metrics["training/global_step"] = global_steps

        def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
            order = [2, 0, 1, 3, *range(4, len(batch.keys))]  # verl sorts the rows
            infos = {"uid": [batch.keys[i] for i in order]}
            self._dump_generations("inputs", "outputs", "gts", "scores", reward_extra_infos_dict=infos, dump_path="d")

        def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
            self.dumped = reward_extra_infos_dict

        def step(self, number=1, *batches, metrics=None, dump=False):
            """Mirrors: verl 0.9.1 PPOTrainer.step and the end of its fit."""
            aggregator, subs = MetricsAggregator(), []
            for i, self.now in enumerate(batches or (data(),)):
                found = dict(metrics or {})
                batch = batch_of([f"{name[0]}{i}{name[1:]}" for name in KEYS] if i else KEYS)
                self._compute_old_log_prob(batch, metrics=found)
                self._compute_advantage(batch, metrics=found)
                aggregator.add_step_metrics(found, sample_count=len(batch.keys))
                subs.append(batch)
            found = aggregator.get_aggregated_metrics()
            whole = batch_of([key for sub in subs for key in sub.keys])
            self._compute_metrics(whole, found, {}, global_steps=number, epoch=0)
            if dump:
                self._log_rollout_data(whole, {}, "d")
            return {name: x for name, x in found.items() if not name.startswith("training/rollout")}

    for name, method in methods.items():
        if method is None:
            delattr(PPOTrainer, name)
        else:
            setattr(PPOTrainer, name, method)
    module.PPOTrainer = PPOTrainer
    PPOTrainer.absent = hooked.on_trainer(module)
    return PPOTrainer


def trainer(*args, queue=None, methods=(), **kwargs):
    made = trainer_class(queue, **dict(methods))(*args, **kwargs)
    made._setup()
    return made


def lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("rounding_align")]


# ----------------------------------------------------------------------------------- nothing for those who did not ask


class Untouchable:
    """Fails whatever is done with it."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was used in a run that asked for nothing")


def untouched(monkeypatch, tmp_path, **extra):
    """Return a trainer of a run that asks for nothing, whose queue, workers, engines and ray fail when they are used."""
    for name in ("get", "put", "remote"):
        monkeypatch.setattr(f"ray.{name}", Untouchable().__getattr__)
    config = {"rollout_data_dir": "d", "save_freq": 5, "default_local_dir": str(tmp_path / "checkpoints")} | extra
    made = trainer(Untouchable(), queue=Untouchable(), trainer=config)
    made.llm_server_manager = Untouchable()
    return made


def test_a_run_that_asks_for_nothing_gains_verls_own_mismatch_and_nothing_else(monkeypatch, tmp_path, capsys):
    made = untouched(monkeypatch, tmp_path)
    made.global_steps = 10  # a resume
    made.fit()
    found = [made.step(number, dump=True) for number in (11, 12)]
    assert set(found[1]) == FREE | {"training/global_step"}
    assert found[1]["rounding_align/mismatch_k3"] == measured(data())["rounding_align/mismatch_k3"] > 0
    assert set(made.dumped) == {"uid"} and not list(tmp_path.iterdir()) and lines(capsys) == []


@pytest.mark.parametrize("asks", [{"trainer": {"rounding_align_metrics": True}}, {"actor": "none"}])
def test_who_asks_gets_transfer_file_and_columns(tmp_path, asks):
    """Positive control: the same run with the switch, or with the key as none."""
    config = {"rollout_data_dir": "d", "save_freq": 5, "default_local_dir": str(tmp_path)} | asks.pop("trainer", {})
    queue = Queue()
    made = trainer(Group({"actor": entry(0, "none", 0)}), queue=queue, trainer=config, **asks)
    made.fit()
    found = made.step(1, dump=True)
    assert found["rounding_align/phantom_missing"] == 0 and "rounding_align/alarm" in found
    assert queue.fetched == [["response_mask", "advantages"]]
    assert set(made.dumped) > {"uid", "trainer_log_probs"} and [file.name for file in tmp_path.iterdir()] == [HISTORY]


def test_a_run_without_log_probs_that_asks_for_nothing_is_told_nothing(capsys):
    found = trainer(actor_rollout_ref={"rollout": {"calculate_log_probs": False}}).step(1)
    assert found == {"training/global_step": 1} and lines(capsys) == []


def test_switched_off(capsys):
    made = trainer(queue=Untouchable(), trainer={"rounding_align_metrics": False, "rollout_data_dir": "d"})
    made.fit()
    assert made.step(1, dump=True) == {"training/global_step": 1} and set(made.dumped) == {"uid"}
    assert lines(capsys) == []


# ------------------------------------------------------------------------------------------------------------ mismatch


def test_equal_to_rollout_corr_on_the_same_batch():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    found = trainer().step(1)
    _, theirs = compute_rollout_correction_and_add_to_batch(data(), OmegaConf.create({}))
    # 13 fp32 terms of size 1e-2, each exact to half an eps of a log-prob of size 3
    eps = torch.finfo(torch.float32).eps
    assert found["rounding_align/mismatch_kl"] == pytest.approx(theirs["rollout_corr/kl"], rel=0, abs=3 * eps)
    assert found["rounding_align/mismatch_k3"] == pytest.approx(theirs["rollout_corr/k3_kl"], rel=0, abs=2 * eps)
    control = -theirs["rollout_corr/kl"]
    assert found["rounding_align/mismatch_kl"] != pytest.approx(control, rel=0, abs=3 * eps)


def test_an_attention_mask_counts_its_response_part_only():
    """verl falls back to the attention mask, which is longer by the prompt."""
    mask = data().batch["response_mask"]
    attention = torch.cat([torch.ones(4, 3, dtype=torch.long), mask], 1)
    found = trainer().step(1, data(response_mask=None, attention_mask=attention))
    assert found["rounding_align/mismatch_kl"] == trainer().step(1)["rounding_align/mismatch_kl"]


def test_no_response_tokens_is_reported_and_never_zero(capsys):
    found = trainer().step(1, data(response_mask=torch.zeros(4, 5, dtype=torch.long)))
    assert found["rounding_align/missing"] == 1 and found["rounding_align/tokens_total"] == 0
    assert "rounding_align/mismatch_k3" not in found
    assert lines(capsys) == ["rounding_align: mismatch metrics missing: the batch has no response tokens"]


def test_a_programming_error_is_logged_once_with_its_traceback_and_harms_nothing(monkeypatch, capsys, caplog):
    def fail(*args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("verl_rounding_align.monitor.monitor.mismatch", fail)
    made = trainer()
    with caplog.at_level(logging.ERROR, "verl_rounding_align"):
        for number in (1, 2):
            found = made.step(number)
    assert found["rounding_align/missing"] == 1
    assert lines(capsys) == ["rounding_align: mismatch metrics missing: ZeroDivisionError: a bug"]
    (record,) = [record for record in caplog.records if record.name == "verl_rounding_align"]
    assert record.exc_info[0] is ZeroDivisionError


def test_sub_steps_add_up_tokens_and_one_of_nans_spoils_nothing():
    """parameter_sync_step=2: verl combines; a sub-step whose log-probs are all NaN counts its tokens and no more."""
    broken = data(1, rollout_log_probs=torch.full((4, 5), math.nan))
    queue = Queue()
    found = trainer(queue=queue, **ON).step(1, data(), data(2), broken)
    one, two = measured(data()), measured(data(2))
    assert found["rounding_align/tokens_total"] == 26 and found["rounding_align/nonfinite_total"] == 13
    mean = (one["rounding_align/mismatch_k3"] + two["rounding_align/mismatch_k3"]) / 2
    assert found["rounding_align/mismatch_k3"] == pytest.approx(mean, rel=1e-12, abs=0)  # one fp64 rounding each: 2e-16
    assert found["rounding_align/abs_diff_max"] == max(x["rounding_align/abs_diff_max"] for x in (one, two))
    assert found["rounding_align/missing"] == pytest.approx(1 / 3, rel=1e-12, abs=0)
    assert not any(math.isnan(x) for x in found.values())
    assert queue.fetched == [["response_mask", "advantages"]] * 3  # one transfer a sub-step


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_an_asynchronous_trainer_measures_staleness_and_calls_it_so(mode, capsys):
    found = trainer(**{"trainer": {"rounding_align_metrics": True, "v1": {"trainer_mode": mode}}}).step(1)
    stale = mode != "sync"
    assert found["rounding_align/stale"] == stale
    for name in ("kl", "k3", "k3_se"):
        assert (f"rounding_align/staleness_{name}" in found, f"rounding_align/mismatch_{name}" in found) == (
            stale,
            not stale,
        )
    assert ("rounding_align/alarm" in found) != stale
    said = lines(capsys)
    assert len(said) == stale and (not stale or f"trainer.v1.trainer_mode={mode}" in said[0])


@pytest.mark.parametrize(
    "extra, reason",
    [
        (
            {"actor_rollout_ref": {"rollout": {"calculate_log_probs": False}}, "actor": "none"},
            "actor_rollout_ref.rollout.calculate_log_probs=False: the rollout engine returns no log-probs",
        ),
        (
            {"algorithm": {"rollout_correction": {"bypass_mode": True}}, "actor": "none"},
            "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own",
        ),
        (
            {**ON, "methods": {"_compute_old_log_prob": lambda self, batch, metrics: batch}},
            "verl has not compared log-probs in this step",
        ),
    ],
)
def test_a_step_without_log_probs_says_why(extra, reason, capsys):
    made = trainer(Group(), queue=Untouchable(), **extra)
    for number in (1, 2):
        found = made.step(number)
    assert found["rounding_align/missing"] == found["rounding_align/phantom_missing"] == 1
    assert "rounding_align/mismatch_k3" not in found and "rounding_align/phantom_clip" not in found
    assert lines(capsys) == [f"rounding_align: mismatch metrics missing: {reason}"]


# ----------------------------------------------------------------------------------------------- sites, engines, hooks


def test_sites_are_what_every_worker_reports_at_every_step():
    group = Group(*[{"actor": entry(9), "ref": entry(2)}] * 2)
    made = trainer(group, VALUE, VALUE)
    assert group.asked == 1
    for asked in (2, 3):
        found = made.step(asked)
        assert (found["rounding_align/sites_actor"], found["rounding_align/sites_ref"]) == (9, 2)
        assert found["rounding_align/engine_verified"] == 0  # there is no engine here
        assert group.asked == asked


def test_sites_of_an_alignment_that_is_none():
    group = Group({"actor": entry(0, "none", 0), "ref": entry(0, "none", 0)})
    found = trainer(group, "none", "none").step(1)
    assert (found["rounding_align/sites_actor"], found["rounding_align/sites_ref"]) == (0, 0)
    assert "rounding_align/engine_verified" not in found


def test_a_reference_in_a_group_of_its_own_or_none_at_all():
    def sites_of_reference(*args, **kwargs):
        return trainer(*args, VALUE, VALUE, **kwargs).step(1)["rounding_align/sites_ref"]

    assert sites_of_reference(Group({"actor": entry(9)}), ref_group=Group({"ref": entry(9)})) == 9
    assert sites_of_reference(Group({"actor": entry(9)}), reference=False) == 0
    assert sites_of_reference(Group({"actor": entry(9)})) == 9  # LoRA: the actor without its adapter


@pytest.mark.parametrize(
    "group, message",
    [
        (Group({"actor": entry(0, "none", 0), "ref": entry()}), f"{KEY}={str(PLAN)!r} was asked for, and no worker has applied it"),
        (Group({"actor": entry(), "ref": entry(0, "none", 0)}), f"actor_rollout_ref.ref.rounding_align={str(PLAN)!r} was asked for, and no worker has applied it"),
        (Group({"actor": entry(9), "ref": entry()}, {"actor": entry(8), "ref": entry()}), f"rounding_align: the ranks of actor disagree: [({str(PLAN)!r}, 8), ({str(PLAN)!r}, 9)]"),
        (Group({"actor": entry(idle=["layers.1.mlp"]), "ref": entry()}), "rounding_align: actor never reached ['layers.1.mlp']"),
        (SimpleNamespace(), "rounding_align was asked for, and verl's workers were built without verl_rounding_align"),
    ],
)  # fmt: skip
def test_what_was_asked_for_and_not_done_stops_the_training(group, message):
    with pytest.raises(NotApplied) as error:
        trainer(group, VALUE, VALUE)
    assert str(error.value) == message


def test_a_worker_that_falls_idle_stops_the_training_and_one_that_does_not_answer_does_not(capsys):
    group = Group({"actor": entry()})
    made = trainer(group, VALUE)
    group.reports = ({"actor": entry(idle=["layers.0.mlp"])},)
    with pytest.raises(NotApplied, match=r"actor never reached \['layers.0.mlp'\]"):
        made.step(1)
    group.reports = None
    found = made.step(2)
    assert "rounding_align/sites_actor" not in found and found["rounding_align/missing"] == 0
    (line,) = [line for line in lines(capsys) if "reports" in line]
    assert line == "rounding_align: the workers' reports are missing: TypeError: 'NoneType' object is not iterable"


def test_engines_are_asked_before_the_first_step_and_again_for_late_ones(monkeypatch):
    looks, verdicts = [], [True, True, False]

    def look(self):
        looks.append(self.trainer.global_steps)
        return verdicts.pop(0)

    monkeypatch.setattr("verl_rounding_align.integrations.verl.running.Engines.look", look)
    made = trainer(Group({"actor": entry()}), VALUE)
    made.fit()
    assert looks == [0]
    assert [made.step(n)["rounding_align/engine_verified"] for n in (1, 2)] == [1, 0]
    trainer(Group({"actor": entry(0, "none", 0)}), "none").fit()
    assert len(looks) == 3  # nobody is asked where nothing is aligned


def test_an_engine_that_contradicts_the_plan_stops_the_run_before_its_first_step(monkeypatch):
    def look(self):
        raise NotApplied("contradicts the plan")

    monkeypatch.setattr("verl_rounding_align.integrations.verl.running.Engines.look", look)
    made = trainer(Group({"actor": entry()}), VALUE)
    with pytest.raises(NotApplied, match="contradicts the plan"):
        made.fit()
    assert made.global_steps == 0


def test_engines_that_cannot_be_asked_stop_nothing(monkeypatch, capsys):
    monkeypatch.setattr("verl_rounding_align.integrations.verl.running.replicas", lambda trainer: 1 / 0)
    made = trainer(Group({"actor": entry()}), VALUE)
    made.fit()
    assert made.global_steps == 1 and made.step(1)["rounding_align/engine_verified"] == 0
    said = "rounding_align: the running engines cannot be asked: ZeroDivisionError: division by zero"
    assert lines(capsys).count(said) == 1


METHODS = ["_setup", "fit", "_compute_old_log_prob", "_compute_advantage", "_compute_metrics", "_log_rollout_data"]


@pytest.mark.parametrize("name", [*METHODS, "_dump_generations"])
@pytest.mark.parametrize("asks", [ON, {"actor": VALUE}], ids=["metrics", "key"])
def test_a_method_that_verl_does_not_have_stops_who_asked(name, asks):
    made = trainer_class(**{name: None})
    assert made.absent == [f"PPOTrainer.{name}"]
    started = made(Group({"actor": entry()}), **asks)
    with pytest.raises(NotApplied) as error:
        started.fit() if name == "_setup" else started._setup()
    what = "trainer.rounding_align_metrics=True" if asks is ON else "rounding_align"
    assert str(error.value) == (
        f"{what}: verl 0.9.1 has no PPOTrainer.{name}, which this package extends; it works with verl >=0.9,<0.10 (tested with "
        "0.9.1)"
    )


def test_a_method_that_verl_does_not_have_is_no_matter_to_who_did_not_ask():
    made = trainer(methods={"_dump_generations": None})
    made.fit()
    assert set(made.step(1)) == FREE | {"training/global_step"}


def test_whatever_a_module_lacks_is_remembered():
    assert hooked.on_trainer(SimpleNamespace()) == ["PPOTrainer"]
    found = hooked.on_trainer(SimpleNamespace(PPOTrainer=type("PPOTrainer", (), {})))
    names = [f"PPOTrainer.{name}" for name in (*METHODS, "_dump_generations")]
    assert sorted(found) == sorted(["tq", "calculate_debug_metrics", *names])


OTHER_ARGUMENTS = {
    "_compute_old_log_prob": lambda self, data, metrics=None: None,
    "_compute_advantage": lambda self, data, metrics=None: None,
    "_compute_metrics": lambda self, data, found, timing, global_steps, epoch: None,
}


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_a_changed_signature_never_stops_a_step(name, capsys):
    """What verl calls a batch or its metrics otherwise cannot be found: said, and the step goes on."""
    made = trainer(methods={name: OTHER_ARGUMENTS[name]}, **ON)
    found, batch = {}, batch_of()
    made.now = data()
    call = {"_compute_metrics": lambda: made._compute_metrics(batch, found, {}, 1, 0)}
    call.get(name, lambda: getattr(made, name)(batch, found))()
    (line,) = lines(capsys)
    assert re.search(r"was called without '(batch|metrics)', which was there in the tested release$", line)


# ------------------------------------------------------------------------------------------- phantom clipping, trend


@pytest.mark.parametrize(
    "sides, limits", [((None, None), (0.2, 0.2)), ((0.1, 0.28), (0.1, 0.28)), ((0.0, None), (0, 0.2))]
)
def test_phantom_clipping_is_of_the_losss_tokens_with_verls_range(sides, limits):
    batch = data()
    gap = torch.linspace(-0.5, 0.5, 20).view(4, 5)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + gap
    masks = [torch.tensor([1, 1, 0, 1, 1]), *Queue().rows["response_mask"][1:]]  # a token was rejected
    queue = Queue(response_mask=masks)
    actor = {"clip_ratio_low": sides[0], "clip_ratio_high": sides[1]}
    found = trainer(queue=queue, actor_rollout_ref={"actor": actor}, **ON).step(1, batch)
    mask, advantages = (
        torch.nn.utils.rnn.pad_sequence(queue.rows[name], batch_first=True) for name in ("response_mask", "advantages")
    )
    tensors = (batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    expected = phantom(*tensors, mask, advantages, *limits)
    assert {n: found[f"rounding_align/{n}"] for n in expected.values()} == expected.values()
    assert 0 < expected.phantom_clip_positive < expected.phantom_clip and expected.phantom_clip_negative > 0
    assert expected != phantom(*tensors, batch.batch["response_mask"], advantages, *limits)  # control: the other mask
    assert found["rounding_align/tokens_total"] == 13  # the mismatch counts the tokens before rejection


@pytest.mark.parametrize(
    "queue, extra, reason",
    [
        (Queue(advantages=None), {}, "phantom clipping missing: the batch has no advantages"),
        (
            Queue(response_mask=None),
            {},
            "the loss's mask and the advantages are missing: KeyError: 'key \"response_mask\" not found in TensorDict",
        ),
        (
            Queue(),
            {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}},
            "phantom clipping missing: actor_rollout_ref.actor.policy_loss.loss_mode='gspo' has no clip range for a token's "
            "ratio (vanilla, clip_cov have)",
        ),
    ],
)
def test_phantom_clipping_that_cannot_be_computed_says_why_once(queue, extra, reason, capsys):
    made = trainer(queue=queue, **ON, **extra)
    for number in (1, 2):
        found = made.step(number)
    assert found["rounding_align/phantom_missing"] == 1 and "rounding_align/phantom_clip_positive" not in found
    assert found["rounding_align/missing"] == 0 and found["rounding_align/mismatch_k3"] > 0
    said = lines(capsys)
    assert said[0].startswith(f"rounding_align: {reason}") and len(said) <= 2


def gaps(made, first, sizes):
    """Run one step for each size of the gap between trainer and rollout; return the last step's metrics."""
    for number, size in enumerate(sizes, first):
        batch = data()
        batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + size
        found = made.step(number, batch)
    return found


def scattered(steps, seed):
    """Return gaps whose k3 scatters by 20 % around 5e-5 without growing."""
    g = torch.Generator().manual_seed(seed)
    return (1e-2 * (0.1 * torch.randn(steps, generator=g, dtype=torch.float64)).exp()).tolist()


@pytest.mark.parametrize("resume_mode", ["auto", "resume_path"])
def test_a_resumed_run_knows_the_steps_before(resume_mode, tmp_path, capsys):
    """A new process, a jump at the resume; the steps after the checkpoint are run again and are not counted twice."""
    folder = tmp_path / "checkpoints"
    config = {"save_freq": 50, "default_local_dir": str(folder), "resume_mode": resume_mode, **ON["trainer"]}
    first = trainer(trainer=config)
    first.fit()
    assert gaps(first, 1, scattered(107, seed=2))["rounding_align/alarm"] == 0
    assert [file.name for file in folder.iterdir()] == [HISTORY]
    if resume_mode == "resume_path":
        config |= {"resume_from_path": f"{folder}/global_step_100/", "default_local_dir": str(tmp_path / "elsewhere")}
    again = trainer(trainer=config)
    again.global_steps = 100
    again.fit()
    assert gaps(again, 101, [1.35 * size for size in scattered(6, seed=3)])["rounding_align/alarm"] == 1
    said, warned = lines(capsys)
    assert said == (f"rounding_align: trend of mismatch_k3: resumed at step 100 with 100 steps of {folder}/{HISTORY}")
    assert re.search(r"step 106: mismatch_k3 jumped: x\d\.\d\d since training resumed from step 100", warned)


def test_a_resume_without_a_history_says_so(tmp_path, capsys):
    made = trainer(trainer={"save_freq": 5, "default_local_dir": str(tmp_path), **ON["trainer"]})
    made.global_steps = 10
    made.fit()
    (line,) = lines(capsys)
    assert line.startswith(
        "rounding_align: trend of mismatch_k3: starts anew at step 10, a jump at this resume cannot be seen"
    )
    assert made.step(11)["rounding_align/alarm"] == 0


def test_two_trainers_in_one_process_know_nothing_of_each_other():
    one, two = trainer(**ON), trainer(**ON)
    gaps(one, 1, scattered(40, seed=0))
    assert "rounding_align/trend" in one.step(41) and "rounding_align/trend" not in two.step(1)


def test_a_run_without_checkpoints_writes_nothing(tmp_path):
    made = trainer(trainer={"save_freq": -1, "default_local_dir": str(tmp_path / "none"), **ON["trainer"]})
    made.fit()
    made.step(1)
    assert not (tmp_path / "none").exists()


# ------------------------------------------------------------------------------------------------- verl's rollout dump

DUMPED = {"trainer": {"rounding_align_metrics": True, "rollout_data_dir": "d"}}
ORDER = (2, 0, 1, 3)


def cut(rows):
    return [rows[i][: LENGTHS[i]].tolist() for i in ORDER]


def test_the_dump_gains_each_sequences_own_log_probs_without_another_transfer():
    queue, batch = Queue(), data()
    made = trainer(queue=queue, **DUMPED)
    made.step(1, batch, dump=True)
    names = {
        "trainer_log_probs": batch.batch["old_log_probs"],
        "rollout_log_probs": batch.batch["rollout_log_probs"],
        "response_mask": batch.batch["response_mask"],
        "loss_mask": queue.rows["response_mask"],
        "response_ids": batch.batch["responses"],
        "advantages": queue.rows["advantages"],
    }
    found = made.dumped
    assert set(found) == {"uid", "prompt_length", *names} and found["uid"] == [KEYS[i] for i in ORDER]
    assert found["prompt_length"] == [4, 2, 3, 5]
    for name, rows in names.items():
        assert found[name] == cut(rows)
    unsorted = [row[:n].tolist() for row, n in zip(batch.batch["old_log_probs"], LENGTHS, strict=True)]
    assert found["trainer_log_probs"] != unsorted  # control: the order
    assert json.loads(json.dumps(found)) == found and queue.fetched == [["response_mask", "advantages"]]


def test_the_dump_holds_every_sub_step():
    made = trainer(**DUMPED)
    made.step(1, data(), data(1), dump=True)
    assert len(made.dumped["uid"]) == len(made.dumped["trainer_log_probs"]) == 8
    assert made.dumped["trainer_log_probs"][4] == data(1).batch["old_log_probs"][0].tolist()


def test_the_dumps_mask_is_the_one_before_rejection_and_the_losss_stands_beside_it():
    """verl's rollout correction overwrites the mask in its queue; the mismatch metrics have counted the tokens before."""
    rejected = [row * (i != 1) for i, row in enumerate(Queue().rows["response_mask"])]
    made = trainer(queue=Queue(response_mask=rejected), **DUMPED)
    made.step(1, dump=True)
    before, after = made.dumped["response_mask"], made.dumped["loss_mask"]
    assert before == cut(data().batch["response_mask"]) and after == cut(rejected) and before != after


def test_prompt_lengths_that_no_tag_says_are_fetched_with_the_rest(monkeypatch):
    monkeypatch.setitem(globals(), "batch_of", lambda names=KEYS: SimpleNamespace(**vars(batch_of_tagless(names))))
    queue = Queue()
    made = trainer(queue=queue, **DUMPED)
    made.step(1, dump=True)
    assert made.dumped["prompt_length"] == [4, 2, 3, 5]
    assert queue.fetched == [["response_mask", "advantages", "prompts"]]


def batch_of_tagless(names):
    return SimpleNamespace(keys=list(names), partition_id="train", tags=[{} for _ in names])


def test_a_dump_of_validation_is_left_alone():
    made = trainer(**DUMPED)
    made._dump_generations("inputs", "outputs", "gts", "scores", {"reward": [1]}, "d")
    assert made.dumped == {"reward": [1]}


def test_log_probs_that_are_not_finite_are_dumped_as_pythons_json_has_them():
    batch = data()
    batch.batch["rollout_log_probs"][2, 0] = math.nan
    made = trainer(**DUMPED)
    made.step(1, batch, dump=True)
    found = json.loads(json.dumps(made.dumped))
    assert math.isnan(found["rollout_log_probs"][0][0])


@pytest.mark.parametrize(
    "queue, extra, reason",
    [
        (Queue(response_mask=None), {}, "the step was not measured whole"),
        (
            Queue(),
            {"algorithm": {"rollout_correction": {"bypass_mode": True}}},
            "algorithm.rollout_correction.bypass_mode=True: the trainer computes no log-probs of its own",
        ),
    ],
)
def test_a_dump_without_log_probs_is_verls_own_and_says_why_once(queue, extra, reason, capsys):
    made = trainer(queue=queue, **DUMPED, **extra)
    for number in (1, 2):
        made.step(number, dump=True)
        assert set(made.dumped) == {"uid"}
    assert lines(capsys).count(f"rounding_align: no log-probs in verl's rollout dump: {reason}") == 1


@pytest.mark.parametrize(
    "rows, reason",
    [
        (lambda uids: [*uids[:3], "y_0_0"], "its rows are not the batch's sequences: y_0_0"),
        (lambda uids: None, "its rows are not the batch's sequences: None"),
    ],
)
def test_rows_that_are_not_the_batchs_are_left_alone(rows, reason, capsys):
    def log(self, batch, timing_raw, rollout_data_dir):
        infos = {"uid": rows(batch.keys)} if rows(batch.keys) else {}
        self._dump_generations("i", "o", "g", "s", infos, "d")

    made = trainer(methods={"_log_rollout_data": log}, **DUMPED)
    made.step(1, dump=True)
    assert set(made.dumped) <= {"uid"}
    assert lines(capsys) == [f"rounding_align: no log-probs in verl's rollout dump: {reason}"]


# ----------------------------------------------------------------------------------------------------------- a real run


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_run_without_the_key_gains_the_free_metrics_and_nothing_else(tmp_path):
    """verl, Ray, FSDP2, compiled vLLM: one GRPO step with dumps and a checkpoint. Runs with the key, which gain more, and what
    their metrics are: tests/recipes/test_quickstart.py."""
    folder = Path(__file__).parents[2] / "recipes" / "quickstart"
    sys.path.insert(0, str(folder))
    try:
        quickstart, make_assets = (importlib.import_module(name) for name in ("quickstart", "make_assets"))
    finally:
        sys.path.remove(str(folder))
    make_assets.make_assets(tmp_path / "assets")
    written = [f"trainer.rollout_data_dir={tmp_path / 'dump'}", f"trainer.default_local_dir={tmp_path / 'saved'}"]
    more = [f"~{KEY}", *written, "trainer.save_freq=1"]
    (row,) = quickstart.train("none", 1, tmp_path / "run", tmp_path / "assets", more=more)
    assert {name for name in row if name.startswith("rounding_align")} == FREE
    assert row["rounding_align/missing"] == 0 and row["rounding_align/tokens_total"] > 0
    line = json.loads((tmp_path / "dump" / "1.jsonl").read_text().splitlines()[0])
    assert set(line) == {"input", "output", "gts", "score", "step", "uid"}
    assert (tmp_path / "saved" / "global_step_1").is_dir() and not (tmp_path / "saved" / HISTORY).exists()
    said = re.findall(r"rounding_align: .*", (tmp_path / "run" / "train.log").read_text(errors="replace"))
    assert said == []
