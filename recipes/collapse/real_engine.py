"""The same task with nothing emulated, 8 prompts a batch: verl, Ray, FSDP2 and compiled vLLM on a CPU in BF16, `none` against `all`.

`python real_engine.py [--minutes 60] [--seed 0]` runs one arm after the other for so long in all, and writes
outputs/collapse/real_engine.json (results/ holds the run that the page is made from). The model is the recipe's but for heads of 32, the least that vLLM has on a CPU; it starts from the same supervised steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path[:0] = [str(HERE), str(QUICKSTART)]

import experiment  # noqa: E402
import quickstart  # noqa: E402

ARMS = ("none", "all")
LR, PRETRAIN, HEAD, PROMPTS = 2e-3, 60, 32, 8
NAMES = {"reward": "critic/rewards/mean", "k1": "rounding_align/mismatch_kl", "k3": "rounding_align/mismatch_k3",
         "norm": "actor/grad_norm"}  # fmt: skip


def make_assets(folder: Path, seed: int) -> None:
    """Write model/ (weights, config, tokenizer), train.parquet and val.parquet: five digits and ``=``, their reverse."""
    import pandas
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (folder / "model").mkdir(parents=True, exist_ok=True)
    ids = {token: i for i, token in enumerate([*map(str, range(experiment.DIGITS)), "=", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    special = dict(pad_token="<eos>", eos_token="<eos>", unk_token="<eos>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)
    fast.save_pretrained(folder / "model")
    model = experiment.pretrained(seed, PRETRAIN, head_dim=HEAD)
    model.config.eos_token_id = model.config.pad_token_id = ids["<eos>"]
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = ids["<eos>"]
    model.save_pretrained(folder / "model")
    rows = []
    for prompt in experiment.prompts(4096, torch.Generator().manual_seed(1000 + seed)).tolist():
        digits = "".join(map(str, prompt[: experiment.LENGTH]))
        rows.append({
            "data_source": "reverse", "prompt": [{"role": "user", "content": f"{digits}="}], "ability": "reverse",
            "reward_model": {"style": "rule", "ground_truth": digits[::-1]}, "extra_info": {"index": len(rows)},
        })  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(folder / "val.parquet")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **kwargs) -> float:
    """Return the share of digits that are right, in the form that verl calls. An end token leaves no text: what follows it
    moves up."""
    return sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)


def overrides(seed: int) -> list[str]:
    """Return what differs from the quickstart's command line: the recipe's batch, loss and optimizer."""
    batch = PROMPTS * experiment.GROUP
    return [
        f"data.train_batch_size={PROMPTS}", f"data.max_response_length={experiment.LENGTH}", f"data.seed={seed}", "actor_rollout_ref.rollout.max_model_len=32",
        *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu={batch}" for role in ("ref", "rollout")),
        f"actor_rollout_ref.rollout.n={experiment.GROUP}", "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // experiment.MINIBATCHES}",
        f"actor_rollout_ref.actor.optim.lr={LR}", "actor_rollout_ref.actor.optim.weight_decay=0",
        f"actor_rollout_ref.actor.grad_clip={experiment.MAX_NORM}", "actor_rollout_ref.actor.use_kl_loss=False",
        f"reward.custom_reward_function.path={HERE}/real_engine.py",
    ]  # fmt: skip


class TimeIsUp(Exception):
    """Enough steps: raised from the callback of a step."""


def run_arm(arm: str, seed: int, minutes: float, folder: Path) -> list[dict]:
    """Train for so many minutes, verl's start included; return one row per step: step, and ``NAMES``."""
    end = time.monotonic() + 60 * minutes

    def on_step(row: dict) -> None:
        if row["step"] % 50 == 0:
            print(
                f"{arm}: step {row['step']}, reward {row[NAMES['reward']]:.3f}, k3 {row[NAMES['k3']]:.1e}", flush=True
            )
        if time.monotonic() > end:
            raise TimeIsUp

    try:
        rows = quickstart.train(arm, 100_000, folder / arm, folder / "assets", on_step, overrides(seed))
    except TimeIsUp:
        rows = quickstart.read_metrics(folder / arm / "metrics.jsonl")
    quickstart.check_sites(arm, rows)
    return [{"step": row["step"], **{name: row[key] for name, key in NAMES.items()}} for row in rows]


def averaged(rows: list[dict]) -> list[dict]:
    """Return means over whole windows of steps, as the recipe keeps them."""
    size = experiment.WINDOW
    chunks = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    return [
        {"step": c[-1]["step"], **{name: float(f"{mean(row[name] for row in c):.4g}") for name in NAMES}}
        for c in chunks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "outputs/collapse/real_engine.json")
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / "outputs/real_engine")
    options = parser.parse_args()
    make_assets(options.work / "assets", options.seed)
    half = options.minutes / len(ARMS)
    found = {arm: run_arm(arm, options.seed, half, options.work) for arm in ARMS}
    steps = min(map(len, found.values()))
    arms = {arm: averaged(rows[:steps]) for arm, rows in found.items()}
    record = dict(
        lr=LR, seed=options.seed, pretrain=PRETRAIN, steps=steps, minutes=options.minutes, versions=quickstart.versions(), arms=arms
    )  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
