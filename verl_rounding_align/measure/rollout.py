"""Rollouts with fixed weights from a real inference engine, and the files they are kept in.

A rollout folder holds ``rollouts.safetensors`` (flat arrays) and ``rollouts.json`` (how they were made):

    tokens     int64 (total,)          prompt and response of every sequence, one after another
    offsets    int64 (sequences + 1,)  where each sequence starts
    prompts    int64 (sequences,)      number of prompt tokens of each
    log_probs  float32 (responses,)    the engine's log-prob of every response token, in the same order

and, where asked for, what the same engine says of the same tokens in another way:

    prefill.safetensors      log_probs   float32 (responses,)  every sequence given whole, as a prompt
    next_tokens.safetensors  at          int64 (positions,)    which response tokens, as indices into log_probs
                             log_probs   float32 (positions, vocabulary)  the whole distribution that each was drawn from

``python -m verl_rounding_align.measure.rollout`` runs vLLM in a process of its own, so that the scorer's process never
holds an engine and nothing is left running. Sequence i is sampled with seed ``seed + i``: sequences are independent, and
the same ones come again from an engine that only schedules differently, until a token differs.
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

PREFILL, NEXT_TOKENS = "prefill", "next_tokens"


def save(file: Path, arrays: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write safetensors so that a file under its name is a whole one."""
    part = file.with_name(file.name + ".part")
    save_file(arrays, part, metadata)
    part.replace(file)


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
        (folder / "rollouts.json").write_text(json.dumps(self.meta, indent=2, sort_keys=True) + "\n")
        names = ("tokens", "offsets", "prompts", "log_probs")
        save(folder / "rollouts.safetensors", {name: getattr(self, name) for name in names})

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


@dataclass(frozen=True)
class NextTokens:
    """The engine's whole next-token distributions at some response tokens; see the module's docstring."""

    at: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def load(cls, folder: Path) -> NextTokens | None:
        """Return what is kept in ``folder``, or None."""
        file = folder / f"{NEXT_TOKENS}.safetensors"
        return cls(**load_file(file)) if file.exists() else None


def start(
    model: str,
    eager: bool,
    length: int = 256,
    seed: int = 0,
    sequences_at_once: int = 64,
    prefix_cache: bool = False,
    logprobs_mode: str = "raw_logprobs",
):
    """Return a vLLM engine in this process.

    Args:
        model: folder of a Transformers checkpoint with a tokenizer.
        eager: ``enforce_eager``; else vLLM compiles the model.
        length: most response tokens per sequence.
        sequences_at_once: most sequences that are decoded together.
        logprobs_mode: vLLM's ``raw_logprobs`` (of the logits as the model gives them) or ``processed_logprobs`` (after
            temperature, top-p and top-k).
    """
    from vllm import LLM

    return LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=length + 256,
        max_num_seqs=sequences_at_once,
        seed=seed,
        enable_prefix_caching=prefix_cache,
        # a prompt is never split: vLLM on a CPU fails on a split one that has a seed ("CPU Generator does not use offset")
        enable_chunked_prefill=False,
        logprobs_mode=logprobs_mode,
        max_logprobs=-1,
    )


