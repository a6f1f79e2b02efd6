"""Contract of the CPU platform for verl: there only with VERL_PLATFORM=cpu; log-probs in fp32 as on CUDA; an engine that
takes new weights; and every function of verl or vLLM that it changes is checked first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import stale

pytestmark = pytest.mark.verl


def python(code: str, **env: str) -> str:
    """Run code in a new process, where neither verl nor vLLM is imported yet, and return what it prints."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=base | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


# -------------------------------------------------------------------------------------------------------- the platform


def test_without_the_variable_verl_knows_no_cpu_platform():
    """And `activate` refuses, naming the variable."""
    out = python("""
        import sys, verl
        from verl.plugin.platform.platform_manager import PlatformRegistry
        print(PlatformRegistry.get("cpu"), "verl_rounding_align.integrations.verl.cpu" in sys.modules)
        from verl_rounding_align.integrations.verl import cpu as verl_cpu
        try:
            verl_cpu.activate()
        except RuntimeError as error:
            print(error)
    """)
    refusal = "the CPU platform for verl needs VERL_PLATFORM=cpu, not VERL_PLATFORM=''"
    assert out.splitlines() == ["None False", refusal]


def test_with_the_variable_verl_runs_on_the_cpu():
    """Platform and engine come with `import verl`; FSDP1 is refused; a process group, beyond verl's own code, is made."""
    out = python(
        """
        import types
        import torch, verl
        from verl.utils import distributed
        from verl.utils.device import get_device_id, get_device_name, get_torch_device
        from verl.utils.profiler.performance import _get_current_mem_info
        from verl.workers.engine import EngineRegistry
        from verl_rounding_align.integrations.verl import cpu as verl_cpu
        verl_cpu.activate()  # a second time changes nothing
        print(get_device_name(), get_device_id(), get_torch_device().is_available())
        print(float(_get_current_mem_info()[0]) > 0)
        for strategy in ("fsdp", "fsdp2"):
            classes = EngineRegistry.get_engine_cls("language_model", strategy).__mro__
            print("CPUFSDPEngineWithLMHead" in [c.__name__ for c in classes])
        engine = classes[0].__new__(classes[0])
        engine.engine_config = types.SimpleNamespace(strategy="fsdp")
        try:
            engine._build_fsdp_module(None)
        except ValueError as error:
            print(error)
        init = distributed.initialize_global_process_group_ray
        try:
            init.__wrapped__()
        except Exception as error:
            print("verl's own:", "Duplicate device type cpu" in str(error))
        init()
        print(torch.distributed.get_backend())
        """,
        VERL_PLATFORM="cpu",
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        RANK="0",
        WORLD_SIZE="1",
    )
    refusal = (
        "VERL_PLATFORM=cpu runs strategy='fsdp2', not 'fsdp': FSDP1 as verl sets it up (sync_module_states) "
        "needs parameters on an accelerator"
    )
    found = out.splitlines()
    assert found == ["cpu cpu False", "True", "True", "True", refusal, "verl's own: True", "cpu:gloo"]


def test_a_checkpoint_restores_the_generator():
    """verl's own functions, in the order of a save and a resume; they take the device's generator for a second one."""
    out = python(
        """
        import torch, verl
        from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager as manager
        state = manager.get_rng_state()
        drawn = torch.rand(3)
        print(torch.equal(torch.rand(3), drawn))
        manager.load_rng_state(state)
        print(torch.equal(torch.rand(3), drawn))
        """,
        VERL_PLATFORM="cpu",
    )
    assert out.split() == ["False", "True"]


