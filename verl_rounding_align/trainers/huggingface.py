"""Make a Hugging Face model round where a plan says: claim, check, bind, undo.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
...                                      num_attention_heads=1)).bfloat16()
>>> with align(model, "rope", engine="vllm_compiled") as alignment:
...     print(alignment)
rounding_align: llama, 1 layers, rope 1 sites, hf_eager -> vllm_compiled; rotary frequencies were bfloat16, restored to float32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import nn

from .. import backend as backends
from .. import families, formats, releases
from ..engines.presets import PRESETS
from ..plan import Plan, parse_plan
from . import checks, sites
from .alignment import Alignment, Site
from .stream import decode_hidden_states, seal, unseal

__all__ = ["Alignment", "Site", "align", "check_transformers", "find_base_models", "seal", "unseal"]


def find_base_models(model: nn.Module) -> list[tuple[str, nn.Module, families.Family]]:
    """Return (fqn, decoder stack, family) for each supported decoder stack in ``model``, wrapped or not.

    Raises:
        ValueError: none is of a supported family; the message names the supported ones.
    """
    found = []
    for fqn, module in model.named_modules():
        classes = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
        rows = [family for family in families.FAMILIES.values() if (family.module, f"{family.prefix}Model") in classes]
        if rows:  # families may share their code: the config says which one it is
            model_type = getattr(getattr(module, "config", None), "model_type", None)
            found.append((fqn, module, next((row for row in rows if row.model_type == model_type), rows[0])))
    if not found:
        config = getattr(model, "config", None)
        model_type = getattr(config, "model_type", type(model).__name__)
        families.get(model_type)  # the usual case: raises, naming the supported families
        raise ValueError(
            f"model_type={model_type!r}: no {families.FAMILIES[model_type].prefix}Model inside {type(model).__name__}"
        )
    return found


def align(
    model: nn.Module,
    plan: Plan | str | list | dict | None,
    engine: str | None = None,
    backend: str | None = None,
    key: str = "rounding_align",
    format: str | formats.Format | None = None,
) -> Alignment:
    """Make ``model`` round where ``plan`` says; nothing is changed if any check fails.

    Args:
        model: a Transformers 5 model of a supported family, bare or inside PEFT; before FSDP wrapping (parameters may
            still be fp32 or on meta: the model dtype is read when it runs).
        plan: a Plan, or a value for :func:`verl_rounding_align.parse_plan`.
        engine: preset of the inference engine, where ``plan`` is a value. None takes ``vllm_compiled``, vLLM on a CPU, and is
            an error where torch sees a GPU: the engine has to be named there.
        backend: ``auto`` (compile where there is a compiler), ``compile`` or ``eager``; None takes the plan's.
        key: the config key, for messages.
        format: where ``plan`` is a value: an emulated format (``formats.CHOICES``) that an fp32 model stores everything
            in, instead of its dtype; even with plan ``none``, all sites are patched and linear layers hooked.

    Returns:
        Alignment, with ``.plan``, ``.sites``, ``.calls`` and ``.undo()``; as a context manager it undoes itself.

    Raises:
        ValueError: unknown value, unsupported family or structure, or somebody else's patch on a module concerned.
    """
    if not isinstance(plan, Plan):
        named = engine is not None or (isinstance(plan, Mapping) and plan.get("engine"))
        if not named and torch.cuda.is_available():
            raise ValueError(
                f"{key}={plan!r}: engine=None: name the preset of the engine that generates, for example "
                f"engine='vllm_compiled_split' for compiled vLLM on CUDA; choose from {', '.join(PRESETS)}"
            )
        engine = engine or "vllm_compiled"
        plan = parse_plan(plan, engine=engine, key=key, format=format)
    backend = backends.check(backend or plan.backend)
    check_transformers()
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or model._compiled_call_impl is not None:
        raise ValueError(
            f"{key}={str(plan)!r}: the model is compiled as a whole, which may delete interior rounding points; "
            "align first, compile afterwards"
        )
    stacks = find_base_models(model)
    family = stacks[0][2]
    layers = sum(len(stack.layers) for _, stack, _ in stacks)
    alignment = Alignment(plan, f"{family.model_type}, {layers} layers", backend)
    if not plan:
        return alignment
    claims = []
    for fqn, stack, its in stacks:
        found = list(sites.claims(sites.Stack(f"{fqn}." if fqn else "", stack, its, alignment, model)))
        checks.check(found, its, plan, key)
        claims += found
    if plan.format is not None:
        if backend == "compile":
            raise ValueError(f"backend='compile': format {plan.format} is emulated op by op; choose auto or eager")
        alignment.backend = "eager"
        for handle in formats.store_tensors(model, plan.format):
            alignment.on_undo(handle.remove)
    alignment.bind(claims)
    for _, stack, _ in stacks:
        if plan.rounding("attention") and plan.engine != plan.trainer:
            _restore_frequencies(stack.rotary_emb, alignment)
        if plan.rounding("mlp_add"):
            alignment.on_undo(stack.register_forward_hook(decode_hidden_states).remove)
    assert alignment.sites, f"plan {plan} has no site in {type(model).__name__}"
    return alignment


def _restore_frequencies(rotary: nn.Module, alignment: Alignment) -> None:
    """Give a rotary module fp32 frequencies again if ``model.to(dtype)`` has rounded them.

    Engines keep them in fp32, and so does ``from_pretrained(dtype=...)``; verl 0.9 calls ``.to(model_dtype)`` after it,
    which rounds them where ``fsdp_config.model_dtype`` is bf16 (its default is fp32).
    In bf16 they are off by up to 2^-9, which at position 1000 turns some pairs by a radian: no rounding point, and larger
    than all of them together (mean log-prob difference of 0.09 nats on SmolLM2-135M at 512 tokens).
    """
    dtype = rotary.inv_freq.dtype
    if dtype == torch.float32:
        return
    fresh = type(rotary)(config=rotary.config)
    for name, buffer in fresh.named_buffers():
        before = getattr(rotary, name)
        mine = buffer.to(before.device)
        setattr(rotary, name, mine)

        def restore(name=name, before=before, mine=mine) -> str | None:
            now = getattr(rotary, name)
            if now is not mine and not (now.dtype == mine.dtype and torch.equal(now.cpu(), mine.cpu())):
                return f"rotary_emb.{name}"
            setattr(rotary, name, before.to(now.device))
            return None

        alignment.on_undo(restore)
    alignment.notes.append(f"rotary frequencies were {str(dtype).removeprefix('torch.')}, restored to float32")


def check_transformers() -> None:
    """Raise ValueError unless the installed Transformers is a release that the forwards are written for."""
    releases.check("transformers", transformers.__version__, families.TRANSFORMERS, "rounding_align", families.TESTED)
