"""``verl-rounding-align overhead``: from options to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arms import aligned
from .arms import plans as every_plan
from .compare import MINIMUM_PAIRS
from .measure import PHASES, SCOPES, cpu_threads, here, measure
from .models import build, choose
from .rows import Row


def run_overhead(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    plans: Sequence[str] | None = None,
    engine: str = "vllm_compiled",
    region_backends: Sequence[str] = ("compile", "eager"),
    scopes: Sequence[str] = SCOPES,
    phases: Sequence[str] = PHASES,
    layers: int | None = None,
    tokens: int = 1024,
    device: str | None = None,
    threads: int | None = None,
    pairs: int = 7,
    warmup: int = 2,
    repeats: int | None = None,
    checkpointing: bool = False,
    memory: bool = True,
    progress: bool = True,
    seed: int = 0,
) -> list[Row]:
    """Measure every plan and backend against the unaligned model; return the rows.

    Args:
        model: folder or hub name of a model with weights; or
        shape, family: random weights in the sizes of a row of ``models.SHAPES``, as its own or another dense family.
        plans, engine: values of the key (None for :func:`.arms.plans`), and the engine's preset.
        region_backends: ``compile``, ``eager``.
        scopes, phases: of ``measure.SCOPES`` and ``measure.PHASES``.
        layers: decoder layers; None for all.
        tokens: tokens per sample, one sequence.
        device: ``cpu`` or ``cuda``; None for CUDA where there is one.
        threads: CPU threads; None for torch's setting. With one thread the CPU clock is process CPU time, which other
            processes disturb less than they disturb wall time.
        pairs, warmup: timed pairs, and untimed runs of each arm before them.
        repeats: runs per sample; None for 1 on CPU and 3 on CUDA (so that launch queues fill).
        checkpointing: checkpoint decoder layers (non-reentrant).
        memory: count bytes in phase ``forward_backward``.
        progress: show a bar on standard error.

    Raises:
        ValueError: an option that is not legal; the message holds the choices.
    """
    for name, values, choices in (
        ("scope", scopes, SCOPES),
        ("phase", phases, PHASES),
        ("backend", region_backends, ("compile", "eager")),
    ):
        for value in values:
            choose(name, value, choices)
    if pairs < MINIMUM_PAIRS:
        raise ValueError(f"pairs={pairs}: at least {MINIMUM_PAIRS} complete pairs are needed for an interval")
    check_sizes(tokens, layers, threads)
    device = here(device)
    arms = [aligned(regions, engine, how) for regions in plans or every_plan() for how in region_backends]
    with cpu_threads(threads):
        label, lm = build(model, shape, family, layers, device, seed)
        if checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        repeats = repeats or (3 if torch.device(device).type == "cuda" else 1)
        return measure(
            lm, label, arms, scopes, phases, tokens, pairs, warmup, repeats, memory, progress, seed=seed
        )  # fmt: skip


def check_sizes(tokens: int, layers: int | None, threads: int | None) -> None:
    """Raise a ValueError if a size is not legal: there is no loss of one token, and no model of no layers."""
    for name, value, least in (("tokens", tokens, 2), ("layers", layers, 1), ("threads", threads, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: expected {least} or more")
