"""The recorded cases that tests of triage share: real runs, and faults made from them (``recipes/triage``)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from verl_rounding_align.triage.rows import ROUNDING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes" / "triage"))
import calibrate  # noqa: E402

DATA = ROOT / "tests" / "data" / "triage"
CASES = list(calibrate.cases(load_file(DATA / "inputs.safetensors")))
RESULTS = json.loads((ROOT / "recipes/triage/results/calibration.json").read_text())
RATE = {(row["cause"], row["size"]): row["hits"] / row["draws"] for row in RESULTS["rows"]}


def case(cause, size):
    return next(c for c in CASES if (c.cause, c.size) == (cause, size))


CLEAN = case(ROUNDING, "eager, both at T = 1").pairs


def outliers(pairs=CLEAN, share=0.003, size=1.5):
    """A clean run with a few tokens that differ much, as where experts flip."""
    rng = np.random.default_rng(0)
    hit = rng.random(len(pairs.rollout)) < share
    return replace(
        pairs, rollout=np.where(hit, np.minimum(pairs.rollout + size * rng.normal(size=len(hit)), -1e-4), pairs.rollout)
    )
