"""RoPE's frequencies of a running vLLM, from the table of cos and sin that it computes in fp32 before it stores it."""

from __future__ import annotations

from ..rope import Rope, of_cache


def of_vllm(model) -> Rope:
    """Return the frequencies of the first rotary embedding of vLLM's model.

    Args:
        model: vLLM's; ``worker.model_runner.get_model()``.

    Raises:
        ValueError: it has none.
    """
    for module in model.modules():
        if hasattr(module, "_compute_cos_sin_cache"):
            return of_cache(module._compute_cos_sin_cache().float().cpu().numpy())
    raise ValueError(f"{type(model).__name__}: no rotary embedding with a cos-sin table")
