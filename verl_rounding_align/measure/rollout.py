"""Rollouts with fixed weights from a real inference engine, and the file they are kept in.

A rollout file is a folder with ``rollouts.safetensors`` (flat arrays) and ``rollouts.json`` (how they were made):

    tokens     int64 (total,)          prompt and response of every sequence, one after another
    offsets    int64 (sequences + 1,)  where each sequence starts
    prompts    int64 (sequences,)      number of prompt tokens of each
    log_probs  float32 (responses,)    the engine's log-prob of every response token, in the same order

``python -m verl_rounding_align.measure.rollout`` runs vLLM in a process of its own, so that the scorer's process never
holds an engine and nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .. import report
from .pairs import Pairs


@dataclass(frozen=True)
class Rollouts:
    """Sequences and the engine's log-probs; see the module's docstring for shapes and dtypes. ``meta`` is the JSON."""

    tokens: torch.Tensor
    offsets: torch.Tensor
    prompts: torch.Tensor
    log_probs: torch.Tensor
    meta: dict

    def __len__(self) -> int:
        return len(self.prompts)

    def sequence(self, i: int) -> torch.Tensor:
        """Return the tokens of sequence ``i``."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def response_offsets(self) -> np.ndarray:
        """Where each sequence's responses start in ``log_probs``; (sequences + 1,)."""
        lengths = (self.offsets[1:] - self.offsets[:-1] - self.prompts).numpy()
        return np.concatenate([[0], np.cumsum(lengths)])

    def pairs(self, trainer) -> Pairs:
        """Return the log-probs with a trainer's, (responses,) of any float dtype, in the same order."""
        first = self.prompts.numpy()
        ids = np.concatenate([self.sequence(i)[n:].numpy() for i, n in enumerate(first)])
        return Pairs.of(self.log_probs.numpy(), trainer, self.response_offsets, ids=ids, prompts=first)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: getattr(self, name) for name in ("tokens", "offsets", "prompts", "log_probs")}
        save_file(arrays, folder / "rollouts.safetensors.part")
        (folder / "rollouts.json").write_text(json.dumps(self.meta, indent=2, sort_keys=True) + "\n")
        (folder / "rollouts.safetensors.part").replace(folder / "rollouts.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Rollouts:
        """Return the rollouts in ``folder``.

        Raises:
            ValueError: arrays that do not fit together.
        """
        out = cls(**load_file(folder / "rollouts.safetensors"), meta=json.loads((folder / "rollouts.json").read_text()))
        if out.response_offsets[-1] != len(out.log_probs) or out.offsets[-1] != len(out.tokens):
            raise ValueError(
                f"{folder}: {len(out.log_probs)} log_probs for {out.response_offsets[-1]} response tokens, "
                f"{len(out.tokens)} tokens for offsets that end at {int(out.offsets[-1])}"
            )
        return out


def generate(
    model: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    length: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    logprobs_mode: str = "raw_logprobs",
    engine=None,
) -> Rollouts:
    """Return at least ``tokens`` response tokens sampled by vLLM in this process.

    Args:
        model: folder of a Transformers checkpoint with a tokenizer.
        prompts: user messages, cycled over.
        eager: ``enforce_eager``; else vLLM compiles the model.
        length: most response tokens per sequence.
        temperature: sampling temperature.
        top_p, top_k: probability mass, or number, of the likeliest tokens that are sampled from; 1 and 0 are all.
        logprobs_mode: vLLM's ``raw_logprobs`` (of the logits as the model gives them) or ``processed_logprobs`` (after
            temperature, top-p and top-k).
        engine: a running ``vllm.LLM`` started with this model, mode and ``logprobs_mode``, instead of a new one.
    """
    from vllm import LLM, SamplingParams

    engine = engine or LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=length + 256,
        max_num_seqs=64,
        seed=seed,
        enable_prefix_caching=False,
        logprobs_mode=logprobs_mode,
    )
    tokenizer = engine.get_tokenizer()

    def encode(prompt: str) -> list[int]:
        if tokenizer.chat_template is None:
            return tokenizer.encode(prompt)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer.encode(text, add_special_tokens=False)

    encoded = [encode(prompt) for prompt in prompts]
    sequences, lengths, log_probs, count, batch = [], [], [], 0, 0
    while count < tokens:
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=length, logprobs=0, seed=seed + batch
        )
        requests = [{"prompt_token_ids": ids} for ids in encoded]
        # a sequence keeps its place whatever its length: stopping in mid-batch would favour short responses
        for ids, result in zip(encoded, engine.generate(requests, sampling), strict=True):
            answer = result.outputs[0]
            sequences.append(ids + list(answer.token_ids))
            lengths.append(len(ids))
            log_probs += [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
            count += len(answer.token_ids)
        batch += 1
    meta = dict(
        model=str(model),
        engine="vllm",
        mode="eager" if eager else "compiled",
        temperature=temperature,
        length=length,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        logprobs_mode=logprobs_mode,
        sequences=len(sequences),
        response_tokens=count,
        versions=report.versions(),
    )
    offsets = np.cumsum([0, *map(len, sequences)])
    return Rollouts(
        tokens=torch.tensor([token for s in sequences for token in s]),
        offsets=torch.from_numpy(offsets),
        prompts=torch.tensor(lengths),
        log_probs=torch.tensor(log_probs, dtype=torch.float32),
        meta=meta,
    )


def make(folder: Path, model: str, prompts: list[str], tokens: int, eager: bool, **options) -> Rollouts:
    """Return the rollouts in ``folder``, made by vLLM in a process of its own if they are not there.

    Raises:
        RuntimeError: vLLM failed; its output is in ``rollouts.log``.
        ValueError: ``folder`` holds rollouts made in another way.
    """
    asked = dict(model=str(model), mode="eager" if eager else "compiled", **options)
    if not (folder / "rollouts.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        request = dict(model=str(model), prompts=prompts, tokens=tokens, eager=eager, **options)
        (folder / "request.json").write_text(json.dumps(request))
        with (folder / "rollouts.log").open("w") as log:
            command = [sys.executable, "-m", __spec__.name, str(folder)]
            environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # pinned threads crawl on a shared machine
            status = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
        if status:
            raise RuntimeError(f"vLLM ended with status {status}; see {folder / 'rollouts.log'}")
    rollouts = Rollouts.load(folder)
    other = {k: rollouts.meta.get(k) for k, v in asked.items() if rollouts.meta.get(k) != v}
    if other or rollouts.meta["response_tokens"] < tokens:
        raise ValueError(
            f"{folder} holds {rollouts.meta['response_tokens']} response tokens made with {other or 'these options'}, "
            f"asked for {tokens} with {asked}; choose another folder"
        )
    return rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with request.json: the arguments of generate()")
    folder = parser.parse_args().folder
    generate(**json.loads((folder / "request.json").read_text())).save(folder)


if __name__ == "__main__":
    main()
