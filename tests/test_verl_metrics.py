"""What the trainer logs: this package's mismatch beside verl's, and the number of sites that the workers patched.

Contract: the keys are in every step's log; numbers of sites come from the workers and are checked against the config;
a metric that cannot be computed says why, is never zero, and never stops the training.
"""

import importlib
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
import torch
from omegaconf import OmegaConf

from verl_rounding_align.integrations import verl as integration
from verl_rounding_align.metrics import Mismatch, mismatch

pytestmark = pytest.mark.verl
NAMES = {f"rounding_align/{name}" for name in Mismatch().values()}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(integration._Trainer, "metrics", True)
    monkeypatch.setattr(integration._Trainer, "said", set())


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
    integration._Trainer.metrics = False
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

    monkeypatch.setattr("verl_rounding_align.metrics.mismatch", fail)
    for _ in range(2):
        found = debug_metrics(data())
    assert found["training/rollout_probs_diff_valid"] == 1 and found["rounding_align/missing"] == 1
    assert capsys.readouterr().out.count("mismatch metrics missing: ZeroDivisionError: a bug\n") == 1


def test_names_survive_verls_aggregation():
    """Steps made of several updates are aggregated by words in the name: means stay means, the maximum a maximum."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator
    from verl.utils.metric import reduce_metrics

    first, second = ({name: float(value) for name in NAMES} for value in (1, 3))
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


def trainer_class():
    class PPOTrainer:
        def __init__(self, group, actor=..., ref=..., reference=True, ref_group=None, **extra):
            section = {"actor": {}, "ref": {}, "rollout": {"calculate_log_probs": True}}
            for role, value in (("actor", actor), ("ref", ref)):
                if value is not ...:
                    section[role]["rounding_align"] = value
            config = {"actor_rollout_ref": section, "trainer": {}, "algorithm": {}}
            self.config = OmegaConf.merge(config, OmegaConf.create(extra))
            self.group, self.ref_group, self.use_reference_policy = group, ref_group, reference

        def _setup(self):
            self.actor_rollout_wg, self.ref_policy_wg = self.group, self.ref_group or self.group

        def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
            metrics["training/global_step"] = global_steps

        def step(self, **metrics):
            self._compute_metrics(None, metrics, {}, global_steps=1, epoch=0)
            return metrics

    integration._on_trainer(SimpleNamespace(PPOTrainer=PPOTrainer))
    return PPOTrainer


def trainer(*args, **kwargs):
    made = trainer_class()(*args, **kwargs)
    made._setup()
    return made


GAP = {name: 0.5 for name in NAMES}


def test_sites_are_what_every_worker_reports_at_every_step():
    group = Group(*[{"actor": entry(9), "ref": entry(2)}] * 2)
    made = trainer(group, VALUE, VALUE)
    assert group.asked == 1
    for asked in (2, 3):
        found = made.step(**GAP)
        assert found == {
            **GAP,
            "training/global_step": 1,
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
    assert trainer(group).step(**GAP) == {**GAP, "training/global_step": 1}
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
    for _ in range(2):
        found = made.step()
    assert found["rounding_align/missing"] == 1 and math.isnan(found["rounding_align/mismatch_k3"])
    assert capsys.readouterr().out == f"rounding_align: mismatch metrics missing: {reason}\n"


def test_metrics_switched_off_are_not_missing():
    assert trainer(Group(), trainer={"rounding_align_metrics": False}).step() == {"training/global_step": 1}


# ---------------------------------------------------------------------------------------------------------- real runs


@pytest.mark.slow
@pytest.mark.vllm
def test_two_real_steps_with_all(tmp_path):
    """verl, Ray, FSDP2, compiled vLLM and a reference model: two GRPO steps with every group aligned."""
    folder = Path(__file__).parents[1] / "recipes" / "quickstart"
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
