"""Run a grid of settings, resumable, a process per core: `python grid.py default [--workers N] [--out FILE]`.

Each finished run is one line of results/<grid>.jsonl; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from experiment import ARMS, Settings, run  # noqa: E402

PRETRAIN = 60


def settings(arms, bits, lrs, seeds, steps: int, pretrain: int = PRETRAIN) -> list[Settings]:
    """Return the product, seeds outermost: an interrupted grid has whole seeds (of `default`, of `none` and `all` first)."""
    return [Settings(a, b, lr, s, steps, pretrain) for s, b, lr, a in product(range(seeds), bits, lrs, arms)]


FIRST, SECOND, THIRD = ("none", "all"), ("same", "rope", "paper"), ("tis", "bit")
GRIDS = {
    "smoke": settings(["none", "all", "same", "tis"], [4], [2e-3], 1, steps=2, pretrain=2),
    "fast": settings(["none", "all"], [2], [2e-3], 2, steps=200),
    "default": [s for arms in (FIRST, SECOND) for s in settings(arms, [3], [2e-3], 5, steps=1200)],
    "corrected": settings(THIRD, [3], [2e-3], 5, steps=1200),
    "full": settings(list(ARMS), [3, 4, 5, 6, 7, 8], [1e-3, 2e-3, 4e-3], 8, steps=4800),
}


def name(row: dict | Settings) -> tuple:
    """Return what identifies a run."""
    values = row if isinstance(row, dict) else vars(row)
    return tuple(values[field] for field in Settings.__dataclass_fields__)


def load(path: Path) -> list[dict]:
    """Return the finished runs of a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _one(chosen: Settings) -> dict:
    import torch

    torch.set_num_threads(1)
    return run(chosen, show=lambda text: print(text, flush=True))


def execute(grid: list[Settings], path: Path, workers: int) -> list[dict]:
    """Run what is missing in ``path`` and append it there; return all rows of the grid."""
    from verl_rounding_align import report

    versions = {n: report.versions().get(n) for n in ("torch", "transformers", "verl-rounding-align")}
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {name(row) for row in load(path)}
    missing = [s for s in grid if name(s) not in done]
    print(f"{path.name}: {len(grid) - len(missing)} of {len(grid)} runs are there, {workers} at a time", flush=True)
    began = time.time()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("a"))
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers)) if workers > 1 else None
        for i, row in enumerate(map(_one, missing) if pool is None else pool.imap_unordered(_one, missing), 1):
            file.write(json.dumps({**row, "versions": versions}) + "\n")
            file.flush()
            left = (time.time() - began) / i * (len(missing) - i) / 60
            last = row["rows"][-1]
            print(f"{i}/{len(missing)} {name(row)}: {last}, {row['seconds']:.0f} s; {left:.0f} min left", flush=True)
    wanted = {name(s) for s in grid}
    return [row for row in load(path) if name(row) in wanted]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    execute(GRIDS[options.grid], options.out or HERE / f"results/{options.grid}.jsonl", options.workers)
