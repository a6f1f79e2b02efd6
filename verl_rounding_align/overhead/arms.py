"""Arms of a measurement: the ways to run one model on one input. A new arm is one function here that returns an Arm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .. import backend as backends
from .. import plan as keys
from ..trainers.huggingface import align
from .models import choose


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    Args:
        name: what the row is called.
        plan: the plan as text, ``none`` for an unaligned model.
        backend: how the regions run; ``-`` where there are none.
        enter: (model, scope) -> a context manager that yields the callable to measure.
    """

    name: str
    plan: str
    backend: str
    enter: Callable[[torch.nn.Module, str], contextlib.AbstractContextManager[Callable]]


def call_of(model, scope: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return inputs -> output: embeddings -> hidden states (``layers``), token ids -> logits (``model``)."""
    if scope == "layers":
        stack = model.get_decoder()
        return lambda x: stack(inputs_embeds=x, use_cache=False).last_hidden_state
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def plans() -> tuple[str, ...]:
    """Return the values of the key that a measurement runs: every group, ``paper`` and ``all``."""
    return keys.arms()


def unaligned() -> Arm:
    """Return the baseline: the model as Hugging Face runs it, operator by operator."""
    return Arm("none", "none", "-", lambda model, scope: contextlib.nullcontext(call_of(model, scope)))


def aligned(regions: str, engine: str, backend: str) -> Arm:
    """Return the arm of a model aligned with a value of the key. It is aligned when the arm is entered and undone after.

    Leaving the arm raises a ValueError if the model never ran a module that was patched.

    Raises:
        ValueError: an unknown value of the key, or an unknown engine.
    """
    plan = keys.parse_plan(regions, engine=engine, key="plan")

    @contextlib.contextmanager
    def enter(model, scope):
        with align(model, plan, backend=backend, key="plan") as alignment:
            yield call_of(model, scope)
            if alignment.idle():
                raise ValueError(
                    f"plan={regions!r}: these modules were patched but never ran, so their cost was not measured: "
                    f"{', '.join(alignment.idle())}"
                )

    return Arm(regions, str(plan), backend, enter)


def whole_model_compile(emulate: bool = False) -> Arm:
    """Return the arm that most users try first: ``torch.compile`` of the whole model, where Dynamo finds dynamic shapes.

    Args:
        emulate: whether ``emulate_precision_casts`` is set, so that the compiled model rounds where eager does.
    """
    compiled: dict[tuple[int, str], Callable] = {}

    @contextlib.contextmanager
    def enter(model, scope):
        key = (id(model), scope)
        if key not in compiled:
            compiled[key] = torch.compile(call_of(model, scope), options=dict(backends.OPTIONS) if emulate else None)
        yield compiled[key]

    return Arm("torch.compile" + (", emulate_precision_casts" if emulate else ""), "none", "-", enter)


def fp32_head(under: Arm | None = None) -> Arm:
    """Return the arm whose LM head multiplies in fp32 (scope ``model`` only).

    Args:
        under: the arm that runs the layers; None for an unaligned model.
    """
    layers = under or unaligned()

    @contextlib.contextmanager
    def enter(model, scope):
        choose("scope", scope, ("model",))
        stack, head = model.get_decoder(), model.get_output_embeddings()

        def call(ids):
            hidden = stack(input_ids=ids, use_cache=False).last_hidden_state
            return F.linear(hidden.float(), head.weight.float())

        with layers.enter(model, scope):
            yield call

    return Arm(f"{under.name}, and an fp32 LM head" if under else "fp32 LM head", layers.plan, layers.backend, enter)


def liger() -> Arm:
    """Return the arm of Liger's RoPE, RMSNorm and SwiGLU kernels. It runs a copy of the model, as the patch has no undo."""
    copies: dict[int, torch.nn.Module] = {}

    def enter(model, scope):
        import copy

        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        if id(model) not in copies:
            copies[id(model)] = copy.deepcopy(model)
            _apply_liger_kernel_to_instance(model=copies[id(model)])
        return contextlib.nullcontext(call_of(copies[id(model)], scope))

    return Arm("Liger", "none", "-", enter)


def liger_missing(device: str) -> str | None:
    """Return why Liger's kernels cannot be measured here, or None."""
    import importlib.util

    if torch.device(device).type != "cuda":
        return "not measured: Liger's kernels are Triton kernels for a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return "not measured: liger_kernel is not installed"
    return None
