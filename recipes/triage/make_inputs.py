"""Make the inputs of the triage calibration from real engine runs: rollouts of vLLM, scores of the trainer, faults.

``generate`` runs vLLM once per log-probs mode and samples under every setting. ``score`` lets the trainer (Transformers,
BF16, fp32 log-softmax) score the tokens, with the right weights at each temperature and with faults put into it: other
weights, another RoPE, attended left padding, a sliding window, prompts cut off in front. Both resume.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from verl_rounding_align.engines.vllm import generate as rollout
from verl_rounding_align.report.rows import versions

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "outputs" / "triage"
# name: (logprobs_mode, temperature, top_p, top_k)
RUNS = {
    "t0.6": ("processed_logprobs", 0.6, 1.0, 0),
    "topp0.9": ("processed_logprobs", 1.0, 0.9, 0),
    "topk20": ("processed_logprobs", 1.0, 1.0, 20),
    "t0.8": ("processed_logprobs", 0.8, 1.0, 0),
    "topp0.95": ("processed_logprobs", 1.0, 0.95, 0),
    "t0.95": ("processed_logprobs", 0.95, 1.0, 0),
    "topp0.99": ("processed_logprobs", 1.0, 0.99, 0),
    "topk50": ("processed_logprobs", 1.0, 1.0, 50),
    "t1.2": ("processed_logprobs", 1.2, 1.0, 0),
    "clean": ("processed_logprobs", 1.0, 1.0, 0),
    "groups": ("processed_logprobs", 1.0, 1.0, 0),  # as GRPO samples
    "raw_t0.6": ("raw_logprobs", 0.6, 1.0, 0),
    "raw_t0.8": ("raw_logprobs", 0.8, 1.0, 0),
    "raw_topp0.9": ("raw_logprobs", 1.0, 0.9, 0),
}
# folder: (family, its options), of random models
MOE = dict(moe_intermediate_size=64, mlp_only_layers=[])
RANDOM = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=16, num_experts_per_tok=2, **MOE)),
    "qwen3_moe_8": ("qwen3_moe", dict(num_experts=8, num_experts_per_tok=1, **MOE)),
    "qwen3_moe_64": ("qwen3_moe", dict(num_experts=64, num_experts_per_tok=4, **MOE)),
}
TUNED = 20  # seed of the rollouts that thresholds were set with, and that are recorded for tests
SEED = 21  # of those that rates are measured on
SEQUENCES = 28  # of a run, that trainers score
NOISES = (0.05, 0.02, 0.1, 0.01, 0.003)
WINDOWS = (64, 128)
PADS = (8, 64)
CUTS = (160, 240)  # most tokens of a sequence; a longer one loses the front of its prompt
ROPES = {"theta x0.5": ("theta", 0.5), "theta x2": ("theta", 2.0), "theta x4": ("theta", 4.0), "linear x1.1": ("linear", 1.1)}  # fmt: skip


def prompts() -> list[str]:
    """Return the prompts that come with the package."""
    text = (resources.files("verl_rounding_align.gap") / "prompts.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip()]


def seed() -> int:
    """Return the seed of the rollouts that are there."""
    return json.loads((OUT / "clean" / "rollouts.json").read_text())["seed"]


def generate(model: str, mode: str, tokens: int, seed: int) -> None:
    """Sample every setting of one log-probs mode, in this process."""
    engine = None
    for name, (logprobs_mode, temperature, top_p, top_k) in RUNS.items():
        if logprobs_mode != mode or (OUT / name / "rollouts.safetensors").exists():
            continue
        engine = engine or rollout.start(model, eager=True, seed=seed, logprobs_mode=mode)
        options = dict(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, versions=versions())
        asked = prompts()[:4] * 8 if name == "groups" else prompts()
        rollout.generate(engine, asked, 1 if name == "groups" else tokens, **options, model=model, mode="eager").save(
            OUT / name
        )


def random_model(name: str, tokenizer: str) -> Path:
    """Return the folder of a small random model, made if it is not there, with another model's tokenizer (49,152 tokens)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, (family, options) = OUT / "models" / name, RANDOM[name]
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            family, vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, **options,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if "norm" in path:
                    weight.copy_(1 + 0.3 * torch.randn_like(weight))
                else:  # so that distributions are not flat, and experts differ
                    scale = {"embed_tokens": 15, "lm_head": 15, "gate": 10}
                    weight.mul_(scale.get(path.split(".")[-2], 3))
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(tokenizer) / file, folder / file)
    return folder


