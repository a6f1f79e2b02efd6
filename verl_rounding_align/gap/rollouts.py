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

``python -m verl_rounding_align.gap.rollouts`` runs vLLM in a process of its own, so that the scorer's process never
holds an engine and nothing is left running. Sequence i is sampled with seed ``seed + i``: sequences are independent, and
the same ones come again from an engine that only schedules differently, until a token differs. A round takes the next
``ROUND`` prompts (all, where there are fewer), in order and from the first one again after the last. What is sampled is kept
after each round (``partial/``), and an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ..engines.process import EngineFailed
from ..logprobs.pairs import Pairs
from ..report import rows as report

PREFILL, NEXT_TOKENS = "prefill", "next_tokens"
LENGTH = 256  # most response tokens of a sequence
ROUND = 64  # most prompts of a round


def save(file: Path, arrays: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write safetensors so that a file under its name is a whole one."""
    part = file.with_name(file.name + ".part")
    save_file(arrays, part, metadata)
    part.replace(file)


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's config and weights: of every weight file its size and 64 blocks of 64 KiB.

    A checkpoint that was trained on differs in all of them; a single element changed by hand may not.

    Raises:
        ValueError: no folder with a config.json.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={str(folder)!r}: no folder with a config.json; give that of a Transformers checkpoint")
    found = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json")]):
        size, block = file.stat().st_size, 1 << 16
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as f:
            for i in range(64):
                f.seek(i * max(0, size - block) // 63)
                found.update(f.read(block))
    return found.hexdigest()[:16]


def check_checkpoint(folder: Path, meta: dict, model: str) -> None:
    """Check that a checkpoint is the one that made the rollouts in ``folder``.

    Args:
        meta: of the rollouts.
        model: the checkpoint's folder, wherever it lies now.

    Raises:
        ValueError: it is another one, or the rollouts do not say which one it was.
    """
    now = checkpoint_digest(Path(model))
    if "checkpoint" not in meta:
        raise ValueError(
            f"{folder}: its rollouts do not say which checkpoint made them (those of earlier versions do not), so that "
            "their log-probs cannot be compared with a trainer's; measure anew, with another folder as --out"
        )
    if meta["checkpoint"] != now:
        raise ValueError(
            f"{folder}: its rollouts were made by checkpoint {meta['checkpoint']} (a digest of config and weights), "
            f"model={model!r} is {now} now; give the checkpoint that made them as --model, or measure this one with "
            "another folder as --out"
        )


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
        part = folder / "rollouts.json.part"
        part.write_text(json.dumps(self.meta, indent=2, sort_keys=True) + "\n")
        part.replace(folder / "rollouts.json")
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
    """What has been sampled: sequences, the number of prompt tokens of each, log-probs of all responses."""

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


def digest(prompts: Sequence[str]) -> str:
    """Return a short digest of prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


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
        versions=report.versions(),
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
    progress: Callable[[float, float], None] = lambda done, total: None,
    **options,
) -> Rollouts:
    """Return the rollouts in ``folder``, made by vLLM in a process of its own if they are not there.

    Args:
        extras: ``prefill`` (1) and ``next_tokens`` (how many positions): what else to ask the engine about them.
        progress: called now and then with about how many response tokens there are, and how many there will be. They
            are equal once all are kept and the engine is asked for the extras.
        options: of :func:`generate` and :func:`start`, e.g. length, temperature, seed, sequences_at_once, prefix_cache.

    Raises:
        EngineFailed: vLLM failed; its output is in ``rollouts.log``.
        ValueError: ``folder`` holds rollouts made in another way, or by another checkpoint.
    """
    asked = dict(mode="eager" if eager else "compiled", prompts=digest(prompts), **options)
    _same(folder, str(model), asked, tokens)
    missing = {name: n for name, n in (extras or {}).items() if n and _lacks(folder, name, n)}
    if missing or not (folder / "rollouts.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        request = dict(model=str(model), checkpoint=checkpoint_digest(Path(model)), prompts=prompts, tokens=tokens)
        request |= dict(eager=eager, extras=missing, **options)
        file = folder / "request.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        if {**before, "model": str(model), "extras": missing, "tokens": tokens} != request:
            shutil.rmtree(folder / "partial", ignore_errors=True)  # of another request
        file.write_text(json.dumps(request))
        said = folder / "rollouts.log"
        with said.open("w") as log:
            command = [sys.executable, "-m", __spec__.name, str(folder)]
            environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # pinned threads crawl on a shared machine
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            size, length, ended = min(ROUND, len(prompts)), options.get("length", LENGTH), None
            try:
                while process.poll() is None:
                    time.sleep(1)
                    if (folder / "rollouts.safetensors").exists():
                        total = _meta(folder)["response_tokens"]
                        progress(total, total)
                        continue
                    kept, share = _meta(folder / "partial"), _share(said)
                    n, sequences = kept.get("response_tokens", 0), kept.get("sequences", 0)
                    if share < 1:
                        ended = n
                    elif n != ended:  # the last line is of the round before
                        share = 0.0
                    progress(*_expected(n, sequences, share, tokens, size, length))
            finally:
                process.kill()
        if process.returncode:
            raise EngineFailed.of(process.returncode, said)
    return Rollouts.load(folder)


def _meta(folder: Path) -> dict:
    """Return the ``meta`` of the rollouts in ``folder``, empty if there are none."""
    try:
        return json.loads((folder / "rollouts.json").read_text())
    except FileNotFoundError:
        return {}


def _expected(kept: int, sequences: int, share: float, tokens: int, size: int, length: int) -> tuple[float, float]:
    """Return (done, total): about how many response tokens there are, below 99 % of how many there will be.

    Args:
        kept, sequences: response tokens of whole rounds, and sequences that they are in.
        share: of the responses of the round under way that have ended.
        tokens: asked for.
        size: sequences of a round.
        length: most response tokens of a sequence; assumed as long as no round has ended.
    """
    a_round = size * (kept / sequences if sequences else length)
    total = kept + math.ceil(max(0, tokens - kept) / a_round) * a_round
    return min(kept + share * a_round, 0.99 * total), total


def _share(log: Path) -> float:
    """Return the share of responses that have ended, of the last progress line that vLLM wrote (for display alone); 0 if none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        found = re.findall(rb"Processed prompts:[^\r\n]*?\| (\d+)/(\d+)", file.read())
    return int(found[-1][0]) / max(1, int(found[-1][1])) if found else 0.0


def _lacks(folder: Path, name: str, n: int) -> bool:
    """Return whether an extra is not kept, or for fewer positions than ``n`` and than there are."""
    if not (folder / f"{name}.safetensors").exists():
        return True
    return name == NEXT_TOKENS and len(NextTokens.load(folder).at) < min(n, len(Rollouts.load(folder).log_probs))


def _same(folder: Path, model: str, asked: dict, tokens: int) -> None:
    """Check that rollouts in ``folder``, if there are any, are those that are asked for."""
    if (folder / "rollouts.safetensors").exists():
        kept = Rollouts.load(folder)
        check_checkpoint(folder, kept.meta, model)
        other = {k: kept.meta.get(k) for k, v in asked.items() if kept.meta.get(k) != v}
        if other or kept.meta["response_tokens"] < tokens:
            raise ValueError(
                f"{folder} holds {kept.meta['response_tokens']} response tokens made with {other or 'these options'}, "
                f"asked for {tokens} with {asked}; choose another folder"
            )


def run(
    folder: Path,
    model: str,
    checkpoint: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    extras: dict[str, int],
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
    """Make what is missing in ``folder``; see :func:`make`."""
    from transformers import AutoConfig, AutoTokenizer

    positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    fits = room(encode(AutoTokenizer.from_pretrained(model), prompts), length, positions)
    engine = start(model, eager, length, seed, sequences_at_once, prefix_cache, logprobs_mode, fits, **more)
    if not (folder / "rollouts.safetensors").exists():
        how = dict(sequences_at_once=sequences_at_once, prefix_cache=prefix_cache, **more)
        how |= dict(model=model, checkpoint=checkpoint, mode="eager" if eager else "compiled")
        sampling = dict(length=length, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k)
        partial = folder / "partial"
        kept = Rollouts.load(partial) if (partial / "rollouts.safetensors").exists() else None
        done = generate(engine, prompts, tokens, kept=kept, keep=lambda r: r.save(partial), **sampling, **how)
        done.save(folder)
        shutil.rmtree(partial)
    rollouts = Rollouts.load(folder)
    versions = report.versions()
    other = {k: v for k, v in rollouts.meta["versions"].items() if k.startswith("vllm") and versions.get(k) != v}
    if other:
        raise ValueError(f"{folder} holds rollouts of {other}, this is {versions}; choose another folder")
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
