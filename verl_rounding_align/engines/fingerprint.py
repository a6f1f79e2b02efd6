"""Every setting of a running engine that can move its rounding, as one value: printable, comparable, hashed.

A plan rests on an engine as it was probed, or on a preset that was verified on some engines. A running engine publishes its
fingerprint (``vllm/plugin.py``), and :func:`judge` says what the plan is worth for it: ``verified``, ``unverified``
(something differs that may move rounding) or ``contradicted`` (something differs that does).

This file is pure: no engine is imported. ``vllm/fingerprint.py`` reads a fingerprint off vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

VERIFIED, UNVERIFIED, CONTRADICTED = "verified", "unverified", "contradicted"

# Fields that are known to move rounding when they differ; the others may. Of ``passes`` a pass that is on counts, and
# ``dtype`` counts against the trainer's where that is known. ``tensor_parallel`` moves no rounding by itself: the all-reduce
# stores its sum as one rank stores its own, unless a pass fuses it with the norm, and then ``passes`` says so.
_DECISIVE = (
    "engine",
    "device",
    "mode",
    "custom_ops",
    "passes",
    "batch_invariant",
    "dtype",
    "emulate_precision_casts",
    "quantization",
    "model_impl",
)
# Passes that match nothing here: of quantization without any, and of latent attention, which no supported family has.
_QUANTIZED = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "enable_fusion", "enable_attn_fusion")
_LATENT = ("fuse_rope_kvcache_cat_mla", "fuse_mla_dual_rms_norm")
# What a pass fuses: groups whose rounding it can move. A pass that is not listed may move any group.
MOVES = {
    "fuse_allreduce_rms": frozenset({"add_rms_norm", "carry"}),
    "enable_sp": frozenset({"add_rms_norm", "carry"}),  # sequence parallelism splits the add and the norm over ranks
    "enable_qk_norm_rope_fusion": frozenset({"rope"}),
}


@dataclass(frozen=True)
class Fingerprint:
    """Every engine setting that is known to change where it rounds.

    Args:
        engine, version: name and release, without a local part (``0.30.0``).
        device: ``cpu``, ``cuda``, ``rocm``, ...
        mode: ``compiled`` or ``eager``.
        backend: the compiler's name, empty when eager.
        split: whether the graph is split at attention into pieces that are compiled by themselves.
        custom_ops: the engine's switches of its own kernels for the regions' operators (``none``, ``all``, ``+rms_norm``).
        ir_op_priority: ``op=provider`` for the regions' operators that the engine dispatches itself.
        passes: fusion passes that are on.
        batch_invariant: whether the engine's batch-invariant kernels are on.
        tensor_parallel: ranks of one model.
        rope_cache: dtype of the stored cosines and sines.
        dtype: the model dtype.
        quantization: the engine's quantization method, empty for none.
        model_impl: ``vllm`` for the engine's own model code, ``transformers`` for Hugging Face's inside the engine.
        arch: what kernels are built for: a CPU's widest instruction set, a GPU's compute capability.
        torch: release, without a local part.
        emulate_precision_casts: whether Inductor keeps interior rounding (only ever True when compiled).
    """

    engine: str
    version: str
    device: str
    mode: str
    backend: str = ""
    split: bool = False
    custom_ops: tuple[str, ...] = ()
    ir_op_priority: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    batch_invariant: bool = False
    tensor_parallel: int = 1
    rope_cache: str = "bfloat16"
    dtype: str = "bfloat16"
    quantization: str = ""
    model_impl: str = "vllm"
    arch: str = ""
    torch: str = ""
    emulate_precision_casts: bool = False

    @classmethod
    def from_dict(cls, values: Mapping) -> Fingerprint:
        """Return a fingerprint from its fields, as JSON holds them.

        Raises:
            ValueError: unknown or missing fields, by name.
        """
        names = {f.name for f in fields(cls)}
        unknown, missing = sorted(set(values) - names), sorted(names - set(values))
        if unknown or missing:
            raise ValueError(f"fingerprint: unknown fields {unknown}, missing fields {missing}")
        return cls(**{name: tuple(x) if isinstance(x, list | tuple) else x for name, x in values.items()})

    def __str__(self) -> str:
        """One line: what it is, and a short hash of every field.

        >>> print(Fingerprint("vllm", "0.30.0", "cpu", "eager", custom_ops=("none",), torch="2.13.0"))
        vllm 0.30.0 cpu eager, bfloat16, torch 2.13.0, tp 1, custom_ops none, rope cache bfloat16 [78ff28a2]
        """
        how = self.mode
        if self.mode == "compiled":
            how += f" ({self.backend}, {'split at attention' if self.split else 'whole graph'})"
        where = f"{self.device} ({self.arch})" if self.arch else self.device
        parts = [f"{self.engine} {self.version} {where} {how}", self.dtype, f"torch {self.torch}"]
        parts.append(f"tp {self.tensor_parallel}")
        parts.append(f"custom_ops {' '.join(self.custom_ops) or '-'}")
        parts += [f"ir {' '.join(self.ir_op_priority)}"] if self.ir_op_priority else []
        parts += [f"passes {' '.join(self.passes)}"] if self.passes else []
        parts.append(f"rope cache {self.rope_cache}")
        parts += [f"quantization {self.quantization}"] if self.quantization else []
        parts += [f"model_impl {self.model_impl}"] if self.model_impl != "vllm" else []
        parts += ["batch invariant"] if self.batch_invariant else []
        parts += ["emulate_precision_casts"] if self.emulate_precision_casts else []
        return f"{', '.join(parts)} [{self.key}]"

    @property
    def key(self) -> str:
        """Eight hex digits of every field's value; stable across processes and machines."""
        text = "\n".join(f"{name}={value!r}" for name, value in sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def differences(self, other: Fingerprint) -> dict[str, tuple]:
        """Return field -> (own value, the other's) where they differ."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


@dataclass(frozen=True)
class Judgement:
    """What a plan is worth for a running engine: ``status``, why, in a phrase, and the fields that differ."""

    status: str
    why: str
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status}: {self.why}" if self.why else self.status


def fused(
    running: Fingerprint, verified: Fingerprint | None = None, groups: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return the fusion passes of a running engine that move its rounding away from what was verified.

    Args:
        running: the engine's own fingerprint.
        verified: what the points were compared with; None for an engine without passes.
        groups: the groups that a plan aligns; a pass that moves none of them does not count. None: every group.

    >>> fused(Fingerprint("vllm", "0.30.0", "cuda", "compiled", passes=("fuse_act_quant", "fuse_allreduce_rms")))
    ('fuse_allreduce_rms',)
    >>> fused(Fingerprint("vllm", "0.30.0", "cuda", "compiled", passes=("fuse_allreduce_rms",)), groups=["rope"])
    ()
    """
    inert = _LATENT if running.quantization else _QUANTIZED + _LATENT
    known = () if verified is None else verified.passes
    moving = (name for name in running.passes if groups is None or name not in MOVES or MOVES[name] & set(groups))
    return tuple(name for name in moving if name not in inert and name not in known)


def _decisive(
    running: Fingerprint, verified: Fingerprint, dtype: str | None, groups: Collection[str] | None
) -> list[str]:
    """Return the fields that contradict ``verified``."""
    fields = [name for name in _DECISIVE if getattr(running, name) != getattr(verified, name)]
    if "passes" in fields and not fused(running, verified, groups):
        fields.remove("passes")
    if "dtype" in fields and running.dtype == dtype:
        fields.remove("dtype")
    return fields


def other_dtype(running: Fingerprint, dtype: str | None) -> str:
    """Return a phrase if the engine does not compute in the trainer's dtype, else an empty string.

    Args:
        running: the engine's own fingerprint.
        dtype: what the trainer computes in, by torch's name; None if it is not known, and then any 16-bit dtype will do.
    """
    if running.dtype == dtype or (dtype is None and running.dtype in ("bfloat16", "float16")):
        return ""
    return f"the engine has dtype={running.dtype!r}, the trainer computes in {dtype or 'bfloat16 or float16'}"


def judge(
    running: Fingerprint,
    verified: Sequence[Fingerprint],
    name: str,
    dtype: str | None = None,
    groups: Collection[str] | None = None,
) -> Judgement:
    """Compare a running engine with the engines that a preset or probe result was verified on.

    Args:
        running: the engine's own fingerprint.
        verified: what the plan's points were verified on; not empty.
        name: what the plan calls them, for the message.
        dtype: what the trainer computes in, by torch's name. An engine in another one contradicts the plan; where both have
            one that was not verified, the plan is unverified. None: it is what was verified.
        groups: the groups that the plan aligns; a fusion pass that moves none of them contradicts nothing. None: every group.

    >>> cpu = Fingerprint("vllm", "0.30.0", "cpu", "compiled", "inductor", torch="2.13.0")
    >>> print(judge(cpu, [cpu], "vllm_compiled"))
    verified
    >>> from dataclasses import replace
    >>> print(judge(replace(cpu, torch="2.14.0"), [cpu], "vllm_compiled"))
    unverified: the engine has torch='2.14.0', vllm_compiled was verified with '2.13.0'
    >>> print(judge(replace(cpu, mode="eager"), [cpu], "vllm_compiled"))
    contradicted: the engine has mode='eager', vllm_compiled was verified with 'compiled'
    >>> print(judge(replace(cpu, tensor_parallel=2), [cpu], "vllm_compiled"))
    unverified: the engine has tensor_parallel=2, vllm_compiled was verified with 1
    """
    if dtype is not None and other_dtype(running, dtype):
        return Judgement(CONTRADICTED, other_dtype(running, dtype))
    nearest = min(verified, key=lambda v: (bool(_decisive(running, v, dtype, groups)), len(v.differences(running))))
    differences = nearest.differences(running)
    if not differences:
        return Judgement(VERIFIED, "")
    decisive = _decisive(running, nearest, dtype, groups)
    text = "; ".join(
        f"the engine has {field}={differences[field][1]!r}, {name} was verified with {differences[field][0]!r}"
        for field in decisive or differences
    )
    return Judgement(CONTRADICTED if decisive else UNVERIFIED, text, tuple(decisive or differences))
