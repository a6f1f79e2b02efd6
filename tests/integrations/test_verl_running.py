"""The running engines: who is asked, what a plan is worth for the answers, what stops the run.

Contract: every server of every replica is asked, once, also one that appears late; an engine that contradicts a plan stops the
run; a replica, or a rank, that has not answered is never verified, and harms nothing.
"""

import asyncio
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from omegaconf import OmegaConf
from tiny import verified
from verl_config import KEY, REF, probed

from verl_rounding_align.integrations.verl import NotApplied, running
from verl_rounding_align.plan import parse_plan

pytestmark = pytest.mark.verl
EAGER = verified("vllm_cpu")
NAMED, PROBED = parse_plan("all", "vllm_cpu"), parse_plan("all", probed())
RUN = "run `verl-rounding-align probe --model /m --mode eager` in the engine's environment"
OTHERS = (  # what a handle may answer beside fingerprints
    ("AttributeError: 'types.SimpleNamespace' object has no attribute 'rounding_align_fingerprint'", None),
    ("TimeoutError: no answer", TimeoutError("line\nno answer")),
    ("ValueError: fingerprint: unknown fields ['new'], missing fields []", [{**asdict(EAGER), "new": 1}]),
    ("why", [{"missing": "why"}]),
    ("replica 0: 0 of 1 ranks answered", []),
)


@pytest.fixture(autouse=True)
def ray_get(monkeypatch):
    """Stand in for ray.get: an answer, or the exception that a worker has raised."""

    def get(answer, timeout):
        assert 0 <= timeout <= running.TIMEOUT
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get", get)


def server(answer):
    """Return a handle of verl's server actor; ``calls`` counts how often it was asked."""
    handle = SimpleNamespace(calls=0)
    if answer is None:
        return handle

    def remote():
        handle.calls += 1
        return [asdict(x) if hasattr(x, "engine") else x for x in answer] if isinstance(answer, list) else answer

    handle.rounding_align_fingerprint = SimpleNamespace(remote=remote)
    return handle


def replica(*answers, ranks=None):
    return SimpleNamespace(servers=[server(answer) for answer in answers], world_size=ranks, replica_rank=0)


def trainer(*replicas, standalone=None):
    """Return what is read of verl's trainer; ``standalone``: replicas on machines of their own, as it is now."""
    role = {"fsdp_config": {}}
    section = {"actor": role, "ref": role, "model": {"path": "/m"}}
    managers = [SimpleNamespace(get_replicas=lambda: list(replicas))]
    if standalone is not None:
        managers.append(SimpleNamespace(get_replicas=lambda: standalone))
    return SimpleNamespace(
        config=OmegaConf.create({"actor_rollout_ref": section}), _rollout_server_managers=lambda: managers
    )


def engines(*replicas, plan=NAMED, roles=("actor",), **kwargs):
    return running.Engines(trainer(*replicas, **kwargs), dict.fromkeys(roles, plan))


@pytest.mark.parametrize("plan", [NAMED, PROBED], ids=["named", "probed"])
def test_the_running_engine_is_verified_once_for_each_role(capsys, plan):
    asked = replica([EAGER, EAGER], ranks=2)
    found = engines(asked, plan=plan, roles=("actor", "ref"))
    assert found.look() is found.look() is True
    assert capsys.readouterr().out == "".join(
        f"rounding_align: {role}: engine verified; {EAGER}\n" for role in ("actor", "ref")
    )
    assert asked.servers[0].calls == 1


@pytest.mark.parametrize(
    ("plan", "advice"), [(NAMED, f"{RUN}, or set ++{KEY}=auto"), (PROBED, RUN)], ids=["named", "probed"]
)
def test_an_engine_that_nobody_verified_is_named_with_what_to_run(capsys, plan, advice):
    newer = replace(EAGER, torch="2.14.0")
    assert engines(replica([newer]), plan=plan).look() is False
    assert capsys.readouterr().out == (
        f"rounding_align: actor: engine unverified: the engine has torch='2.14.0', {plan.engine} was verified with '2.13.0'; "
        f"{advice}; {newer}\n"
    )


def test_ranks_alone_are_said_without_advice_that_cannot_help(capsys):
    assert engines(replica([replace(EAGER, tensor_parallel=2)])).look() is False
    said = capsys.readouterr().out
    assert "the engine has tensor_parallel=2, vllm_cpu was verified with 1; ranks alone move no rounding point" in said
    assert "probe --model" not in said and "auto" not in said


def test_a_fused_all_reduce_contradicts_the_groups_that_it_moves_and_no_others(capsys):
    """vLLM's default on Hopper and Blackwell with several ranks; the driver accepts rope and swiglu there."""
    hopper = replace(
        EAGER, device="cuda", mode="compiled", backend="inductor", split=True, custom_ops=("none",), arch="sm90"
    )
    hopper = replace(hopper, tensor_parallel=2, passes=("fuse_allreduce_rms",))
    for accepted in ("rope", "rope+swiglu"):
        assert engines(replica([hopper]), plan=parse_plan(accepted, "vllm_compiled_split")).look() is False
    assert "engine unverified: vllm_compiled_split was not compared with an engine" in capsys.readouterr().out
    for refused in ("add_rms_norm", "paper", "carry"):
        with pytest.raises(NotApplied, match="fuse_allreduce_rms"):
            engines(replica([hopper]), plan=parse_plan(refused, "vllm_compiled_split")).look()


