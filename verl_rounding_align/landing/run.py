"""``verl-rounding-align landing``: the command."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from ..report import progress as bars
from ..report import rows as report
from .measure import landing
from .render import render
from .rows import Landing, as_json
from .text import read_blocks, windows


def run_landing(model: str, text: Path | None, tokens: int, window: int, json: str | None) -> Landing:
    """Measure, print and write; see the command's help for the arguments.

    Raises:
        ValueError: an argument that is not legal, a model that is not there, or a text without tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..engines.spec import ModelSpec

    if tokens < 1:
        raise ValueError(f"tokens={tokens}: expected at least 1")
    ModelSpec.from_model(model)
    longest = AutoConfig.from_pretrained(model).max_position_embeddings
    if not 2 <= window <= longest:
        raise ValueError(f"window={window}: expected 2 to {longest}, the positions that the model has")
    with resources.as_file(resources.files(__package__) / "opticks.txt") as default:
        path = default if text is None else text
        if not any(block.strip() for block in read_blocks(path)):
            raise ValueError(f"text={str(path)!r}: no text in it")
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        except OSError as error:
            raise ValueError(f"model={model!r}: cannot be loaded: {str(error).splitlines()[0]}") from error
        loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
        with bars.progress() as display, bars.follow(display, "tokens") as tell:
            found = landing(
                loaded, windows(read_blocks(path), tokenizer, tokens, window), lambda done: tell(done, tokens)
            )
    name = Path(path).name
    report.show(
        render(found, f"{Path(model).name}, {found.tokens:,} tokens of {name} in windows of {window}"),
        *map("not seen: {}".format, found.absent),
    )
    if json:
        report.write_json(json, {"model": Path(model).name, "text": name, "window": window, **as_json(found)})
    return found