def generate_random(family: str, tokenizer: str) -> None:
    """Sample from a random model, in this process."""
    folder = str(random_model(family, tokenizer))
    engine = rollout.start(folder, eager=True, length=128, seed=3, logprobs_mode="processed_logprobs")
    made_with = dict(model=folder, mode="eager", versions=versions())
    sample = rollout.generate(engine, prompts(), 6000, length=128, seed=3, **made_with)
    sample.save(OUT / f"random {family}")


@torch.no_grad()
def score(
    model, rollouts, temperatures=(1.0,), pad: int = 0, window: int | None = None, cut: int | None = None
) -> dict:
    """Return temperature -> log-probs (response tokens,) fp32, one sequence at a time.

    Args:
        pad: padding tokens in front that attention sees, as if the attention mask had been forgotten.
        window: tokens back that attention sees, as if a sliding window had been set.
        cut: most tokens of a sequence; a longer one loses the front of its prompt (one token of it stays).
    """
    offsets = rollouts.response_offsets
    out = {t: torch.empty(int(offsets[-1])) for t in temperatures}
    for i in range(len(rollouts)):
        ids, first = rollouts.sequence(i), int(rollouts.prompts[i])
        drop = min(max(0, len(ids) - cut), first - 1) if cut else 0
        ids = torch.cat([torch.full((pad,), 2), ids[drop:]])  # 2: SmolLM2's padding token
        first += pad - drop
        mask = None
        if window:
            back = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
            mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.bfloat16)
            mask.masked_fill_((back < 0) | (back >= window), float("-inf"))
        logits = model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0, first - 1 : -1].float()
        for t in temperatures:
            log_probs = (logits / t).log_softmax(-1)
            out[t][offsets[i] : offsets[i + 1]] = log_probs.gather(-1, ids[first:, None])[:, 0]
    return out


def head(rollouts, sequences: int):
    """Return the first sequences alone."""
    from verl_rounding_align.gap.rollouts import Rollouts

    n = int(rollouts.offsets[sequences])
    responses = int(rollouts.response_offsets[sequences])
    return Rollouts(
        rollouts.tokens[:n], rollouts.offsets[: sequences + 1], rollouts.prompts[:sequences],
        rollouts.log_probs[:responses], rollouts.meta,
    )  # fmt: skip


