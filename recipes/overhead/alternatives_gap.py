"""The gap that is left with what a user would pick instead of alignment: the other column of the table of costs.

Compiled vLLM generates with SmolLM2-135M; the trainer scores the same tokens as it is, aligned, compiled as a whole
(`torch.compile`, dynamic shapes), and with an fp32 language-model head. On the engine's side instead: vLLM generates with
`TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1`, so that its compiled graph keeps the casts of its source (other tokens, hence
not paired). Ratios of k3 to the unaligned trainer, 95 % intervals over sequences.

    python recipes/overhead/alternatives_gap.py --model .cache/smollm2-135m --out outputs/alternatives [--tokens 3000]
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from importlib import resources
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from verl_rounding_align import align
from verl_rounding_align.gap import measure as gap
from verl_rounding_align.gap import rollouts as rollout
from verl_rounding_align.gap.score import score
from verl_rounding_align.report import rows as report
from verl_rounding_align.report.rows import table

RESULTS = Path(__file__).parent / "results" / "alternatives_gap.json"
ENGINE = "vllm_compiled"
# vLLM's cache of compiled graphs does not know the variable: it would hand out the graph without the casts
EMULATED = {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}


class Float32Head(nn.Module):
    """A language-model head that multiplies in fp32."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.head.weight.float())


def aligned(model, regions: str):
    align(model, regions, engine=ENGINE)
    return model


def with_float32_head(model):
    model.lm_head = Float32Head(model.lm_head)
    return model


ARMS = {  # by the names that run.py's costs have
    "rope": lambda model: aligned(model, "rope"),
    "paper": lambda model: aligned(model, "paper"),
    "all": lambda model: aligned(model, "all"),
    "torch.compile": lambda model: torch.compile(model, dynamic=True),
    "torch.compile, emulate_precision_casts": lambda model: torch.compile(
        model, dynamic=True, options={"emulate_precision_casts": True}
    ),
    "fp32 LM head": with_float32_head,
    "all, and an fp32 LM head": lambda model: with_float32_head(aligned(model, "all")),
}


def unpaired(x: gap.GapRow, base: gap.GapRow) -> tuple[float, float, float]:
    """Return the ratio of two k3 on different tokens, interval from both log-normal: half-widths add in squares."""

    def half(row: gap.GapRow) -> float:
        return (math.log(row.k3[2]) - math.log(row.k3[1])) / 2

    ratio, width = x.k3[0] / base.k3[0], math.hypot(half(x), half(base))
    return ratio, ratio * math.exp(-width), ratio * math.exp(width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", required=True, help="folder of the checkpoint; recipes/smollm2_gap/get_model.py makes it"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for rollouts; they are used again")
    parser.add_argument("--tokens", type=int, default=3000, help="response tokens, at least")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    prompts = (resources.files("verl_rounding_align.gap") / "prompts.txt").read_text().split("\n")
    prompts = [line.strip() for line in prompts if line.strip()]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()

    def difference(rollouts, variant) -> np.ndarray:
        scores = score(variant, rollouts)["log_probs"]
        return (rollouts.log_probs - scores).numpy().astype(np.float64)

    plain = rollout.make(args.out / "compiled", args.model, prompts, args.tokens, eager=False)
    offsets = plain.response_offsets
    base = difference(plain, model)
    rows = {"none": gap.gap_row("none", "none", base, base, offsets)}
    for arm, variant in ARMS.items():
        print(f"scoring: {arm}", flush=True)
        d = difference(plain, variant(copy.deepcopy(model)))
        rows[arm] = gap.gap_row(arm, ENGINE, d, base, offsets)
    with mock.patch.dict(os.environ, EMULATED):
        other = rollout.make(args.out / "emulated", args.model, prompts, args.tokens, eager=False)
    d = difference(other, model)
    emulated = gap.gap_row("engine with emulate_precision_casts", "none", d, d, other.response_offsets)
    ratios = {arm: row.k3_ratio for arm, row in rows.items()} | {emulated.arm: unpaired(emulated, rows["none"])}
    k3 = {arm: row.k3 for arm, row in rows.items()} | {emulated.arm: emulated.k3}
    cells = [
        (
            arm,
            *(
                "{:.2f} [{:.2f}, {:.2f}]".format(*(1e4 * x for x in k3[arm])),
                "{:.3f} [{:.3f}, {:.3f}]".format(*ratios[arm]),
            ),
        )
        for arm in k3
    ]
    title = f"{len(base):,} response tokens, compiled vLLM"
    report.show(table(title, ("trainer", "k3, 1e-4 nats", "ratio to unaligned"), cells))
    report.write_json(
        args.json,
        {"tokens": len(base), "model": Path(args.model).name, "k3": k3, "ratio": ratios, "unpaired": [emulated.arm]},
    )


if __name__ == "__main__":
    main()
