"""Region ``swiglu``: SiLU of the gate times the up projection, up to the tensor that the down projection reads.

    act = silu(gate)                                     point act
    out = act * up
    returned in the model dtype.

Mirrors: HF ``Qwen3MLP`` and ``_apply_gate`` of the experts, Transformers 5.10; vLLM ``SiluAndMul``, 0.30.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..rounding import Rounding, up
from .table import Group, Region

POINTS = {"act": "silu(gate), before it is multiplied with the up projection"}


def swiglu(gate: torch.Tensor, up_: torch.Tensor, rnd: Rounding) -> torch.Tensor:
    """Return ``silu(gate) * up``.

    Args:
        gate, up_: (..., intermediate_size), model dtype.
        rnd: which of ``POINTS`` are stored.

    Returns:
        (..., intermediate_size), model dtype.
    """
    act = rnd("act", F.silu(up(gate)), gate.dtype)
    return rnd.store(act * up_, gate.dtype)


REGION = Region(
    name="swiglu",
    function=swiglu,
    points=POINTS,
    kinds={"mlp": "a dense MLP", "experts": "the experts of a mixture"},
    groups={"swiglu": Group("swiglu", frozenset(POINTS), "SiLU of the gate times the up projection", paper=True)},
)
