"""Measure the overhead recipe: targets (two models, forward and backward), every group and phase, alternatives, memory
with checkpointing. Each part writes one JSON file with versions, device and samples; parts can be chosen by name.

Expected on a quiet 2-core CPU machine: about 40 minutes for everything, 15 for ``targets``; ratios, not times, carry over.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from verl_rounding_align import report
from verl_rounding_align.measure import overhead

RESULTS = Path(__file__).parent / "results"
TOKENS = 1024
# a SmolLM2-135M (all 30 layers) and a Qwen3-0.6B cut to 4 layers
MODELS = {"smollm2-135m": None, "qwen3-0.6b": 4}


def _rows(name: str, **options) -> list:
    shape, layers = options.pop("shape"), options.pop("layers")
    rows = overhead.run_overhead(shape=shape, layers=layers, tokens=TOKENS, device="cpu", threads=1, **options)
    report.show(overhead.render(rows))
    report.write_json(RESULTS / f"{name}.json", {"load": os.getloadavg(), "rows": [r.as_dict() for r in rows]})
    return rows


def targets(shape: str, layers: int | None) -> None:
    """Forward and backward of the whole model: rope, paper, all; compiled."""
    _rows(
        f"targets-{shape}",
        shape=shape,
        layers=layers,
        plans=("rope", "paper", "all"),
        region_backends=("compile",),
        scopes=("model",),
        phases=("forward_backward",),
        pairs=15,
    )


def table(shape: str, layers: int | None) -> None:
    """Every group, both backends, both scopes, every phase; at most four layers."""
    _rows(f"table-{shape}", shape=shape, layers=min(layers or 4, 4))


def checkpointing(shape: str, layers: int | None) -> None:
    """Memory with checkpointed layers (times are a by-product)."""
    _rows(
        f"checkpointing-{shape}",
        shape=shape,
        layers=min(layers or 4, 4),
        plans=("rope", "paper", "carry", "all"),
        region_backends=("compile",),
        phases=("forward_backward",),
        checkpointing=True,
        pairs=overhead.MINIMUM_PAIRS,
        warmup=1,
    )


def alternatives(shape: str, layers: int | None) -> None:
    """What a user would pick instead: whole-model compile, fp32 LM head, Liger where it runs."""
    layers = min(layers or 4, 4)
    rows = overhead.run_alternatives(shape=shape, layers=layers, tokens=TOKENS, device="cpu", threads=1)
    report.show(overhead.render_alternatives(rows))
    payload = {"load": os.getloadavg(), "rows": [r.as_dict() for r in rows]}
    report.write_json(RESULTS / f"alternatives-{shape}.json", payload)


PARTS = {f.__name__: f for f in (targets, table, checkpointing, alternatives)}


def main() -> int:
    """Run the chosen parts for the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    for part in args.parts:
        for model in args.models:
            PARTS[part](model, MODELS[model])
    return 0


if __name__ == "__main__":
    sys.exit(main())
