"""The sizes and constants of a model that rounding can depend on, read from its Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .. import families


@dataclass(frozen=True)
class ModelSpec:
    """What the probe needs to know about a model.

    Args:
        model_type: Hugging Face model type, a row of ``families.FAMILIES``.
        hidden_size, intermediate_size: of one decoder layer; ``intermediate_size`` is that of the dense MLP.
        heads, kv_heads, head_dim: of attention.
        eps: epsilon of every norm.
        rope_parameters: the config's ``rope_parameters`` as JSON with sorted keys (hashable).
        max_position: ``max_position_embeddings``.
        dtype: the model dtype.
        qk_norm: whether attention normalises Q and K before the rotary embedding.
        expert_size: intermediate size of one expert, None for a dense model.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_parameters: str
    max_position: int
    dtype: torch.dtype = torch.bfloat16
    qk_norm: bool = False
    expert_size: int | None = None

    def fewer(self) -> ModelSpec:
        """Return the spec with fewer heads and narrower MLPs, of which every head and column rounds alike.

        What a norm reads (``head_dim``, ``hidden_size``) stays; widths keep their remainder to 64, where kernels have
        tails. Experts are widened to the multiple of 32 that vLLM's CPU kernel pads to.
        """
        return replace(
            self,
            heads=min(self.heads, 3),
            kv_heads=min(self.kv_heads, 1),
            intermediate_size=min(self.intermediate_size, 256 + self.intermediate_size % 64),
            expert_size=self.expert_size and min(-(-self.expert_size // 32) * 32, 256),
        )

    def as_dict(self) -> dict:
        """Return the fields as JSON can hold them."""
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_dict(cls, values: Mapping) -> ModelSpec:
        """Return the spec that :meth:`as_dict` was made of.

        >>> spec = ModelSpec.from_family("llama")
        >>> ModelSpec.from_dict(spec.as_dict()) == spec
        True
        """
        return cls(**{**values, "dtype": getattr(torch, values["dtype"])})

    @classmethod
    def from_config(cls, config, key: str = "model_type") -> ModelSpec:
        """Return the spec of a Transformers config (release 5: ``rope_parameters``).

        Raises:
            ValueError: unsupported family, or a dtype without rounding points.
        """
        family = families.get(config.model_type, key=key)
        dtype = config.dtype or torch.bfloat16
        if dtype == torch.float32:  # tiny and test checkpoints: engines serve them in bf16 when told to
            dtype = torch.bfloat16
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{key}={config.model_type!r}: dtype {dtype} has no rounding points; expected bf16 or fp16"
            )
        return cls(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            rope_parameters=json.dumps(config.rope_parameters, sort_keys=True),
            max_position=config.max_position_embeddings,
            dtype=dtype,
            qk_norm=family.qk_norm,
            expert_size=config.moe_intermediate_size if family.experts else None,
        )

    @classmethod
    def from_model(cls, model: str) -> ModelSpec:
        """Return the spec of a checkpoint folder or hub name (only its config is read).

        Raises:
            ValueError: no config there, or an unsupported family.
        """
        from transformers import AutoConfig

        if Path(model).expanduser().is_absolute() and not (Path(model).expanduser() / "config.json").is_file():
            raise ValueError(f"model={model!r}: no config.json in this folder")
        try:
            config = AutoConfig.from_pretrained(str(Path(model).expanduser()))
        except OSError as error:
            raise ValueError(f"model={model!r}: no config found: {str(error).splitlines()[0]}") from error
        return cls.from_config(config, key="model")

    @classmethod
    def from_family(cls, family: str) -> ModelSpec:
        """Return the spec of a family's default config in Transformers.

        >>> spec = ModelSpec.from_family("qwen3")
        >>> spec.head_dim, spec.qk_norm, spec.dtype
        (128, True, torch.bfloat16)
        """
        from transformers import AutoConfig

        return cls.from_config(AutoConfig.for_model(families.get(family, key="family").model_type), key="family")