def load(model: str, noise: float = 0.0, rope: tuple[str, float] | None = None):
    """Return the trainer's model; with relative Gaussian noise on every matrix, or with other RoPE parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if rope and rope[0] == "theta":
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_theta": config.rope_parameters["rope_theta"] * rope[1],
        }
    elif rope:
        config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": rope[1]}
    loaded = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.bfloat16).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in loaded.parameters():
            if noise and weight.ndim == 2:
                scale = noise * weight.float().pow(2).mean().sqrt()
                weight.copy_(weight.float() + scale * torch.randn(weight.shape, generator=draw))
    return loaded


def score_all(model: str) -> None:
    """Score what is not scored yet."""
    from verl_rounding_align.gap.rollouts import Rollouts

    def kept(file: Path, make) -> None:
        if not file.exists():
            save_file(make(), file)
            print(file.relative_to(OUT), flush=True)

    loaded = load(model)
    for name, (_, temperature, _, _) in RUNS.items():
        if (OUT / name / "rollouts.safetensors").exists():
            rollouts = Rollouts.load(OUT / name)
            rollouts = rollouts if name == "groups" else head(rollouts, SEQUENCES)
            wanted = sorted({1.0, temperature})
            kept(
                OUT / name / "trainer.safetensors",
                lambda r=rollouts, w=wanted: {f"{t:g}": x for t, x in score(loaded, r, w).items()},
            )
    for family in RANDOM:
        rollouts = head(Rollouts.load(OUT / f"random {family}"), SEQUENCES)
        kept(
            OUT / f"random {family}" / "trainer.safetensors",
            lambda r=rollouts, f=family: {"1": score(load(str(random_model(f, model))), r)[1.0]},
        )
    faults = OUT / "faults"
    faults.mkdir(parents=True, exist_ok=True)
    base = head(Rollouts.load(OUT / "clean"), SEQUENCES)
    made = {f"window {w}": lambda w=w: score(loaded, base, window=w) for w in WINDOWS}
    made |= {f"noise {n}": lambda n=n: score(load(model, noise=n), base) for n in NOISES}
    made |= {f"rope {name}": lambda r=r: score(load(model, rope=r), base) for name, r in ROPES.items()}
    made |= {f"pad {p}": lambda p=p: score(loaded, base, pad=p) for p in PADS}
    made |= {f"cut {c}": lambda c=c: score(loaded, base, cut=c) for c in CUTS}
    for name, make in made.items():
        kept(faults / f"{name}.safetensors", lambda make=make: {"1": make()[1.0]})


def store(sequences: int | None = None) -> dict[str, np.ndarray]:
    """Return all there is as flat arrays, of the first sequences alone if so many are asked for.

    ``NAME/rollout``, ``NAME/trainer T``, ``NAME/offsets``, ``NAME/prompts``, ``NAME/ids`` of every run, ``fault NAME`` of scores of ``clean``.
    """
    from verl_rounding_align.gap.rollouts import Rollouts

    out = {}
    for name in [*RUNS, *(f"random {family}" for family in RANDOM)]:
        if not (OUT / name / "trainer.safetensors").exists():
            continue
        rollouts = Rollouts.load(OUT / name)
        scored = {t: x.numpy() for t, x in load_file(OUT / name / "trainer.safetensors").items()}
        n = int(np.searchsorted(rollouts.response_offsets, len(next(iter(scored.values())))))
        offsets = rollouts.response_offsets[: min(n, sequences or n) + 1]
        out[f"{name}/offsets"] = offsets.astype(np.int32)
        out[f"{name}/prompts"] = rollouts.prompts.numpy()[: len(offsets) - 1].astype(np.int32)
        first = rollouts.prompts.numpy()
        ids = np.concatenate([rollouts.sequence(i)[first[i] :].numpy() for i in range(len(offsets) - 1)])
        out[f"{name}/ids"] = ids.astype(np.uint16 if ids.max() < 1 << 16 else np.int32)
        out[f"{name}/rollout"] = rollouts.log_probs.numpy()[: offsets[-1]]
        for t, scores in scored.items():
            out[f"{name}/trainer {t}"] = scores[: offsets[-1]]
    if "clean/offsets" in out:
        for file in sorted((OUT / "faults").glob("*.safetensors")):
            scores = load_file(file)["1"].numpy()
            out[f"fault {file.stem}"] = scores[: out["clean/offsets"][-1]]
    return out


def record(folder: Path, sequences: int) -> None:
    """Write a part of it for the tests, with where it is from."""
    import hashlib

    from safetensors.numpy import save_file as save

    folder.mkdir(parents=True, exist_ok=True)
    save({name: np.ascontiguousarray(x) for name, x in store(sequences).items()}, folder / "inputs.safetensors")
    provenance = {
        "script": "recipes/triage/make_inputs.py --record",
        "sequences": sequences,
        "sha256": hashlib.sha256((folder / "inputs.safetensors").read_bytes()).hexdigest(),
        "runs": {
            name: json.loads((OUT / name / "rollouts.json").read_text())
            for name in [*RUNS, *(f"random {f}" for f in RANDOM)]
            if (OUT / name).exists()
        },
    }
    for run in provenance["runs"].values():
        run["model"] = Path(run["model"]).name
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(ROOT / ".cache/smollm2-135m"), help="folder of the checkpoint")
    parser.add_argument("--tokens", type=int, default=8000, help="least response tokens per setting")
    parser.add_argument(
        "--mode", help="only sample under this log-probs mode, or of this random model, in this process"
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the rollouts; thresholds were set with {TUNED}")
    parser.add_argument("--no-score", action="store_true")
    parser.add_argument("--record", type=Path, help="only write the tests' part of the inputs into this folder")
    options = parser.parse_args()
    if options.record and seed() != TUNED:
        sys.exit(f"tests record what thresholds were set with, seed {TUNED}; {OUT} holds seed {seed()}")
    if options.record:
        return record(options.record, 20)
    if options.mode in RANDOM:
        return generate_random(options.mode, options.model)
    if options.mode:
        return generate(options.model, options.mode, options.tokens, options.seed)
    if (OUT / "clean" / "rollouts.json").exists() and seed() != options.seed:
        sys.exit(f"{OUT} holds rollouts of seed {seed()}, asked for {options.seed}: move it away")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    OUT.mkdir(parents=True, exist_ok=True)
    wanted = {mode: [n for n, run in RUNS.items() if run[0] == mode] for mode, *_ in RUNS.values()}
    for mode, names in {**wanted, **{family: [f"random {family}"] for family in RANDOM}}.items():
        if all((OUT / name / "rollouts.safetensors").exists() for name in names):
            continue
        command = [sys.executable, __file__, "--mode", mode, "--model", options.model, "--tokens", str(options.tokens)]
        command += ["--seed", str(options.seed)]
        with (OUT / f"{mode}.log").open("w") as log:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    if not options.no_score:
        score_all(options.model)


if __name__ == "__main__":
    main()
