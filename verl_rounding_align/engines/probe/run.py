"""Probe an engine for one model: ``run_probe`` is what the command ``probe`` calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from .. import get
from ..spec import ModelSpec
from .bitwise import CASES, Row
from .questions import probe
from .result import Result

MODES = ("compiled", "eager", "both")
DTYPES = ("auto", "bfloat16", "float16")


def run_probe(
    model: str | None = None,
    family: str | None = None,
    engine: str = "vllm",
    mode: str = "both",
    cases=CASES,
    compilation: Mapping | None = None,
    dtype: str = "auto",
) -> Result:
    """Return what an engine stores at every site kind of a model, with progress on stderr.

    Args:
        model: checkpoint folder or hub name; its head_dim, epsilon, rope scaling and sizes are used.
        family: instead of ``model``, a family's default config.
        engine: of ``engines.ENGINES``.
        mode: ``compiled``, ``eager`` or ``both``.
        cases: the draws.
        compilation: fields of the engine's compilation settings that the rollout sets.
        dtype: the model dtype that the engine is given: ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's.

    Raises:
        ValueError: an unknown value, both or neither of model and family; the message holds the legal choices.
    """
    if (model is None) == (family is None):
        raise ValueError(f"model={model!r}, family={family!r}: give exactly one of model and family")
    row = get(engine)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if row.installed() is None:
        raise ValueError(f"engine={engine!r}: {engine} is not installed in this environment; the probe runs its layers")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    spec = ModelSpec.from_model(model) if model is not None else ModelSpec.from_family(family)
    if dtype != "auto":
        spec = replace(spec, dtype=getattr(torch, dtype))
    from rich.console import Console

    rows: list[Row] = []
    fingerprints = {}
    with Console(stderr=True).status(f"importing {engine}") as status:
        for one in ("compiled", "eager") if mode == "both" else (mode,):
            status.update(f"building {engine}'s layers, {one}")
            layers = row.build(spec.fewer(), one, compilation)
            fingerprints[one] = layers.fingerprint
            rows += probe(layers, cases, status.update)
    return Result(spec, tuple(rows), fingerprints)
