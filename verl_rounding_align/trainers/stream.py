"""The residual stream between two decoder layers, where an engine does not round it.

The second residual add of a decoder layer is read by the *next* layer. Where it is not stored, the unrounded fp32 sum
crosses the boundary viewed as complex64. FSDP2 casts every floating input of a wrapped layer to bf16, which would round
the sum again without an error. A complex tensor is cast by no wrapper, costs no copy, and says what it is. Hidden states
that a user asks for come out decoded.
"""

from __future__ import annotations

import torch


def seal(total: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``total`` (..., hidden_size) viewed as complex64 (..., hidden_size / 2): no wrapper casts it."""
    return torch.view_as_complex(total.unflatten(-1, (-1, 2)))


def unseal(x: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor that :func:`seal` got; any other tensor as it is."""
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


def decode_hidden_states(module, args, output):
    """Forward hook of the decoder stack: hidden states that were asked for leave in the model dtype, not sealed."""
    dtype = module.norm.weight.dtype

    def decode(entry):
        if isinstance(entry, tuple):
            return tuple(decode(x) for x in entry)
        return unseal(entry).to(dtype) if isinstance(entry, torch.Tensor) and entry.is_complex() else entry

    if isinstance(output, tuple):
        return decode(output)
    if output.get("hidden_states") is not None:
        output["hidden_states"] = decode(output["hidden_states"])
    return output
