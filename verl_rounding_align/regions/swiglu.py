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
