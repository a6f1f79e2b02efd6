"""Hugging Face model families as data: which module classes hold the regions.

Adding a family is one row in ``FAMILIES``, if its decoder layer has the structure that ``trainers/checks.py`` asks for: two residual
adds, each read by an RMSNorm; attention that calls ``apply_rotary_pos_emb``; a SiLU-gated MLP.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of Transformers.

    Args:
        model_type: as in the model's config.
        prefix: class-name prefix in ``transformers.models.<model_type>.modeling_<model_type>``.
        qk_norm: whether attention normalises Q and K before RoPE.
        experts: whether some MLPs are mixtures of experts.
        source: dotted name of the module that defines the classes, where it is not the usual one.
    """

    model_type: str
    prefix: str
    qk_norm: bool = False
    experts: bool = False
    source: str | None = None

    @property
    def module(self) -> str:
        """Dotted name of the Transformers module that defines the family's classes."""
        return self.source or f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    def cls(self, part: str) -> type:
        """Return the family's class for ``part``: Model, DecoderLayer, Attention, MLP, RMSNorm, Experts."""
        return getattr(importlib.import_module(self.module), self.prefix + part)


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen2"),
        Family("qwen3", "Qwen3", qk_norm=True),
        Family("qwen3_moe", "Qwen3Moe", qk_norm=True, experts=True),
    )
}
TRANSFORMERS = SpecifierSet(">=5.5,<5.17")  # releases that the forwards are written for
TESTED = "5.10.4 and 5.16.1"


def get(model_type: str, key: str = "model_type") -> Family:
    """Return the family's row.

    Raises:
        ValueError: the family is not supported.

    >>> get("gemma2")
    Traceback (most recent call last):
    ...
    ValueError: model_type='gemma2': unsupported model family 'gemma2'; choose from llama, mistral, qwen2, qwen3, qwen3_moe
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"{key}={model_type!r}: unsupported model family {model_type!r}; choose from {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
