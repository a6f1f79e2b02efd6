"""Probe vLLM for one model: ``run_probe`` is what the command ``probe`` calls."""

from __future__ import annotations

import importlib.util
import os

from .probe import CASES, Row, exit_code, probe, render, to_json
from .spec import ModelSpec

__all__ = ["run_probe", "render", "exit_code", "to_json"]

ENGINES = ("vllm",)
MODES = ("compiled", "eager", "both")


def run_probe(
    model: str | None = None, family: str | None = None, engine: str = "vllm", mode: str = "both", cases=CASES
) -> list[Row]:
    """Return what vLLM stores at every site kind of a model, with progress on stderr.

    Args:
        model: checkpoint folder or hub name; its head_dim, epsilon, rope scaling and sizes are used.
        family: instead of ``model``, a family's default config.
        engine: ``vllm``.
        mode: ``compiled``, ``eager`` or ``both``.
        cases: the draws.

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
    spec = (ModelSpec.from_model(model) if model is not None else ModelSpec.from_family(family)).fewer()
    from rich.console import Console

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    rows: list[Row] = []
    with Console(stderr=True).status("importing vLLM") as status:
        from .vllm_layers import VllmLayers

        for one in ("compiled", "eager") if mode == "both" else (mode,):
            status.update(f"building vLLM's layers, {one}")
            rows += probe(VllmLayers(spec, one), cases, status.update)
    return rows