def test_log_probs_are_fp32_as_on_cuda():
    """Against log_softmax in fp64 of the same bf16 logits. Bound: logits below 8 in size and a sum of 64 exponentials
    round about ten times at 2^-24 relative, some 1e-5 in all. Negative control: verl's own engine class on a CPU, whose
    log-probs are stored in bf16 (2^-9 of a value of 4: 8e-3)."""
    out = python(
        """
        import torch
        from tensordict import TensorDict
        import verl
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.fsdp import transformer_impl as impl

        torch.manual_seed(0)
        lengths = [5, 3]
        logits = (2 * torch.randn(2, 5, 64)).clamp(-8, 8).bfloat16()
        ids = torch.nested.nested_tensor([torch.randint(64, (n,)) for n in lengths], layout=torch.jagged)
        batch = TensorDict({"input_ids": ids}, batch_size=2)
        tu.assign_non_tensor(batch, use_remove_padding=False, calculate_entropy=True)
        labels = torch.roll(ids.values(), shifts=-1)
        args = {"input_ids_rmpad_rolled": labels, "temperature": torch.ones(2), "temperature_is_one": True}

        class Output:
            pass

        rows = torch.cat([logits[i, :n] for i, n in enumerate(lengths)]).double().log_softmax(-1)
        exact = rows.gather(-1, labels[:, None])[:, 0]
        entropy = -(rows.exp() * rows).sum(-1)
        cpu = next(c for c in impl.EngineRegistry.get_engine_cls("language_model", "fsdp2").__mro__
                   if c.__name__ == "CPUFSDPEngineWithLMHead")
        for cls in (cpu, impl.FSDPEngineWithLMHead):
            class Config:
                entropy_checkpointing = False
            engine = cls.__new__(cls)
            engine.engine_config = Config()
            output = Output()
            output.logits = logits.clone()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = engine.prepare_model_outputs(output, dict(args), batch, None)
            for name, want in (("log_probs", exact), ("entropy", entropy)):
                print(name, got[name].values().dtype, (got[name].values().double() - want).abs().max().item())
        """,
        VERL_PLATFORM="cpu",
    )
    (_, ours, error), (_, ours_e, error_e), (_, theirs, control), _ = (line.split() for line in out.splitlines())
    assert ours == ours_e == "torch.float32"
    assert float(error) < 1e-5 and float(error_e) < 1e-5
    assert theirs == "torch.bfloat16" and float(control) > 1e-3


def test_another_verl_is_refused():
    import verl

    from verl_rounding_align.integrations.verl import cpu as verl_cpu

    def build(self, module, mesh):
        pass

    message = (
        "VERL_PLATFORM=cpu was tested with verl 0.9.1, where "
        f"{build.__qualname__} takes ('self', 'module'); here (verl {verl.__version__}) it takes ('self', 'module', 'mesh')"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        verl_cpu._require(build, "self", "module")


# ------------------------------------------------------------------------------------------------------- the vLLM plugin


@pytest.mark.parametrize("platform", ["", "nvidia"])
def test_outside_a_verl_run_on_a_cpu_the_vllm_plugin_imports_nothing(platform):
    out = python(
        """
        import sys
        from verl_rounding_align.engines.vllm.plugin import register
        register()
        print([name for name in ("torch", "vllm", "verl") if name in sys.modules])
        """,
        VERL_PLATFORM=platform,
    )
    assert out.strip() == "[]"


RELOAD = """
    import torch
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layer, x = torch.nn.Module(), torch.randn(4, 64).bfloat16()
    layer.weight = torch.nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
    method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
    for packing in (1, 2, 3):  # start, first synchronisation, second synchronisation
        if packing > 1 and layer.weight.numel():
            layer.weight.copy_(packing * torch.randn(32, 64).bfloat16())
        method.process_weights_after_loading(layer)
        if layer.weight.numel() == 0:
            print("gone")
            break
        want = torch.nn.functional.linear(x.double(), layer.weight.double())
        print((layer.cpu_linear(x, layer.weight, None).double() - want).abs().max() < 0.02 * want.abs().max())
"""


@pytest.mark.vllm
@pytest.mark.parametrize(
    "platform, broken, expected",
    [
        ("cpu", False, ["tensor(True)"] * 3),
        ("", False, ["gone"]),
        ("cpu", True, ["tensor(True)", "tensor(True)", "tensor(False)"]),
    ],
    ids=["plugin", "control: vLLM alone", "control: stale weights"],
)
def test_vllm_takes_new_weights_after_packing(platform, broken, expected, tmp_path):
    """Error bound: the result is rounded to bf16 once (2^-9 relative) and summed in fp32; 0.02 of the largest is ample,
    and other weights are wrong by more than the largest."""
    path = {"PYTHONPATH": stale.path(tmp_path)} if broken else {}
    out = python(RELOAD, VERL_PLATFORM=platform, **path)
    assert [line for line in out.splitlines() if line in ("gone", "tensor(True)", "tensor(False)")] == expected


@pytest.mark.vllm
def test_another_vllm_is_refused():
    out = python(
        """
        import vllm
        from vllm.model_executor.layers import utils
        from verl_rounding_align.engines.vllm.plugin import register

        def dispatch(layer, remove_weight, prepack):
            pass

        utils.dispatch_cpu_unquantized_gemm = dispatch
        try:
            register()
        except RuntimeError as error:
            print(str(error).replace(vllm.__version__, "X"))
        """,
        VERL_PLATFORM="cpu",
    )
    assert out.splitlines()[-1] == (
        "VERL_PLATFORM=cpu was tested with vLLM X, where dispatch_cpu_unquantized_gemm takes ('layer', 'remove_weight'); "
        "here (vLLM X) it takes ('layer', 'remove_weight', 'prepack')"
    )
