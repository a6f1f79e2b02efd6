"""A fingerprint read off vLLM: from its finished config, and from a worker that has loaded a model.

Only attributes of vLLM's config are read, with what they mean where a release lacks them, so that workers of releases that
the probe refuses can say what they are, or why they cannot.
"""

from __future__ import annotations

from ..cards import arch
from ..fingerprint import Fingerprint

# vLLM's own operators that replace a region's, and the two switches of all of them
_CUSTOM_OPS = ("all", "none", "rms_norm", "silu_and_mul", "rotary_embedding", "apply_rotary_emb", "qk_norm_rope")
_IR_OPS = ("rms_norm", "fused_add_rms_norm")
_HARMLESS_PASSES = ("eliminate_noops", "enable_noop")


def of_config(config, rope_cache: str, dtype: str, model_impl: str = "vllm") -> Fingerprint:
    """Return the fingerprint of a vLLM config, as its platform has finished it.

    Args:
        config: a ``VllmConfig``.
        rope_cache, dtype: dtypes by name, which the config may not hold.
        model_impl: ``vllm`` or ``transformers``.
    """
    import torch
    import vllm
    from packaging.version import Version
    from vllm import envs
    from vllm.platforms import current_platform

    compilation = config.compilation_config
    mode = compilation.mode if hasattr(compilation, "mode") else compilation.level  # level until vLLM 0.11
    model = config.model_config
    eager = not mode or bool(model is not None and model.enforce_eager)  # CompilationMode.NONE is 0
    device = "rocm" if torch.version.hip and current_platform.device_type == "cuda" else current_platform.device_type
    kernels = getattr(config, "kernel_config", None)  # vLLM 0.20
    priority = getattr(kernels, "ir_op_priority", None)
    providers = {op: getattr(priority, op, None) for op in _IR_OPS} if priority is not None else {}
    inductor = torch._inductor.config.emulate_precision_casts
    passes = {} if eager else vars(compilation.pass_config)
    return Fingerprint(
        engine="vllm",
        version=Version(vllm.__version__).base_version,
        device=device,
        mode="eager" if eager else "compiled",
        backend="" if eager else str(compilation.backend or "inductor"),
        split=not eager and int(mode) == 3 and bool(compilation.splitting_ops),
        custom_ops=tuple(sorted(op for op in compilation.custom_ops if op.lstrip("+-") in _CUSTOM_OPS)),
        ir_op_priority=tuple(f"{op}={names[0]}" for op, names in providers.items() if names),
        passes=tuple(sorted(p for p, on in passes.items() if on is True and p not in _HARMLESS_PASSES)),
        batch_invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        rope_cache=rope_cache,
        dtype=dtype,
        quantization=str((model is not None and model.quantization) or ""),
        model_impl=model_impl,
        arch=arch(device),
        torch=Version(torch.__version__).base_version,
        emulate_precision_casts=not eager
        and bool(compilation.inductor_compile_config.get("emulate_precision_casts", inductor)),
    )


def of_worker(worker) -> Fingerprint:
    """Return the fingerprint of a vLLM worker that has loaded its model.

    Args:
        worker: vLLM's ``Worker``; its ``vllm_config`` and ``model_runner.model`` are read.
    """
    model = worker.model_runner.get_model()
    caches = {
        str(module.cos_sin_cache.dtype).removeprefix("torch.")
        for module in model.modules()
        if getattr(module, "cos_sin_cache", None) is not None
    }
    dtype = str(worker.vllm_config.model_config.dtype).removeprefix("torch.")
    # vLLM's names for its wrappers of Hugging Face's models begin so
    impl = "transformers" if type(model).__name__.startswith("Transformers") else "vllm"
    return of_config(worker.vllm_config, rope_cache="+".join(sorted(caches)) or "none", dtype=dtype, model_impl=impl)
