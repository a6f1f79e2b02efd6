"""Probe vLLM for one model: ``run_probe`` is what the command ``probe`` calls."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..spec import ModelSpec
from .bitwise import CASES, Row, exit_code, probe, render
from .result import Result

__all__ = ["run_probe", "render", "exit_code"]

ENGINES = ("vllm",)
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
    """Return what vLLM stores at every site kind of a model, with progress on stderr.

    Args:
        model: checkpoint folder or hub name; its head_dim, epsilon, rope scaling and sizes are used.
        family: instead of ``model``, a family's default config.
        engine: ``vllm``.
        mode: ``compiled``, ``eager`` or ``both``.
        cases: the draws.
        compilation: fields of vLLM's ``compilation_config`` that the rollout sets.
        dtype: the model dtype that the engine is given: ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's.

    Raises:
        ValueError: an unknown value, both or neither of model and family; the message holds the legal choices.
    """
    if (model is None) == (family is None):
        raise ValueError(f"model={model!r}, family={family!r}: give exactly one of model and family")
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"engine={engine!r}: vllm is not installed in this environment; the probe runs its layers")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    spec = ModelSpec.from_model(model) if model is not None else ModelSpec.from_family(family)
    if dtype != "auto":
        spec = replace(spec, dtype=getattr(torch, dtype))
    from rich.console import Console

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    rows: list[Row] = []
    fingerprints = {}
    with Console(stderr=True).status("importing vLLM") as status:
        from ..vllm.layers import VllmLayers, engine_config

        for one in ("compiled", "eager") if mode == "both" else (mode,):
            status.update(f"building vLLM's layers, {one}")
            layers = VllmLayers(spec.fewer(), one, config=engine_config(one, compilation=compilation))
            fingerprints[one] = layers.fingerprint
            rows += probe(layers, cases, status.update)
    return Result(spec, tuple(rows), fingerprints)
