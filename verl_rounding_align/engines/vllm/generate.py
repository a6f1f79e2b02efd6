"""The half of a measurement that runs inside vLLM's process: sample responses, and ask for log-probs in other ways.

``python -m verl_rounding_align.engines.vllm.generate FOLDER`` makes what is missing in a folder (:mod:`..rollouts`), as its
``request.json`` asks. Sequence i is sampled with seed ``seed + i``: sequences are independent, and the same ones come again
from an engine that only schedules differently, until a token differs. A round takes the next ``ROUND`` prompts (all, where
there are fewer), in order and from the first one again after the last. What is sampled is kept after each round, and an
interrupted run goes on there.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..rollouts import LENGTH, NEXT_TOKENS, PARTIAL, PREFILL, ROUND, NextTokens, Rollouts, digest, save


def start(
    model: str,
    eager: bool,
    length: int = LENGTH,
    seed: int = 0,
    sequences_at_once: int = 64,
    prefix_cache: bool = False,
    logprobs_mode: str = "raw_logprobs",
    max_model_len: int | None = None,
    **engine,
):
    """Return a vLLM engine in this process.

    Args:
        model: folder of a Transformers checkpoint with a tokenizer.
        eager: ``enforce_eager``; else vLLM compiles the model.
        length: most response tokens per sequence.
        sequences_at_once: most sequences that are decoded together.
        logprobs_mode: vLLM's ``raw_logprobs`` (of the logits as the model gives them) or ``processed_logprobs`` (after
            temperature, top-p and top-k).
        max_model_len: most tokens of a sequence; None for ``length`` and a prompt of 256.
        engine: any other argument of ``vllm.LLM``.
    """
    from vllm import LLM

    return LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=max_model_len or length + 256,
        max_num_seqs=sequences_at_once,
        seed=seed,
        enable_prefix_caching=prefix_cache,
        # a prompt is never split: vLLM on a CPU fails on a split one that has a seed ("CPU Generator does not use offset")
        enable_chunked_prefill=False,
        logprobs_mode=logprobs_mode,
        max_logprobs=-1,
        **engine,
    )


@dataclass
class _Sampled:
    """What has been sampled so far: sequences, the number of prompt tokens of each, and the log-probs of all responses."""

    sequences: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def rollouts(self, meta: dict) -> Rollouts:
        return Rollouts(
            tokens=torch.tensor([token for s in self.sequences for token in s]),
            offsets=torch.from_numpy(np.cumsum([0, *map(len, self.sequences)])),
            prompts=torch.tensor(self.prompts),
            log_probs=torch.tensor(self.log_probs, dtype=torch.float32),
            meta={**meta, "sequences": len(self.sequences), "response_tokens": len(self.log_probs)},
        )

    @classmethod
    def of(cls, kept: Rollouts) -> _Sampled:
        sequences = [kept.sequence(i).tolist() for i in range(len(kept))]
        return cls(sequences, kept.prompts.tolist(), kept.log_probs.tolist())


def encode(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of user messages, in the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def room(prompts: Sequence[list[int]], length: int, positions: int | None) -> int:
    """Return the ``max_model_len`` of an engine for these prompts' tokens and ``length`` response tokens.

    Args:
        positions: what the model has; None if that is not known.

    Raises:
        ValueError: a prompt that does not fit.

    >>> room([[1] * 20], 256, 8192), room([[1] * 900], 256, 8192)
    (512, 1157)
    """
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    needed = len(prompts[longest]) + length + 1  # one more is drawn after a sequence that is given whole
    if positions is not None and needed > positions:
        raise ValueError(
            f"prompt {longest + 1} of {len(prompts)} has {len(prompts[longest])} tokens: with length={length} at most "
            f"{positions - length - 1} fit the model's {positions} positions"
        )
    return max(needed, min(length + 256, positions or length + 256))


def generate(
    engine,
    prompts: list[str],
    tokens: int,
    length: int = LENGTH,
    temperature: float = 1.0,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    kept: Rollouts | None = None,
    keep: Callable[[Rollouts], None] = lambda rollouts: None,
    versions: Mapping[str, str] | None = None,
    **meta,
) -> Rollouts:
    """Return at least ``tokens`` response tokens sampled by a vLLM engine.

    Args:
        engine: as :func:`start` returns it.
        prompts: user messages, cycled over; whole rounds, so that short responses are not favoured.
        length: most response tokens per sequence.
        temperature: sampling temperature.
        top_p, top_k: probability mass, or number, of the likeliest tokens that are sampled from; 1 and 0 are all.
        seed: of the first sequence; every next one has the next seed.
        kept: rounds that were sampled before, in the same way; sampling goes on after them.
        keep: called after each round with everything sampled so far.
        versions: package -> release, to remember.
        meta: what else to remember.
    """
    from vllm import SamplingParams

    encoded = encode(engine.get_tokenizer(), prompts)
    config = engine.llm_engine.vllm_config
    meta = dict(
        engine="vllm",
        device=config.device_config.device_type,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        length=length,
        seed=seed,
        logprobs_mode=config.model_config.logprobs_mode,
        prompts=digest(prompts),
        versions=dict(versions or {}),
        **meta,
    )
    done = _Sampled.of(kept) if kept is not None else _Sampled()
    cached = 0
    if config.cache_config.enable_prefix_caching:  # once, so that every prompt of every round finds its blocks
        engine.generate([{"prompt_token_ids": ids} for ids in encoded], SamplingParams(max_tokens=1))
    while len(done.log_probs) < tokens:
        first = len(done.sequences)
        turn = [encoded[(first + i) % len(encoded)] for i in range(min(ROUND, len(encoded)))]
        sampling = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=length,
                logprobs=0,
                seed=seed + first + i,
            )
            for i in range(len(turn))
        ]
        requests = [{"prompt_token_ids": ids} for ids in turn]
        for ids, result in zip(turn, engine.generate(requests, sampling), strict=True):
            answer = result.outputs[0]
            done.sequences.append(ids + list(answer.token_ids))
            done.prompts.append(len(ids))
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                done.log_probs.append(entry[token].logprob)
            cached += result.num_cached_tokens or 0
        keep(done.rollouts(meta))
    if config.cache_config.enable_prefix_caching:
        meta["cached_prompt_tokens"] = cached
    return done.rollouts(meta)


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
            if row.isnan().any():
                raise RuntimeError(f"vLLM left {int(row.isnan().sum())} of {len(row)} tokens of the vocabulary out")
            rows.append(row)
    return NextTokens(at, torch.stack(rows))


def run(
    folder: Path,
    model: str,
    checkpoint: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    extras: dict[str, int],
    versions: dict[str, str],
    length: int = LENGTH,
    seed: int = 0,
    sequences_at_once: int = 64,
    prefix_cache: bool = False,
    logprobs_mode: str = "raw_logprobs",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    **more,
) -> None:
    """Make what is missing in ``folder``: rollouts, prefill, whole distributions.

    Args:
        checkpoint: digest of the model's weights, to remember.
        extras: ``prefill`` (1) and ``next_tokens`` (how many positions): what else to ask the engine.
        versions: package -> release, to remember.
        more: other arguments of ``vllm.LLM``; the rest is as in :func:`start` and :func:`generate`.

    Raises:
        ValueError: a prompt that does not fit the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    fits = room(encode(AutoTokenizer.from_pretrained(model), prompts), length, positions)
    engine = start(model, eager, length, seed, sequences_at_once, prefix_cache, logprobs_mode, fits, **more)
    if not (folder / "rollouts.safetensors").exists():
        how = dict(sequences_at_once=sequences_at_once, prefix_cache=prefix_cache, versions=versions, **more)
        how |= dict(model=model, checkpoint=checkpoint, mode="eager" if eager else "compiled")
        sampling = dict(length=length, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k)
        partial = folder / PARTIAL
        kept = Rollouts.load(partial) if (partial / "rollouts.safetensors").exists() else None
        done = generate(engine, prompts, tokens, kept=kept, keep=lambda r: r.save(partial), **sampling, **how)
        done.save(folder)
        shutil.rmtree(partial)
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