def generate(
    engine,
    prompts: list[str],
    tokens: int,
    length: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    **meta,
) -> Rollouts:
    """Return at least ``tokens`` response tokens sampled by a vLLM engine.

    Args:
        engine: as :func:`start` returns it.
        prompts: user messages, cycled over.
        length: most response tokens per sequence.
        temperature: sampling temperature.
        top_p, top_k: probability mass, or number, of the likeliest tokens that are sampled from; 1 and 0 are all.
        seed: of the first sequence; every next one has the next seed.
        meta: what else to remember.
    """
    from vllm import SamplingParams

    tokenizer = engine.get_tokenizer()

    def encode(prompt: str) -> list[int]:
        if tokenizer.chat_template is None:
            return tokenizer.encode(prompt)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer.encode(text, add_special_tokens=False)

    encoded = [encode(prompt) for prompt in prompts]
    sequences, lengths, log_probs, count = [], [], [], 0
    while count < tokens:
        requests = [{"prompt_token_ids": ids} for ids in encoded]
        sampling = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=length,
                logprobs=0,
                seed=seed + len(sequences) + i,
            )
            for i in range(len(encoded))
        ]
        # a sequence keeps its place whatever its length: stopping in mid-batch would favour short responses
        for ids, result in zip(encoded, engine.generate(requests, sampling), strict=True):
            answer = result.outputs[0]
            sequences.append(ids + list(answer.token_ids))
            lengths.append(len(ids))
            log_probs += [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
            count += len(answer.token_ids)
    meta = dict(
        engine="vllm",
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        length=length,
        seed=seed,
        logprobs_mode=engine.llm_engine.model_config.logprobs_mode,
        sequences=len(sequences),
        response_tokens=count,
        versions=report.versions(),
        **meta,
    )
    offsets = np.cumsum([0, *map(len, sequences)])
    return Rollouts(
        tokens=torch.tensor([token for s in sequences for token in s]),
        offsets=torch.from_numpy(offsets),
        prompts=torch.tensor(lengths),
        log_probs=torch.tensor(log_probs, dtype=torch.float32),
        meta=meta,
    )


def prefill(engine, rollouts: Rollouts) -> torch.Tensor:
    """Return the engine's log-probs (responses,) fp32 of the same responses, each sequence given whole as a prompt."""
    from vllm import SamplingParams

    sequences = [rollouts.sequence(i).tolist() for i in range(len(rollouts))]
    sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for i, result in enumerate(engine.generate([{"prompt_token_ids": s} for s in sequences], sampling)):
        first = int(rollouts.prompts[i])
        found += [
            entry[t].logprob for t, entry in zip(sequences[i][first:], result.prompt_logprobs[first:], strict=True)
        ]
    return torch.tensor(found, dtype=torch.float32)


def next_tokens(engine, rollouts: Rollouts, positions: int) -> NextTokens:
    """Return the engine's whole distributions at response tokens spread evenly over all of them.

    The tokens before each one are given as a prompt, and one token is drawn: vLLM returns whole distributions for that.
    """
    from vllm import SamplingParams

    total = int(rollouts.response_offsets[-1])
    at = torch.linspace(0, total - 1, min(positions, total)).round().long().unique()
    owner = np.searchsorted(rollouts.response_offsets, at.numpy(), side="right") - 1
    prompts = []
    for position, i in zip(at.tolist(), owner.tolist(), strict=True):
        end = int(rollouts.prompts[i]) + position - int(rollouts.response_offsets[i])
        prompts.append(rollouts.sequence(i)[:end].tolist())
    sampling = SamplingParams(temperature=1.0, max_tokens=1, logprobs=-1, flat_logprobs=True, detokenize=False)
    rows = []
    for begin in range(0, len(prompts), 32):  # a distribution is a Python list of the vocabulary's size
        requests = [{"prompt_token_ids": ids} for ids in prompts[begin : begin + 32]]
        for result in engine.generate(requests, sampling, use_tqdm=False):
            found = result.outputs[0].logprobs
            ids = torch.tensor(found.token_ids[found.start_indices[0] : found.end_indices[0]])
            values = torch.tensor(found.logprobs[found.start_indices[0] : found.end_indices[0]], dtype=torch.float32)
            row = torch.full((int(ids.max()) + 1,), float("nan"))
            row[ids] = values  # the sampled token stands there twice, with the same value
            assert not row.isnan().any(), "vLLM left tokens of the vocabulary out"
            rows.append(row)
    return NextTokens(at, torch.stack(rows))


def make(
    folder: Path,
    model: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    extras: dict[str, int] | None = None,
    **options,
) -> Rollouts:
    """Return the rollouts in ``folder``, made by vLLM in a process of its own if they are not there.

    Args:
        extras: ``prefill`` (1) and ``next_tokens`` (how many positions): what else to ask the engine about them.
        options: of :func:`generate` and :func:`start`, e.g. length, temperature, seed, sequences_at_once, prefix_cache.

    Raises:
        RuntimeError: vLLM failed; its output is in ``rollouts.log``.
        ValueError: ``folder`` holds rollouts made in another way.
    """
    asked = dict(model=str(model), mode="eager" if eager else "compiled", **options)
    if (folder / "rollouts.safetensors").exists():
        kept = Rollouts.load(folder)
        other = {k: kept.meta.get(k) for k, v in asked.items() if kept.meta.get(k) != v}
        if other or kept.meta["response_tokens"] < tokens:
            raise ValueError(
                f"{folder} holds {kept.meta['response_tokens']} response tokens made with {other or 'these options'}, "
                f"asked for {tokens} with {asked}; choose another folder"
            )
    missing = {name: n for name, n in (extras or {}).items() if n and not (folder / f"{name}.safetensors").exists()}
    if missing or not (folder / "rollouts.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        request = dict(model=str(model), prompts=prompts, tokens=tokens, eager=eager, extras=missing, **options)
        (folder / "request.json").write_text(json.dumps(request))
        with (folder / "rollouts.log").open("w") as log:
            command = [sys.executable, "-m", __spec__.name, str(folder)]
            environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # pinned threads crawl on a shared machine
            status = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
        if status:
            raise RuntimeError(f"vLLM ended with status {status}; see {folder / 'rollouts.log'}")
    return Rollouts.load(folder)


def run(
    folder: Path,
    model: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    extras: dict[str, int],
    length: int = 256,
    seed: int = 0,
    sequences_at_once: int = 64,
    prefix_cache: bool = False,
    logprobs_mode: str = "raw_logprobs",
    **options,
) -> None:
    """Make what is missing in ``folder``; see :func:`make`."""
    engine = start(model, eager, length, seed, sequences_at_once, prefix_cache, logprobs_mode)
    if not (folder / "rollouts.safetensors").exists():
        how = dict(sequences_at_once=sequences_at_once, prefix_cache=prefix_cache)
        how |= dict(model=model, mode="eager" if eager else "compiled")
        generate(engine, prompts, tokens, length=length, seed=seed, **options, **how).save(folder)
    rollouts = Rollouts.load(folder)
    if extras.get(PREFILL):
        save(folder / f"{PREFILL}.safetensors", {"log_probs": prefill(engine, rollouts)})
    if extras.get(NEXT_TOKENS):
        save(folder / f"{NEXT_TOKENS}.safetensors", vars(next_tokens(engine, rollouts, extras[NEXT_TOKENS])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with request.json: the arguments of run()")
    folder = parser.parse_args().folder
    run(folder, **json.loads((folder / "request.json").read_text()))


if __name__ == "__main__":
    main()