def test_a_replica_whose_judgement_failed_is_never_verified(monkeypatch):
    found = engines(replica([EAGER]))
    monkeypatch.setattr(found, "_judge", lambda new: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.look()
    assert found.look() is False
    assert engines(replica([EAGER])).look() is True, "negative control"


def test_one_replica_that_contradicts_the_plan_stops_the_run():
    other = verified("vllm_compiled")
    with pytest.raises(NotApplied) as error:
        engines(replica([EAGER]), replica([other]), roles=("ref",)).look()
    assert str(error.value) == (
        f"{REF}: the running engine contradicts the plan: the engine has mode='compiled', vllm_cpu was verified with 'eager'; "
        "the engine has custom_ops=('none',), vllm_cpu was verified with ('all',); engine: "
        f"{other}; set ++{REF}=auto, or give the engine the settings that the plan was made for"
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_engine_in_another_dtype_than_the_trainer_stops_the_run(dtype, capsys):
    asked = engines(replica([replace(EAGER, dtype="float16")]))
    asked.trainer.config.actor_rollout_ref.actor.fsdp_config = {"mixed_precision": {"param_dtype": dtype}}
    if dtype == "fp16":  # both alike: the points were not compared in it
        assert asked.look() is False
        assert "the engine has dtype='float16', vllm_cpu was verified with 'bfloat16'" in capsys.readouterr().out
        return
    with pytest.raises(NotApplied, match="dtype='float16', the trainer computes in bfloat16; engine: vllm"):
        asked.look()


def test_every_server_of_a_replica_is_asked_where_prefill_and_decoding_are_apart():
    assert engines(replica([EAGER], [EAGER, EAGER], ranks=3)).look() is True
    decoding = replica([EAGER], [replace(EAGER, mode="compiled")], ranks=2)
    with pytest.raises(NotApplied, match="mode='compiled'"):
        engines(decoding).look()
    assert [handle.calls for handle in decoding.servers] == [1, 1]


def test_a_replica_that_appears_late_is_asked_then_and_can_stop_the_run():
    first, standalone = replica([EAGER]), []
    found = engines(first, standalone=standalone)
    assert found.look() is True
    standalone.append(replica([EAGER]))
    assert found.look() is True and standalone[0].servers[0].calls == 1
    standalone.append(replica([replace(EAGER, torch="2.14.0")]))
    assert found.look() is found.look() is False  # never again verified
    standalone.append(replica([replace(EAGER, device="cuda")]))
    with pytest.raises(NotApplied, match="device='cuda'"):
        found.look()
    assert first.servers[0].calls == 1


@pytest.mark.parametrize(("reason", "answer"), OTHERS)
def test_an_answer_that_is_missing_is_said_and_harms_nothing(capsys, reason, answer):
    assert engines(replica(answer)).look() is False
    assert (
        f"rounding_align: actor: engine unverified: its fingerprint is missing: {reason}\n" in capsys.readouterr().out
    )


def test_ranks_that_have_not_answered_are_not_verified(capsys):
    """With data parallelism vLLM hands on what its first engine answers."""
    assert engines(replica([EAGER, EAGER], ranks=4)).look() is False
    assert "its fingerprint is missing: replica 0: 2 of 4 ranks answered\n" in capsys.readouterr().out


def test_a_trainer_without_replicas_is_not_verified(capsys):
    assert engines().look() is False
    assert capsys.readouterr().out == "rounding_align: engine unverified: the trainer knows no rollout replica\n"


def test_managers_are_found_by_their_names_where_verl_does_not_list_them():
    asked = SimpleNamespace(server_handle=server([EAGER]))
    old = trainer()
    del old._rollout_server_managers
    old.llm_server_manager = SimpleNamespace(get_replicas=lambda: [asked])
    assert running.Engines(old, {"actor": NAMED}).look() is True and asked.server_handle.calls == 1


def test_a_server_hands_on_what_its_workers_answer_and_one_without_an_engine_nothing():
    class vLLMHttpServer:
        node_rank = 0

        async def collective_rpc(self, name):
            return [name]

    module = SimpleNamespace(vLLMHttpServer=vLLMHttpServer)
    running.on_server(module)
    first, other = vLLMHttpServer(), vLLMHttpServer()
    first.engine, other.node_rank = first, 1
    assert asyncio.run(first.rounding_align_fingerprint()) == ["rounding_align_fingerprint"]
    assert asyncio.run(other.rounding_align_fingerprint()) == []
    running.on_server(SimpleNamespace())  # another engine's module: nothing to do
