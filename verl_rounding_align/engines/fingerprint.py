"""What of an engine moves its rounding, as a value: printable, comparable, hashed.

A plan rests on an engine as it was probed, or on a preset that was verified on some engines. A running engine publishes
its fingerprint (``integrations/vllm.py``), and ``judge`` says what the plan is worth for it: ``verified``,
``unverified`` (something differs that may move rounding), ``contradicted`` (something differs that does).

This file is pure: no engine is imported. ``engine/vllm_fingerprint.py`` reads a fingerprint off vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

VERIFIED, UNVERIFIED, CONTRADICTED = "verified", "unverified", "contradicted"

# fields that are known to move rounding when they differ; the others may
_DECISIVE = (
    "engine",
    "device",
    "mode",
    "custom_ops",
    "batch_invariant",
    "emulate_precision_casts",
    "quantization",
    "model_impl",
)


@dataclass(frozen=True)
class Fingerprint:
    """Everything of an engine that is known to be able to move rounding.

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
    """What a plan is worth for a running engine: ``status`` and why, a phrase."""

    status: str
    why: str

    def __str__(self) -> str:
        return f"{self.status}: {self.why}" if self.why else self.status


def judge(running: Fingerprint, verified: Sequence[Fingerprint], name: str) -> Judgement:
    """Compare a running engine with the engines that a preset or probe result was verified on.

    Args:
        running: the engine's own fingerprint.
        verified: what the plan's points were verified on; not empty.
        name: what the plan calls them, for the message.

    >>> cpu = Fingerprint("vllm", "0.30.0", "cpu", "compiled", "inductor", torch="2.13.0")
    >>> print(judge(cpu, [cpu], "vllm_compiled"))
    verified
    >>> from dataclasses import replace
    >>> print(judge(replace(cpu, torch="2.14.0"), [cpu], "vllm_compiled"))
    unverified: the engine has torch='2.14.0', vllm_compiled was verified with '2.13.0'
    >>> print(judge(replace(cpu, mode="eager"), [cpu], "vllm_compiled"))
    contradicted: the engine has mode='eager', vllm_compiled was verified with 'compiled'
    """
    nearest = min((v.differences(running) for v in verified), key=lambda d: (bool(set(d) & set(_DECISIVE)), len(d)))
    if not nearest:
        return Judgement(VERIFIED, "")
    decisive = [field for field in _DECISIVE if field in nearest]
    shown = decisive or list(nearest)
    text = "; ".join(f"the engine has {f}={nearest[f][1]!r}, {name} was verified with {nearest[f][0]!r}" for f in shown)
    return Judgement(CONTRADICTED if decisive else UNVERIFIED, text)
