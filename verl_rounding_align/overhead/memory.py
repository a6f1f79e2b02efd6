"""Memory of a pass, which has no noise: bytes kept for backward, and the peak of what is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch


def saved_bytes(run: Callable[[], object], exclude: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that autograd keeps for backward while ``run()`` computes: each storage once.

    Args:
        run: a forward pass that has run before, so that nothing is compiled now; its result is kept until the count is made.
        exclude: tensors whose storages do not count, the parameters for example.
    """
    skip = {x.untyped_storage().data_ptr() for x in exclude}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storage keeps its address from being used again

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage
        return x.detach()  # x itself may be the node's own output: a reference cycle that is never collected

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return total


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Return the peak of allocated bytes during ``run()`` above what was allocated before it.

    On a CPU it is the highest running sum of the allocator's events in torch's profiler, which does not see scratch memory
    inside oneDNN. On CUDA it is ``torch.cuda.max_memory_allocated``.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak
