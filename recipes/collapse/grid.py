"""Run a grid of settings, resumable, a process per core: `python grid.py default [--workers N] [--out FILE]`.

Each finished run is one line of outputs/collapse/<grid>.jsonl (results/ holds those that the page is made from); what is
there already is not run again. Then the table is printed, and the pictures are drawn beside the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from experiment import ARMS, Settings, run  # noqa: E402
from outcomes import load  # noqa: E402


def settings(arms, bits=(3,), lrs=(2e-3,), seeds=range(5), steps: int = 2000, **other) -> list[Settings]:
    """Return the product, seeds outermost: what an interrupted grid has is whole seeds."""
    return [Settings(a, b, lr, s, steps, **other) for s, b, lr, a in product(seeds, bits, lrs, arms)]


GRIDS = {
    "smoke": settings(list(ARMS), seeds=[0], steps=2, pretrain=2),
    "fast": settings(["none", "all"], seeds=[0, 1], steps=250),
    "default": settings(["none", "all"]),
    "arms": [*settings(["rope", "paper", "tis"]), *settings(["same"])],
    "seeds": [
        *settings(["none", "all"], seeds=range(5, 10)),
        *settings(["none"], bits=[4, 5], seeds=range(5, 10)),
    ],
    "widths": [*settings(["none", "all", "same"], bits=[4]), *settings(["none"], bits=[5, 6, 7, 8])],
    "rates": settings(["none", "all"], lrs=[1e-3, 3e-3], steps=1200),
    "coarse_gradients": settings(list(ARMS), steps=1200, prompts=8, gradients=0),
    "full": settings(list(ARMS), bits=[3, 4, 5, 6, 7, 8], lrs=[1e-3, 2e-3, 3e-3], seeds=range(10), steps=8000),
}


def name(row: dict | Settings) -> tuple:
    """Return what identifies a run."""
    values = row if isinstance(row, dict) else vars(row)
    return tuple(values[field] for field in Settings.__dataclass_fields__)


def mend(path: Path) -> None:
    """Cut off what an interrupted write left behind a file's last whole line."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _one(chosen: Settings) -> dict:
    import torch

    torch.set_num_threads(1)
    return run(chosen, show=lambda text: print(text, flush=True))


def execute(grid: list[Settings], path: Path, workers: int) -> list[dict]:
    """Run what is missing in ``path`` and append it there; return all rows of the grid."""
    from verl_rounding_align.report import rows as report

    versions = {n: report.versions().get(n) for n in ("torch", "transformers", "verl-rounding-align")}
    path.parent.mkdir(parents=True, exist_ok=True)
    mend(path)
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


def check(rows: list[dict]) -> None:
    """Raise SystemExit unless the mismatch of ``all`` is below that of ``none`` in every seed: what `fast` is there to tell."""
    k3 = {(row["arm"], row["seed"]): mean(r["k3"] for r in row["rows"]) for row in rows}
    for seed in sorted({seed for _, seed in k3}):
        none, aligned = k3["none", seed], k3["all", seed]
        if not aligned < none:
            raise SystemExit(f"seed {seed}: k3 of `all` is {aligned:.2g}, not below that of `none`, {none:.2g}")
    print("k3 of `all` is below that of `none` in every seed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, help="of every run, instead of the grid's own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import pictures
    import table

    out = options.out or HERE.parents[1] / f"outputs/collapse/{options.grid}.jsonl"
    grid = [replace(chosen, steps=options.steps or chosen.steps) for chosen in GRIDS[options.grid]]
    rows = execute(grid, out, options.workers)
    table.show(rows, [run for runs in table.stored().values() for run in runs])
    for name, svg in (pictures.arm_pictures(rows) | pictures.width_pictures(rows)).items():
        out.with_suffix(f".{name}.svg").write_text(svg)
    print(f"kept in {out}, pictures beside it")
    if options.grid == "fast":
        check(rows)
