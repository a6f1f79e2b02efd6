"""Measure the overhead recipe: targets (two models, forward and backward), where time goes, every group and phase,
alternatives, memory with checkpointing. Each part writes one JSON file with versions, device and samples; parts can be
chosen by name.

Takes about an hour on two CPU cores, ``targets`` 20 minutes of it; ratios, not times, carry over to another machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from verl_rounding_align.overhead import render
from verl_rounding_align.overhead import shares as profiler
from verl_rounding_align.overhead.alternatives import run_alternatives
from verl_rounding_align.overhead.compare import MINIMUM_PAIRS
from verl_rounding_align.overhead.run import run_overhead
from verl_rounding_align.report import rows as report

RESULTS = Path(__file__).parent / "results"
TOKENS = 1024
# a SmolLM2-135M (all 30 layers) and a Qwen3-0.6B cut to 4 layers
MODELS = {"smollm2-135m": None, "qwen3-0.6b": 4}


def _rows(shape: str, layers: int | None, **options) -> list:
    rows = run_overhead(shape=shape, layers=layers, tokens=TOKENS, device="cpu", threads=1, **options)
    report.show(render.render(rows))
    return rows


def _write(name: str, found) -> None:
    """Write rows (or one table) with versions and the load average, which says how quiet the machine was."""
    payload = found if isinstance(found, dict) else {"rows": [r.as_dict() for r in found]}
    report.write_json(RESULTS / f"{name}.json", {"load": os.getloadavg(), **payload})


def targets(shape: str, layers: int | None) -> None:
    """Forward and backward of the whole model: rope, paper, all; compiled."""
    rows = _rows(
        shape,
        layers,
        plans=("rope", "paper", "all"),
        region_backends=("compile",),
        scopes=("model",),
        phases=("forward_backward",),
        pairs=9,
    )
    _write(f"targets-{shape}", rows)


def table(shape: str, layers: int | None) -> None:
    """Two decoder layers, every phase: every group compiled; rope and all also op by op."""
    rows = _rows(shape, 2, region_backends=("compile",), scopes=("layers",), pairs=9)
    rows += _rows(shape, 2, plans=("rope", "all"), region_backends=("eager",), scopes=("layers",), pairs=9)
    _write(f"table-{shape}", rows)


def shares(shape: str, layers: int | None) -> None:
    """Where the time of a pass goes, unaligned and aligned."""
    found = profiler.shares(shape=shape, layers=layers, plans=("rope", "paper", "all"), tokens=TOKENS, threads=1)
    report.show(render.render_shares(found))
    _write(f"shares-{shape}", found)


def checkpointing(shape: str, layers: int | None) -> None:
    """Memory with checkpointed layers (times are a by-product)."""
    rows = _rows(
        shape,
        min(layers or 4, 4),
        plans=("rope", "paper", "carry", "all"),
        region_backends=("compile",),
        scopes=("layers",),
        phases=("forward_backward",),
        checkpointing=True,
        pairs=MINIMUM_PAIRS,
        warmup=1,
    )
    _write(f"checkpointing-{shape}", rows)


def alternatives(shape: str, layers: int | None) -> None:
    """What a user would pick instead, two layers: whole-model compile, fp32 LM head, Liger where it runs."""
    rows = run_alternatives(
        shape=shape, layers=2, tokens=TOKENS, lengths=6, device="cpu", threads=1, pairs=MINIMUM_PAIRS
    )
    report.show(render.render_alternatives(rows))
    _write(f"alternatives-{shape}", rows)


PARTS = {f.__name__: f for f in (targets, shares, table, checkpointing, alternatives)}


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
