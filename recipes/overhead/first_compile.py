"""How long the first step with compiled regions takes: cold, with a warm disk cache, and when many workers start together.

Each worker is a process of its own that aligns a two-layer Qwen3 (`all`: every region, unrounded stream) and runs what a
trainer runs: log-probs without gradients, then a training step. Seconds are from `align` to the end of that, so they
hold every compilation; imports are left out. `misses` are graphs that Inductor had to compile because its disk cache had
not got them: workers that start together should not compile the same graph twice.

    python recipes/overhead/first_compile.py [--workers 4] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def worker() -> None:
    """Print seconds and cache misses of the first steps in this process, once all workers are ready."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_rounding_align import align

    torch.set_num_threads(1)
    config = AutoConfig.for_model("qwen3", vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(48).view(2, 24)
    model(ids)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    alignment = align(model, "all", engine="vllm_compiled", backend="compile")
    with torch.no_grad():
        model(ids, use_cache=False)
    model(ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
    seconds = time.monotonic() - start
    assert alignment.ran == {"compile"} and not alignment.idle()
    counters = torch._dynamo.utils.counters["inductor"]
    print(
        json.dumps(
            {"seconds": seconds, "misses": counters["fxgraph_cache_miss"], "hits": counters["fxgraph_cache_hit"]}
        )
    )


def together(workers: int, cache: Path) -> dict:
    """Start workers, let them go at once, and return the slowest one's seconds and the sum of their misses."""
    command = [sys.executable, __file__, "--worker"]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
        for _ in range(workers)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"a worker ended with status {[process.returncode for process in running]}")
    found = {name: [answer[name] for answer in answers] for name in answers[0]}
    return dict(
        workers=workers, seconds=round(max(found["seconds"]), 1), misses=sum(found["misses"]), hits=sum(found["hits"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=4, help="how many start together")
    parser.add_argument("--json", type=Path, help="also write the rows, with versions, to this file")
    args = parser.parse_args()
    if args.worker:
        return worker()
    from verl_rounding_align.report import rows as report

    rows = []
    for workers in (1, args.workers):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                rows.append({"cache": state, **together(workers, Path(cache))})
                print(rows[-1], flush=True)
    columns = ("cache", "workers", "seconds", "misses", "hits")
    report.show(report.table(f"First steps, {os.cpu_count()} cores", columns, [[r[c] for c in columns] for r in rows]))
    if args.json:
        report.write_json(args.json, {"cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
