"""The landing score of every quantity of a model on a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import nn

from ..trainers.huggingface import find_base_models
from .quantities import QUANTITIES
from .rows import Landing, LandingRow
from .score import Counts, floor
from .watch import watch


def landing(
    model: nn.Module, batches: Iterable[torch.Tensor], progress: Callable[[int], None] = lambda n: None
) -> Landing:
    """Return the landing score (:mod:`.score`) of every quantity in ``model`` on these tokens.

    Args:
        model: a Transformers model of a supported family, in bf16 and unpatched. It runs in eval mode; every module gets its
            own mode back, whatever happens.
        batches: token ids, int64 (batch, tokens), without padding. They are read one by one and none is kept.
        progress: called with the number of tokens done so far.

    Raises:
        ValueError: see :func:`.watch.watch`; or there are no tokens.
    """
    counts: dict[tuple[str, int], Counts] = defaultdict(Counts)
    tokens, modes = 0, {module: module.training for module in model.modules()}
    ((_, stack, _),) = find_base_models(model)
    device = next(stack.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), watch(stack, lambda q, i, x: counts[q, i].add(x)) as (expected, absent):
            for ids in batches:
                stack(input_ids=ids.to(device), use_cache=False)
                tokens += ids.numel()
                progress(tokens)
    finally:
        for module, training in modes.items():
            module.training = training
    if not tokens:
        raise ValueError("landing: no tokens to measure on")
    unseen = defaultdict(list)
    for quantity, i in sorted(expected - counts.keys()):
        unseen[quantity].append(str(i))
    absent += [f"{quantity}: its module did not run in layers {', '.join(ls)}" for quantity, ls in unseen.items()]
    rows = (_row(q, {i: c for (name, i), c in sorted(counts.items()) if name == q}) for q in QUANTITIES)
    return Landing(tuple(row for row in rows if row is not None), tuple(absent), tokens)


def _row(quantity: str, layers: dict[int, Counts]) -> LandingRow | None:
    """Return the row of a quantity from its counts by layer, None if no layer has it."""
    if not layers:
        return None
    scores = {i: counts.score() for i, counts in layers.items()}
    pictured = sorted(layers)[len(layers) // 2]
    values = min(counts.values for counts in layers.values())
    return LandingRow(
        quantity=quantity,
        kind=QUANTITIES[quantity].kind,
        point=QUANTITIES[quantity].point,
        score=median(scores.values()),
        floor=floor(values),
        values=values,
        nonfinite=sum(counts.nonfinite for counts in layers.values()),
        layers=tuple(scores),
        scores=tuple(scores.values()),
        pictured=pictured,
        histogram=tuple(layers[pictured].histogram()),
    )
