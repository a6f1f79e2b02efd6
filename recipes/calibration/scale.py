"""What `verl-rounding-align gap score` takes for dumps of growing size: seconds and peak memory of the whole command.

python recipes/calibration/scale.py [--tokens 1000000 4000000 16000000]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from verl_rounding_align import report
from verl_rounding_align.measure import pairs

RESULTS = Path(__file__).parent / "results" / "scale.json"
WATCHED = (
    "import resource, sys; from verl_rounding_align.cli import app; "
    "app(['gap', 'score', sys.argv[1]], standalone_mode=False); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


def parts(tokens: int, seed: int = 0):
    """Yield pairs with about ``tokens`` tokens in sequences of 64 to 1,024."""
    rng = np.random.default_rng(seed)
    while tokens > 0:
        lengths = rng.integers(64, 1025, 200)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens) + 1]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rollout = -rng.exponential(size=offsets[-1])
        yield pairs.Pairs.of(rollout, rollout + 0.04 * rng.standard_t(6, offsets[-1]), offsets)
        tokens -= offsets[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix in pairs.SUFFIXES:
            for tokens in args.tokens:
                dump = Path(folder) / f"dump{suffix}"
                pairs.write(dump, parts(tokens))
                begin = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", WATCHED, str(dump)], capture_output=True, text=True, check=True
                )
                seconds = time.perf_counter() - begin
                peak = int(done.stdout.split()[-1]) / 1024
                rows.append(
                    dict(
                        format=suffix,
                        tokens=tokens,
                        seconds=seconds,
                        peak_mib=peak,
                        dump_mib=dump.stat().st_size / 2**20,
                    )
                )
                print(f"{suffix} {tokens:,} tokens: {seconds:.1f} s, {peak:.0f} MiB at most", flush=True)
    cells = [
        (r["format"], f"{r['tokens']:,}", f"{r['dump_mib']:.0f}", f"{r['seconds']:.1f}", f"{r['peak_mib']:.0f}")
        for r in rows
    ]
    columns = ("dump", "tokens", "dump, MiB", "whole command, s", "peak memory, MiB")
    report.show(report.table("verl-rounding-align gap score", columns, cells))
    report.write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
