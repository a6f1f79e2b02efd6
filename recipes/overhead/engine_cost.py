"""What the engine pays if it keeps its source's casts: compiled vLLM with TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 against
compiled vLLM, seconds to sample the same number of tokens. Two engines, started once, take turns.

    python recipes/overhead/engine_cost.py --model .cache/smollm2-135m [--pairs 9]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from alternatives_gap import EMULATED

from verl_rounding_align.engines.vllm import generate as rollout
from verl_rounding_align.overhead.compare import compare
from verl_rounding_align.report import rows as report

RESULTS = Path(__file__).parent / "results" / "engine_cost.json"
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",  # the engine whose turn it is not does not spin
}
SEQUENCES, PROMPT, TOKENS = 32, 64, 64
ANSWER = "engine_cost: "


def serve(model: str) -> None:
    """Start an engine, then sample once for every line of standard input and answer with the seconds it took."""
    engine = rollout.start(model, eager=False, length=TOKENS)
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [1000 + 7 * i + j for j in range(PROMPT)]} for i in range(SEQUENCES)]
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    for _ in sys.stdin:
        began = time.perf_counter()
        out = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(o.outputs[0].token_ids) for o in out) == SEQUENCES * TOKENS
        print(f"{ANSWER}{seconds}", flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, model: str, env: dict[str, str]):
        command = [sys.executable, __file__, "--model", model, "--serve"]
        self.process = subprocess.Popen(
            command, env={**os.environ, **QUIET, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def sample(self) -> float:
        """Return the seconds of one sampling."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        raise RuntimeError(f"the engine ended with status {self.process.wait()}; what it wrote is above")

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", required=True, help="folder of a checkpoint; recipes/smollm2_gap/get_model.py makes it"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.model)
    engines = [Engine(options.model, env) for env in ({}, EMULATED)]
    seconds = ([], [])
    try:
        for i in range(-1, options.pairs):  # the first of each warms up
            for engine, of in zip(engines, seconds, strict=True):
                took = engine.sample()
                if i >= 0:
                    of.append(took)
    finally:
        for engine in engines:
            engine.stop()
    found = compare(*seconds)
    print(f"engine with emulate_precision_casts, {SEQUENCES} sequences of {TOKENS} tokens: {found.verdict}")
    about = dict(model=Path(options.model).name, sequences=SEQUENCES, prompt=PROMPT, tokens=TOKENS)
    report.write_json(RESULTS, {**about, "load": os.getloadavg(), "timing": asdict(found)})


if __name__ == "__main__":
    main()
