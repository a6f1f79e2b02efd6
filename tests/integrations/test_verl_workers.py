"""The workers: the model is aligned where verl builds it, once, by the plan that the driver wrote; what each must prove.

Contract: what was asked for and not applied, or not reached by the first forward pass, stops the training; without the key
verl's engine is the one that runs.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
import torch
from omegaconf import OmegaConf
from tiny import tiny, tokens
from verl_config import KEY

from verl_rounding_align import align
from verl_rounding_align.integrations.verl import workers
from verl_rounding_align.plan import parse_plan

pytestmark = pytest.mark.verl
ROPE = parse_plan("rope", "vllm_compiled_split").as_dict()


class Engine:
    """Stand-in for verl's engine: builds a tiny model and runs it once per batch."""

    model_type = "qwen3"

    def __init__(self, **requests):
        self.engine_config = SimpleNamespace(**requests)

    def _build_module(self):
        return tiny(self.model_type, layers=2)

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        return self.module(data).logits


class Aligned(workers.AlignedEngine, Engine):
    pass


def built(value="all", **kwargs):
    engine = Aligned(rounding_align=("actor", parse_plan(value)), **kwargs)
    engine.module = engine._build_module()
    return engine


def test_the_engine_aligns_what_it_builds_and_says_so(capsys):
    engine = built()
    assert capsys.readouterr().out == (
        "rounding_align: qwen3, 2 layers, add_rms_norm 5 sites, rope 2 sites, swiglu 2 sites, hf_eager -> vllm_compiled "
        "(actor, rank 0)\n"
    )
    assert workers._report(engine) == {
        "plan": "rope+swiglu+add_rms_norm+carry: hf_eager -> vllm_compiled",
        "sites": 9,
        "forwards": 0,
        "idle": engine.rounding_alignment.patched,
    }
    engine.forward_backward_batch(tokens(), None)
    assert (workers._report(engine)["forwards"], workers._report(engine)["idle"]) == (1, [])


def test_an_engine_without_a_request_is_untouched():
    engine = Aligned()
    engine.module = engine._build_module()
    assert not any("forward" in module.__dict__ for module in engine.module.modules())
    assert torch.equal(engine.forward_backward_batch(tokens(), None), tiny("qwen3", layers=2)(tokens()).logits)
    assert workers._report(engine) == {"plan": "none", "sites": 0, "forwards": 0, "idle": []}


def test_a_forward_before_the_trainer_read_the_report_stops():
    with pytest.raises(RuntimeError) as error:
        built().forward_backward_batch(tokens(), None)
    assert str(error.value) == (
        "rounding_align: this model is aligned, and the trainer has not read its report; works with the V1 trainer of verl "
        ">=0.9,<0.10 (python -m verl.trainer.main_ppo) where verl_rounding_align is installed for every process"
    )


def test_a_site_that_the_forward_does_not_reach_stops():
    engine = built("swiglu")
    workers._report(engine)
    mlp = engine.module.model.layers[1].mlp
    mlp.forward = type(mlp).forward.__get__(mlp)  # somebody patches over it
    with pytest.raises(RuntimeError) as error:
        engine.forward_backward_batch(tokens(), None)
    assert str(error.value) == (
        "rounding_align: 1 of 2 patched sites were not reached by the forward pass, so something else runs in their place: "
        "model.layers.1.mlp"
    )


@pytest.fixture
def registry(monkeypatch):
    """Return verl's engine registry with stand-in engines for device `test`, vendor `maker`."""
    from verl.workers.engine import BaseEngine, EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "test")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "maker")

    class TestEngine(Engine, BaseEngine):
        pass

    for strategy in ("fsdp", "fsdp2"):
        monkeypatch.setitem(
            EngineRegistry._engines["language_model"],
            strategy,
            {**EngineRegistry._engines["language_model"][strategy], "test": TestEngine},
        )
    return EngineRegistry, TestEngine


@pytest.mark.parametrize("vendor_entry", [False, True])
def test_the_engine_stacks_on_whatever_verl_would_use(registry, vendor_entry):
    engines, base = registry
    if vendor_entry:  # another plugin's engine for this vendor
        base = engines.register("language_model", "fsdp2", device="test", vendor="maker")(type("Other", (base,), {}))
    assert engines.get_engine_cls("language_model", "fsdp2") is base
    cls = workers._register_engine("fsdp2")
    assert engines.get_engine_cls("language_model", "fsdp2") is cls and issubclass(cls, base)
    assert workers._register_engine("fsdp2") is cls  # again: no second layer
    assert engines.get_engine_cls("language_model", "fsdp") is not cls


def test_an_engine_with_another_signature_is_refused(registry):
    engines, base = registry
    base._build_module = lambda self, mesh: None
    with pytest.raises(RuntimeError) as error:
        workers._register_engine("fsdp2")
    assert str(error.value) == (
        "rounding_align was tested with verl 0.9.1, where TestEngine._build_module takes ('self',); here it takes ('self', 'mesh')"
    )


class Worker:
    """Stand-in for verl's TrainingWorker."""

    def __init__(self, config):
        from verl.workers.engine import EngineRegistry

        engine_cls = EngineRegistry.get_engine_cls("language_model", config.engine_config.strategy)
        self.engine = engine_cls(**vars(config.engine_config))
        self.engine.module = self.engine._build_module()


