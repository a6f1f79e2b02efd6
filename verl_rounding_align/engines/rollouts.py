"""What an inference engine generated with fixed weights, and the files that hold it.

A rollout folder holds ``rollouts.safetensors`` (flat arrays) and ``rollouts.json`` (how they were made):

    tokens     int64 (total,)          prompt and response of every sequence, one after another
    offsets    int64 (sequences + 1,)  where each sequence starts
    prompts    int64 (sequences,)      number of prompt tokens of each
    log_probs  float32 (responses,)    the engine's log-prob of every response token, in the same order

and, where asked for, what the same engine says of the same tokens in another way:

    prefill.safetensors      log_probs   float32 (responses,)  every sequence given whole, as a prompt
    next_tokens.safetensors  at          int64 (positions,)    which response tokens, as indices into log_probs
                             log_probs   float32 (positions, vocabulary)  the whole distribution that each was drawn from

While they are made, ``partial/`` holds a folder of the same kind with what there is so far.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

PREFILL, NEXT_TOKENS, PARTIAL = "prefill", "next_tokens", "partial"
LENGTH = 256  # most response tokens of a sequence
ROUND = 64  # most prompts of a round


def save(file: Path, arrays: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write safetensors so that a file under its name is a whole one."""
    part = file.with_name(file.name + ".part")
    save_file(arrays, part, metadata)
    part.replace(file)


def read_json(file: Path) -> dict:
    """Return the mapping in a JSON file.

    Raises:
        ValueError: no JSON in it, or something else than a mapping.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: no JSON in it ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a mapping in it, found {type(found).__name__}")
    return found


def read_arrays(file: Path, *names: str) -> dict[str, torch.Tensor]:
    """Return the arrays in a safetensors file.

    Args:
        names: arrays that it must hold, and no others; none for any.

    Raises:
        ValueError: no safetensors, or other arrays.
    """
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: no safetensors in it ({error})") from error
    if names and set(found) != set(names):
        raise ValueError(f"{file}: expected the arrays {', '.join(names)}, found {', '.join(found) or 'none'}")
    return found


def digest(prompts: Sequence[str]) -> str:
    """Return a short digest of prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


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

    def save(self, folder: Path) -> None:
        """Write both files, each a whole one under its name at any time."""
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
            ValueError: files that were not written by this package, or arrays that do not fit together.
        """
        meta = read_json(folder / "rollouts.json")
        arrays = read_arrays(folder / "rollouts.safetensors", "tokens", "offsets", "prompts", "log_probs")
        out = cls(**arrays, meta=meta)
        if len(out.offsets) != len(out.prompts) + 1:
            raise ValueError(f"{folder}: {len(out.offsets)} offsets for {len(out.prompts)} sequences")
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
        return cls(**read_arrays(file, "at", "log_probs")) if file.exists() else None
