"""What `verl-rounding-align gap score` takes for dumps of growing size: CPU seconds and peak memory of the whole command.

python recipes/calibration/scale.py [--tokens 1000000 4000000 16000000]
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from verl_rounding_align.logprobs import pairs
from verl_rounding_align.report import rows as report

RESULTS = Path(__file__).parent / "results" / "scale.json"
# not ru_maxrss, which starts at the memory of the process that starts this one
WATCHED = (
    "import re, sys; from pathlib import Path; from verl_rounding_align.cli import app; "
    "app(['gap', 'score', sys.argv[1]], standalone_mode=False); "
    r"print(re.search(r'VmHWM:\s*(\d+) kB', Path('/proc/self/status').read_text())[1])"
)
LENGTHS = {"64 to 1,024": (64, 1024), "16,384": (16_384, 16_384)}  # tokens per row


def parts(tokens: int, lowest: int, highest: int, seed: int = 0):
    """Yield pairs with about ``tokens`` tokens in sequences of ``lowest`` to ``highest``, 200 at a time (a row group)."""
    rng = np.random.default_rng(seed)
    while tokens > 0:
        lengths = rng.integers(lowest, highest + 1, 200)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens) + 1]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rollout = -rng.exponential(size=offsets[-1])
        yield pairs.Pairs.of(rollout, rollout + 0.04 * rng.standard_t(6, offsets[-1]), offsets)
        tokens -= offsets[-1]


def cpu() -> float:
    """Return the CPU seconds, user and system, of the processes that have ended; of use where the machine has other work."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix, length, tokens in itertools.product(pairs.SUFFIXES, LENGTHS, args.tokens):
            dump = Path(folder) / f"dump{suffix}"
            pairs.write(dump, parts(tokens, *LENGTHS[length]))
            begin = cpu()
            command = [sys.executable, "-c", WATCHED, str(dump)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, peak = cpu() - begin, int(done.stdout.split()[-1]) / 1024
            size = dump.stat().st_size / 2**20
            rows.append(
                dict(format=suffix, length=length, tokens=tokens, seconds=seconds, peak_mib=peak, dump_mib=size)
            )
            print(f"{suffix} {length} {tokens:,} tokens: {seconds:.1f} s of CPU, {peak:.0f} MiB at most", flush=True)
    report.write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
