"""What the mismatch metrics cost at 1e6 response tokens: seconds in the driver, median of 7.

Printed with the shortest step of which that is 0.5 %. Usage: metric_cost.py [--json FILE]
"""

import argparse
import statistics
import time

import torch

from verl_rounding_align.monitor.mismatch import mismatch
from verl_rounding_align.report import rows as report

SEQUENCES, LENGTH = 512, 2048  # 1,048,576 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the figures to this file")
    file = parser.parse_args().json
    generator = torch.Generator().manual_seed(0)
    trainer = -torch.rand(SEQUENCES, LENGTH, generator=generator)
    rollout = trainer + 1e-3 * torch.randn(SEQUENCES, LENGTH, generator=generator)
    mask = torch.arange(LENGTH)[None] < torch.randint(64, LENGTH, (SEQUENCES, 1), generator=generator)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        mismatch(trainer, rollout, mask)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    print(f"{SEQUENCES * LENGTH} tokens: {1e3 * median:.1f} ms, 0.5 % of a step of {median / 0.005:.1f} s")
    if file:
        report.write_json(
            file, {"tokens": SEQUENCES * LENGTH, "seconds": seconds[1:], "threads": torch.get_num_threads()}
        )


if __name__ == "__main__":
    main()
