"""Storage formats that are emulated exactly in fp32, for a rounding point that is not stored in the model's own dtype.

A format has ``bits`` significant bits (the hidden one included) and the exponents of fp32 and bf16. So ``p8`` *is* bf16, with
its subnormals and its overflow, and ``p4`` is what bf16 would be with four bits fewer. Values stay in fp32 tensors and are
rounded there. Rounding is integer arithmetic on the bit pattern, because patterns are ordered as magnitudes are. With
s = 24 - bits dropped bits,

    round(i) = (i + 2^(s-1) - 1 + (i >> s & 1)) with its low s bits cleared

rounds to nearest, with ties to the even pattern, for either sign, normal and subnormal alike. A carry out of the largest
finite number gives infinity, as IEEE 754 has it (from half a step above that number on). NaN stays NaN. ``fp16`` has
exponents of its own and is torch's cast there and back. ``fp32`` stores everything.

Gradients. The backward of a real cast casts the gradient to the dtype of its input, which is wider, so it is exact. Gradients
are coarse in a bf16 model because the gradient *of* a bf16 tensor is a bf16 tensor: the operator that reads the value writes
its gradient in bf16. So :meth:`Format.store` is straight-through, and stores the gradient that arrives in the format too, or
in another one (``gradients``). With coarse values and bf16 gradients, rounding moves log-probs much, and gradients as much as
in a real run. One difference is left: where several operators read a stored tensor, a real model stores a gradient for each
and then their sum. Here the sum alone is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

LOWEST, FP32 = 2, 24
CHOICES = f"bf16, fp16, fp32, p{LOWEST} to p{FP32 - 1} (a significand of so many bits)"


class _Store(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format):
        ctx.format = format
        return format.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.format.round_gradient(gradient), None


@dataclass(frozen=True)
class Format:
    """A format that fp32 tensors are rounded to.

    Args:
        name: ``bf16``, ``fp16``, ``fp32`` or ``p<bits>``.
        bits: significant bits, the hidden one included.
        cast: a torch dtype that rounds as the format does, or None. fp16's exponents are its own.
        gradients: the format that gradients of stored values are stored in; None: this one.

    >>> parse("p4").round(torch.tensor([1.0, 1.0624, 1.0626, 1.1875, -5.5, 3.4e38])).tolist()
    [1.0, 1.0, 1.125, 1.25, -5.5, inf]
    """

    name: str
    bits: int
    cast: torch.dtype | None = None
    gradients: Format | None = None

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` rounded to the format, without a gradient.

        Args:
            x: fp32, any shape.
        """
        if x.dtype != torch.float32:
            raise ValueError(f"format {self.name}: values are kept in torch.float32, got {x.dtype}")
        if self.cast is not None:
            return x.detach().to(self.cast).float()
        drop = FP32 - self.bits
        if drop == 0:
            return x.detach()
        i = x.detach().contiguous().view(torch.int32)
        r = (i >> drop).bitwise_and_(1).add_((1 << (drop - 1)) - 1).add_(i).bitwise_and_(-(1 << drop))
        r = r.view(torch.float32)
        # one sum instead of a comparison per element, which costs more than all the rest on a CPU; false alarms are fine
        return torch.where(x.isnan(), x.detach(), r) if bool(x.detach().sum().isnan()) else r

    def round_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a stored value as it is stored."""
        return (self.gradients or self).round(gradient)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` stored in the format; its gradient is stored in the format as well."""
        return _Store.apply(x, self) if x.requires_grad and torch.is_grad_enabled() else self.round(x)

    def __str__(self) -> str:
        return self.name + (f" (gradients {self.gradients})" if self.gradients else "")


def parse(value: str | Format | None, key: str = "format") -> Format | None:
    """Return a format by its name; None stays None, which stands for the model's own dtype.

    Raises:
        ValueError: unknown name, with the legal ones.

    >>> parse("p1")
    Traceback (most recent call last):
    ...
    ValueError: format='p1': unknown format 'p1'; choose from bf16, fp16, fp32, p2 to p23 (a significand of so many bits)
    """
    if value is None or isinstance(value, Format):
        return value
    known = {
        "bf16": Format("bf16", 8, torch.bfloat16),
        "fp16": Format("fp16", 11, torch.float16),
        "fp32": Format("fp32", FP32),
    }
    known |= {f"p{bits}": Format(f"p{bits}", bits) for bits in range(LOWEST, FP32)}
    if value not in known:
        raise ValueError(f"{key}={value!r}: unknown format {value!r}; choose from {CHOICES}")
    return known[value]


@torch.no_grad()
def store_parameters(model: nn.Module, format: str | Format) -> None:
    """Round every parameter to the format in place, as ``model.to(torch.bfloat16)`` does; masters are the caller's."""
    format = parse(format)
    for parameter in model.parameters():
        parameter.copy_(format.round(parameter))


def store_tensors(model: nn.Module, format: Format, key: str = "format") -> list:
    """Make a model's linear layers store in a format what a model of that dtype would: inputs that no region stored
    (attention's output), outputs, and the gradients of parameters. Embeddings return stored weights as they are.

    Returns:
        Handles with ``remove()``.

    Raises:
        ValueError: a parameter is not fp32 or not stored in the format, or is of a module that is not known here.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{key}={format.name!r}: {name} is {parameter.dtype}; emulation needs torch.float32")
        if not torch.equal(format.round(parameter.detach()), parameter.detach()):
            raise ValueError(
                f"{key}={format.name!r}: {name} is not stored in the format; call formats.store_parameters(model, "
                f"{format.name!r}) first, and after every optimizer step"
            )
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__.endswith("RMSNorm")
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"{key}={format.name!r}: {name} ({type(module).__name__}) cannot be emulated")
    handles = [p.register_hook(format.round_gradient) for p in model.parameters() if p.requires_grad]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(lambda m, args, out: format.store(out)))
            if name.endswith("o_proj"):
                handles.append(module.register_forward_pre_hook(lambda m, args: (format.store(args[0]), *args[1:])))
    return handles
