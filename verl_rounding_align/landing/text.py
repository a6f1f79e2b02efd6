"""A text in windows of tokens, read as needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

WINDOW = 512  # tokens per forward pass: one layer's tensors of so many tokens are held at a time


def windows(blocks: Iterable[str], tokenizer, tokens: int, length: int = WINDOW) -> Iterator[torch.Tensor]:
    """Yield at most ``tokens`` token ids of a text, int64 (1, up to ``length``) at a time; the text is read as needed.

    Every window begins with the tokenizer's beginning-of-sequence token, if the tokenizer sets one by itself.

    Args:
        blocks: the text in pieces; each piece is tokenized on its own.
        tokenizer: one of Transformers.
    """
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []
    kept = list(start)
    for block in blocks:
        kept += tokenizer(block, add_special_tokens=False, verbose=False).input_ids
        while len(kept) >= length and tokens >= length:
            yield torch.tensor([kept[:length]])
            kept, tokens = start + kept[length:], tokens - length
        if len(kept) >= tokens:
            break
    if kept[:tokens] != start[:tokens]:
        yield torch.tensor([kept[:tokens]])


def read_blocks(path: Path, size: int = 1 << 14) -> Iterator[str]:
    """Yield whole lines of a UTF-8 text file, about ``size`` bytes at a time.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            while lines := file.readlines(size):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ValueError(f"text={str(path)!r}: cannot be read: {reason}") from error
