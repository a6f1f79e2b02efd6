"""Real GRPO on a CPU, three times from the same seed: trainer rounding as it is (none), with `rope`, with `all`.

verl with Ray, an FSDP2 actor, a reference model and compiled vLLM rollouts train a small random Qwen3. Every arm must
show that its weights reached the engine at every step and that the alignment asked for is on. The table goes to the
terminal and to summary.json, summary.md and summary.png in the output folder; verl's own output is in <arm>/train.log.

A random model this small shows little of the effect of alignment (NOTE below): what this shows is that everything runs.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARMS = ("none", "rope", "all")
STEPS = 12
CLIP = 0.2
STALL = 1800  # seconds without a finished step, start included, after which a run counts as hanging
NOTE = (
    "A random model this small shows little of the effect of alignment: its mismatch is tiny in every arm, and one short "
    "run per arm says nothing about rewards. What this shows is that alignment, weight synchronisation and metrics work; "
    "measure the effect on pretrained weights."
)


def overrides(arm: str, steps: int, assets: Path) -> list[str]:
    """verl's command line: GRPO on the assets of make_assets.py with trainer rounding `arm`, on one CPU rank."""
    return [
        f"+actor_rollout_ref.actor.rounding_align={arm}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/val.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        "data.seed=1",
        f"actor_rollout_ref.model.path={assets}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        # Four optimiser steps per rollout at a high rate: weights that did not arrive show at once (check_weights).
        "actor_rollout_ref.actor.optim.lr=2e-3",
        f"actor_rollout_ref.actor.clip_ratio={CLIP}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "actor_rollout_ref.rollout.max_model_len=64",
        "actor_rollout_ref.rollout.max_num_seqs=128",
        "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/reward.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.v1.sampler.custom_sampler.path={HERE}/replay_buffer.py",
        "trainer.v1.sampler.custom_sampler.name=FastReplayBuffer",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        'trainer.logger=["console","file"]',
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=disable",
        # What Ray counts, not what the machine has: verl asks for more CPUs than two, and its ranks want a "GPU" each.
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.object_store_memory=300000000",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "hydra.run.dir=.",
    ]


def environment(metrics: Path) -> dict[str, str]:
    """Environment of a run that logs its metrics to the file `metrics`, in a Ray cluster of its own."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return env | {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def read_metrics(path: Path) -> list[dict]:
    """Rows of verl's file logger, one per finished step: metric name to value, and `step`."""
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [{"step": row["step"], **row["data"]} for row in map(json.loads, complete.splitlines())]


