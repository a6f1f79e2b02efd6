"""Mismatch against significant bits at fixed weights: `python bits.py [FILE]` writes outputs/collapse/bits.json, or FILE.

The weights after pre-training, stored in each format; sampler and trainer as in the recipe (cache, other kernel), and with
the trainer's attention kernel in the sampler, where reduction order alone is left of the aligned gap.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import experiment as e  # noqa: E402

from verl_rounding_align.report import rows as report  # noqa: E402

BITS, SEEDS, PROMPTS = range(3, 9), 5, 64


def k3(start, arm: str, bits: int, seed: int) -> float:
    """Return k3 over the answers to ``PROMPTS`` prompts, ``e.GROUP`` each."""
    pair = e.Pair(copy.deepcopy(start), e.Settings(arm, bits, lr=0, seed=seed, steps=0))
    g = torch.Generator().manual_seed(seed)
    ids, rollout = pair.sample(e.prompts(PROMPTS, g), g)
    with torch.no_grad():
        log_r = (e.log_probs(pair.trainer, ids) - rollout).double()
    return float((log_r.exp() - log_r - 1).mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows, stored = [], e.kernel
    starts = [e.pretrained(seed, 60) for seed in range(SEEDS)]
    for bits in BITS:
        for kernel, registered in (("stored probabilities", stored), ("fp32 probabilities", lambda f: "eager")):
            e.kernel = registered
            for arm in ("none", "rope", "paper", "all"):
                for seed, start in enumerate(starts):
                    value = float(f"{k3(start, arm, bits, seed):.4g}")
                    rows.append(dict(bits=bits, kernel=kernel, arm=arm, seed=seed, k3=value))
                print(rows[-1], flush=True)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "outputs/collapse/bits.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(out, {"sequences": PROMPTS * e.GROUP, "rows": rows})