@pytest.fixture
def worker_group(registry):
    """Return a function: (actor value, ref value) -> worker whose init_model went through the hook."""
    from verl.single_controller.base.decorator import Dispatch, register

    class ActorRolloutRefWorker:
        actor_worker_cls = ref_worker_cls = Worker
        hooked = True

        def __init__(self, actor, ref):
            section = {"actor": {"strategy": "fsdp2"}, "ref": {"strategy": "fsdp2"}}
            for role, value in (("actor", actor), ("ref", ref)):
                if value is not ...:
                    section[role]["rounding_align"] = value
            self.config = OmegaConf.create(section)
            OmegaConf.set_struct(self.config, True)

        def init_model(self):
            for role in ("actor", "ref"):
                assert dict(self.config[role]) == {"strategy": "fsdp2"}  # verl's dataclass would refuse more
                engine = SimpleNamespace(strategy="fsdp2")
                worker_cls = getattr(self if self.hooked else type(self), f"{role}_worker_cls")
                worker = worker_cls(config=SimpleNamespace(model_type="language_model", engine_config=engine))
                setattr(self, role, worker)

    module = SimpleNamespace(ActorRolloutRefWorker=ActorRolloutRefWorker, register=register, Dispatch=Dispatch)
    workers.on_workers(module)
    return ActorRolloutRefWorker


def test_each_role_gets_its_own_plan(worker_group):
    worker = worker_group(ROPE, parse_plan("swiglu", "vllm_compiled").as_dict())
    worker.init_model()
    report = worker.rounding_align_report()
    assert {role: (r["plan"], r["sites"]) for role, r in report.items()} == {
        "actor": ("rope: hf_eager -> vllm_compiled_split", 2),
        "ref": ("swiglu: hf_eager -> vllm_compiled", 2),
    }


@pytest.mark.parametrize("value", [..., "none", None])
def test_a_worker_without_a_plan_uses_verls_engine(worker_group, registry, value):
    worker = worker_group(value, value)
    worker.init_model()
    assert type(worker.actor.engine) is registry[1] and not isinstance(worker.ref.engine, workers.AlignedEngine)
    assert worker.rounding_align_report()["actor"]["sites"] == 0


def test_an_engine_hook_that_did_not_run_stops(worker_group):
    worker = worker_group(ROPE, "none")
    worker.hooked = False
    with pytest.raises(RuntimeError) as error:
        worker.init_model()
    assert str(error.value) == (
        f"{KEY} was asked for and TestEngine built its model without it (tested with verl 0.9.1)"
    )


def test_a_value_that_the_driver_has_not_checked_stops(worker_group):
    with pytest.raises(RuntimeError) as error:
        worker_group("rope", "none").init_model()
    assert str(error.value) == (
        f"{KEY}='rope' was not checked by the driver: verl_rounding_align must be installed where verl.trainer.main_ppo runs, "
        "and VERL_USE_EXTERNAL_PLUGINS must not exclude it"
    )


def test_the_hooks_reach_the_installed_verl():
    """The entry point is installed, and each hook has found what it changes, with verl's own marks left on it."""
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.config import validate_config
    from verl.workers.engine_workers import ActorRolloutRefWorker

    names = ("_setup", "fit", "_compute_old_log_prob", "_compute_advantage", "_compute_metrics", "_log_rollout_data")
    hooked = [getattr(trainer_base.PPOTrainer, name) for name in (*names, "_dump_generations")]
    hooked += [trainer_base.calculate_debug_metrics, validate_config, ActorRolloutRefWorker.init_model]
    assert all(function._rounding_align for function in hooked)
    marks = getattr(ActorRolloutRefWorker.init_model, MAGIC_ATTR)
    assert marks == getattr(ActorRolloutRefWorker.init_model.__wrapped__, MAGIC_ATTR)
    assert getattr(ActorRolloutRefWorker.rounding_align_report, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL


def test_a_worker_without_what_is_hooked_is_remembered():
    """`methods.check` then stops a run that asked; here it is the module that is another than verl 0.9's."""
    assert workers.on_workers(SimpleNamespace()) == ["ActorRolloutRefWorker"]
    renamed = type("ActorRolloutRefWorker", (), {})
    module = SimpleNamespace(ActorRolloutRefWorker=renamed)
    assert workers.on_workers(module) == ["ActorRolloutRefWorker.init_model", "register", "Dispatch"]
    assert not hasattr(renamed, "rounding_align_report")


def test_fused_kernels_leave_every_site_in_use():
    """verl's fused language-model head replaces the outermost forward only, so the driver lets it pass."""
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    module = tiny("qwen3", layers=2)
    cls, original = type(module), type(module).forward
    try:
        patch_forward_with_backends(module, use_fused_kernels=True, fused_kernels_backend="torch")
        alignment = align(module, "all", backend="eager")
        assert cls.forward is not original
        module(input_ids=tokens(), temperature=1.0, return_dict=True)
    finally:
        cls.forward = original
    assert alignment.idle() == []