def train(arm: str, steps: int, folder: Path, assets: Path, on_step=lambda row: None, more=(), first=1) -> list[dict]:
    """Run verl's trainer in a process of its own, with `more` overrides, and return its metrics, one row per step.

    `first` is the step that a resumed run starts with.

    Raises:
        RuntimeError: if the trainer fails, hangs, or logs another number of steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(arm, steps, assets), *more]
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=folder, env=environment(metrics), stdout=output, stderr=output, start_new_session=True
        )
        seen, alive = 0, time.monotonic()
        try:
            while run.poll() is None:
                time.sleep(0.5)
                for row in read_metrics(metrics)[seen:]:
                    seen, alive = seen + 1, time.monotonic()
                    on_step(row)
                if time.monotonic() - alive > STALL:
                    raise RuntimeError(f"{arm}: no step finished for {STALL} s after step {seen}; see {log}")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
                run.wait()
    if run.returncode != 0:
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        raise RuntimeError(f"{tail}\n{arm}: verl's trainer ended with status {run.returncode}; see {log}")
    rows = read_metrics(metrics)
    for row in rows[seen:]:
        on_step(row)
    if [row["step"] for row in rows] != list(range(first, steps + 1)):
        raise RuntimeError(f"{arm}: {steps} steps asked for, {len(rows)} logged in {metrics}; see {log}")
    return rows


def k3(log_ratio: float) -> float:
    """The k3 estimator of one token: r - log r - 1, log r = trainer minus rollout log-prob."""
    return math.expm1(log_ratio) - log_ratio


def check_weights(rows: list[dict]) -> None:
    """Raise RuntimeError unless the weights that made each step's rollouts are the trainer's.

    `actor/pg_clipfrac` of step t-1 is a share of tokens whose probability training in step t-1 changed by more than
    the clip ratio, and k3 of such a token is at least min k3(log(1 +- clip)) = 0.0177. Rollouts of step t made with the
    weights from before would therefore show a mismatch of about 0.0177 * pg_clipfrac or more, as large as the weights'
    own movement; what rounding leaves is orders of magnitude smaller. So each step's `rounding_align/mismatch_k3` must
    stay below that. At step 1 the movement of step 1 is the yardstick: the engine starts on dummy weights, whose
    uniform policy is farther away than that. Weights that hardly move prove nothing, and fail as well.
    """
    least = min(k3(math.log1p(CLIP)), k3(math.log1p(-CLIP)))
    for previous, row in zip([rows[0], *rows], rows, strict=False):
        mismatch, clipped = row["rounding_align/mismatch_k3"], previous["actor/pg_clipfrac"]
        if not mismatch < least * clipped:
            raise RuntimeError(
                f"step {row['step']}: mismatch_k3 {mismatch:.2e} is not below {least * clipped:.2e}, the least that "
                f"stale weights would show (0.0177 * pg_clipfrac {clipped:.3g}): the trainer's weights did not reach "
                "the engine, or moved too little to tell"
            )


def proof(arm: str, log: Path) -> str:
    """The line in which the actor's worker says what it has aligned, `none` for the arm none.

    Raises:
        RuntimeError: if the line is not there, or is there for the arm none.
    """
    found = re.findall(r"rounding_align: (.*) \(actor, rank 0\)", log.read_text(errors="replace"))
    if len(found) != (arm != "none"):
        raise RuntimeError(f"rounding_align={arm}: {len(found)} lines of proof from the actor in {log}")
    return found[0] if found else "none"


def check_sites(arm: str, rows: list[dict]) -> None:
    """Raise RuntimeError unless every step reports the same number of aligned modules, none only for the arm none."""
    sites = {row["rounding_align/sites_actor"] for row in rows}
    if len(sites) != 1 or (sites == {0}) != (arm == "none"):
        raise RuntimeError(f"rounding_align={arm}: rounding_align/sites_actor over the steps is {sorted(sites)}")


@dataclass(frozen=True)
class Summary:
    """One arm. Rewards are means over a step's responses; mismatch_k3 is the mean over steps of verl-rounding-align's
    metric, with the standard error that follows from each step's; seconds are the median over steps after the first.
    """

    arm: str
    plan: str
    steps: int
    reward_first: float
    reward_last: float
    mismatch_k3: float
    mismatch_k3_se: float
    sites_actor: int
    seconds_per_step: float


def summarise(arm: str, plan: str, rows: list[dict]) -> Summary:
    check_sites(arm, rows)
    check_weights(rows)
    n = len(rows)
    return Summary(
        arm=arm,
        plan=plan,
        steps=n,
        reward_first=rows[0]["critic/rewards/mean"],
        reward_last=rows[-1]["critic/rewards/mean"],
        mismatch_k3=sum(row["rounding_align/mismatch_k3"] for row in rows) / n,
        mismatch_k3_se=math.sqrt(sum(row["rounding_align/mismatch_k3_se"] ** 2 for row in rows)) / n,
        sites_actor=int(rows[0]["rounding_align/sites_actor"]),
        seconds_per_step=statistics.median(row["timing_s/step"] for row in rows[1:] or rows),
    )


COLUMNS = ("arm", "steps", "reward first", "reward last", "mismatch_k3", "s.e.", "sites_actor", "s/step")


def cells(s: Summary) -> list[str]:
    return [
        s.arm,
        str(s.steps),
        f"{s.reward_first:.3f}",
        f"{s.reward_last:.3f}",
        f"{s.mismatch_k3:.2e}",
        f"{s.mismatch_k3_se:.1e}",
        str(s.sites_actor),
        f"{s.seconds_per_step:.1f}",
    ]


def versions() -> dict[str, str]:
    names = ("verl-rounding-align", "verl", "vllm", "torch", "transformers", "ray")
    return {name: metadata.version(name) for name in names}


def write(summaries: list[Summary], rows: dict[str, list[dict]], seconds: float, out: Path) -> None:
    """Write summary.json, summary.md and summary.png."""
    record = {
        "note": NOTE,
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": versions(),
        "seconds": round(seconds),
        "arms": [asdict(s) for s in summaries],
    }
    (out / "summary.json").write_text(json.dumps(record, indent=2) + "\n")
    table = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, summaries)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    made_with = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    plans = "\n".join(f"- {s.arm}: {s.plan}" for s in summaries)
    (out / "summary.md").write_text(
        f"{text}\n\n{plans}\n\n{NOTE}\n\n{record['device']}; {made_with}; {record['seconds']} s.\n"
    )

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    reward, mismatch = figure.subplots(1, 2)
    for s in summaries:
        steps = [row["step"] for row in rows[s.arm]]
        reward.plot(steps, [row["critic/rewards/mean"] for row in rows[s.arm]], label=s.arm)
        mismatch.errorbar(
            steps,
            [row["rounding_align/mismatch_k3"] for row in rows[s.arm]],
            yerr=[row["rounding_align/mismatch_k3_se"] for row in rows[s.arm]],
            label=s.arm,
        )
    reward.set(xlabel="step", ylabel="mean reward")
    mismatch.set(xlabel="step", ylabel="mismatch_k3 (with s.e.)", yscale="log")
    reward.legend(title="rounding_align")
    figure.savefig(out / "summary.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="values of rounding_align, comma-separated")
    parser.add_argument("--steps", type=int, default=STEPS, help="GRPO steps per arm")
    parser.add_argument("--verl", action="append", default=[], help="one more override for verl, KEY=VALUE")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "outputs" / "quickstart")
    args = parser.parse_args()
    arms, out = args.arms.split(","), args.out.resolve()

    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    sys.path.insert(0, str(HERE))
    from make_assets import make_assets

    console = Console()
    start = time.monotonic()
    assets = out / "assets"
    make_assets(assets)
    rows: dict[str, list[dict]] = {}
    summaries = []
    columns = ("{task.description}", "{task.completed}/{task.total} steps", "{task.fields[state]}")
    with Progress(TextColumn(columns[0]), BarColumn(), *map(TextColumn, columns[1:]), TimeElapsedColumn()) as progress:
        tasks = {
            arm: progress.add_task(f"rounding_align={arm}", total=args.steps, state="", start=False) for arm in arms
        }
        for arm, task in tasks.items():
            progress.start_task(task)
            progress.update(task, state="starting Ray, verl and vLLM (a minute or two)")

            def show(row: dict, task=task) -> None:
                reward, mismatch = row["critic/rewards/mean"], row["rounding_align/mismatch_k3"]
                progress.update(task, completed=row["step"], state=f"reward {reward:.3f}, mismatch_k3 {mismatch:.1e}")

            rows[arm] = train(arm, args.steps, out / arm, assets, show, args.verl)
            summaries.append(summarise(arm, proof(arm, out / arm / "train.log"), rows[arm]))
    write(summaries, rows, time.monotonic() - start, out)

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))  # narrow enough for 80 columns
    for column in COLUMNS:
        table.add_column(column, min_width=max(map(len, column.split())))
    for s in summaries:
        table.add_row(*cells(s))
    console.print(table)
    console.print("Weights reached the engine at every step of every arm.")
    console.print(NOTE)
    console.print(f"Written: {out}/summary.json, summary.md, summary.png", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"quickstart failed: {error}")
