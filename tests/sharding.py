"""Models sharded as verl shards them, for tests that run on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def wrap(model, strategy: str, cast: bool = False, orig_params: bool = False):
    """Shard ``model`` (fp32 master weights) as verl does: FSDP2 casts layer inputs; FSDP1 by default does not, and its
    parameters are flat. ``cast`` and ``orig_params`` change FSDP1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = type(model.model.layers[0])
    if strategy == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        for module in model.model.layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        buffer_dtype=torch.float32,
        cast_forward_inputs=cast,
    )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({layer}),
        mixed_precision=precision,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=orig_params,
    )
