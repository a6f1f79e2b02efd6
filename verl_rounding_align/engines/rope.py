"""Do trainer and engine rotate by the same angles? RoPE's frequencies of both, compared before they are rounded.

Frequency i of a head of size D is theta^(-2 i / D), changed by the scaling that a config asks for; cos and sin are then
multiplied by one factor (YaRN's). The trainer's come from Transformers' own code for a config, the engine's from its fp32
table of cos and sin, as it is before it is stored in the model dtype (``engines/vllm/rope.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-4  # relative; fp32 powers differ by 1e-6 between libraries, another theta by 0.1 and more


@dataclass(frozen=True)
class Rope:
    """Frequencies (D / 2,) fp64 in radians per position, and the factor on cos and sin."""

    frequencies: np.ndarray
    factor: float = 1.0


def of_config(config) -> Rope:
    """Return what Transformers computes for a config.

    Args:
        config: a ``PretrainedConfig`` of a model with Llama's rotary embedding, or its folder.
    """
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if not hasattr(config, "hidden_size"):
        config = AutoConfig.from_pretrained(config)
    module = LlamaRotaryEmbedding(config)
    return Rope(module.inv_freq.double().numpy(), float(module.attention_scaling))


def of_cache(cache) -> Rope:
    """Return what a table of cos and sin was computed from.

    Args:
        cache: (positions, D) fp32 before it is stored in a model dtype, cos of every frequency, then sin.
    """
    cos, sin = np.split(np.asarray(cache, dtype=np.float64), 2, axis=-1)
    factor = float(np.median(np.hypot(cos, sin)))
    frequencies, position = np.arctan2(sin[1], cos[1]), 1
    while 2 * position < len(cos):  # fp32 errors of the angle are divided by the position
        position *= 2
        turns = np.round((position * frequencies - np.arctan2(sin[position], cos[position])) / (2 * np.pi))
        finer = (np.arctan2(sin[position], cos[position]) + 2 * np.pi * turns) / position
        # fp32 angles position * frequency are off by up to 6e-8 of their size, so fast ones gain nothing further out
        frequencies = np.where(position * frequencies < 4, finer, frequencies)
    return Rope(frequencies, factor)


def difference(trainer: Rope, engine: Rope) -> str:
    """Return in words how the engine's RoPE differs from the trainer's, "" if it does not.

    >>> base = 10000.0 ** -(np.arange(4) / 4)
    >>> difference(Rope(base), Rope(base / 2))
    'the engine divides every position by 2 (largest relative deviation of a frequency 0.5)'
    """
    a, b = trainer.frequencies, engine.frequencies
    if a.shape != b.shape:
        return f"the trainer rotates {2 * len(a)} elements of a head, the engine {2 * len(b)}"
    ratio = b / a
    worst = float(np.abs(ratio - 1).max())
    if worst > TOLERANCE:
        thetas = [theta(x) for x in (a, b)]
        if np.ptp(ratio) < TOLERANCE * ratio.mean():
            says = f"the engine divides every position by {1 / ratio.mean():.4g}"
        elif None not in thetas:
            says = f"theta is {thetas[0]:.6g} in the trainer, {thetas[1]:.6g} in the engine"
        else:
            i = int(np.abs(ratio - 1).argmax())
            says = f"the scaling differs, most at frequency {i}: {a[i]:.4g} in the trainer, {b[i]:.4g} in the engine"
        return f"{says} (largest relative deviation of a frequency {worst:.2g})"
    if abs(engine.factor / trainer.factor - 1) > TOLERANCE:
        return (
            f"cos and sin are multiplied by {trainer.factor:.4g} in the trainer, by {engine.factor:.4g} in the engine"
        )
    return ""


def theta(frequencies: np.ndarray) -> float | None:
    """Return the theta of unscaled frequencies theta^(-i / n), i = 0..n-1; None where they are scaled."""
    n = len(frequencies)
    if n < 2 or abs(frequencies[0] - 1) > TOLERANCE:
        return None
    base = float(frequencies[-1] ** (-n / (n - 1)))
    return base if np.allclose(frequencies, base ** (-np.arange(n) / n), rtol=TOLERANCE) else None
