"""The trainer's log-probs of a rollout's responses, as verl's actor computes them: logits in the model dtype, log-softmax
in fp32. How sequences are laid out in a batch is no part of the model, but it moves its rounding. Therefore it is a choice:

    batched   right-padded, sequences of like length together; what arms are scored in unless another is asked for
    single    one sequence at a time, no padding
    padded    verl without remove_padding: prompts padded on the left, responses on the right
    packed    verl with remove_padding: sequences one after another in one row, told apart by their position_ids
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..logprobs.tally import BATCHED
from .rollouts import NextTokens, Rollouts

LAYOUTS = (BATCHED, "single", "padded", "packed")
BATCH_TOKENS = 2048


def check_layout(layout: str) -> str:
    """Return ``layout``.

    Raises:
        ValueError: it is not one of ``LAYOUTS``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: unknown layout {layout!r}; choose from {', '.join(LAYOUTS)}")
    return layout


@dataclass(frozen=True)
class _Batch:
    """Inputs of one forward, and for every sequence the (row, column of its first token) where it lies."""

    inputs: dict[str, torch.Tensor]
    sequences: list[int]
    at: list[tuple[int, int]]


def _batches(rollouts: Rollouts, layout: str, batch_tokens: int) -> Iterator[_Batch]:
    """Yield batches of at most ``batch_tokens`` tokens, padding included, unless one sequence alone is longer."""
    lengths = (rollouts.offsets[1:] - rollouts.offsets[:-1]).tolist()
    prompts = rollouts.prompts.tolist()
    order = sorted(range(len(rollouts)), key=lambda i: lengths[i])
    while order:
        batch = [order.pop()]

        def width(more: int, batch=batch) -> int:
            """Tokens of one row with sequence ``more`` in the batch."""
            these = [*batch, more]
            if layout == "padded":
                return max(prompts[i] for i in these) + max(lengths[i] - prompts[i] for i in these)
            return sum(lengths[i] for i in these) if layout == "packed" else lengths[batch[0]]

        while order and layout != "single":
            rows = 1 if layout == "packed" else len(batch) + 1
            if rows * width(order[-1]) > batch_tokens:
                break
            batch.append(order.pop())
        if layout == "packed":
            starts = [0]
            for i in batch:
                starts.append(starts[-1] + lengths[i])
            ids = torch.cat([rollouts.sequence(i) for i in batch])[None]
            positions = torch.cat([torch.arange(lengths[i]) for i in batch])[None]
            yield _Batch(dict(input_ids=ids, position_ids=positions), batch, [(0, start) for start in starts[:-1]])
            continue
        wide = width(batch[0])
        first = max(prompts[i] for i in batch)
        at = [(row, first - prompts[i] if layout == "padded" else 0) for row, i in enumerate(batch)]
        ids, mask = torch.zeros(len(batch), wide, dtype=torch.long), torch.zeros(len(batch), wide, dtype=torch.long)
        for (row, column), i in zip(at, batch, strict=True):
            ids[row, column : column + lengths[i]], mask[row, column : column + lengths[i]] = rollouts.sequence(i), 1
        inputs = dict(input_ids=ids, attention_mask=mask)
        if layout == "padded":
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        yield _Batch(inputs, batch, at)


@torch.no_grad()
def score(
    model,
    rollouts: Rollouts,
    layout: str = BATCHED,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] = lambda n: None,
    whole: NextTokens | None = None,
) -> dict[str, torch.Tensor]:
    """Return the model's scores of the rollouts' responses.

    Args:
        layout: of ``LAYOUTS``.
        batch_tokens: most tokens, padding included, per forward.
        progress: called with the number of response tokens done.
        whole: the engine's whole next-token distributions at some responses.

    Returns:
        ``log_probs`` (response tokens,) fp32; with ``whole`` also ``kl`` (engine to trainer), ``kl_reverse`` and
        ``total_variation`` there, each (positions,) fp64, nats (the last one a probability).

    Raises:
        ValueError: no such layout.
    """
    check_layout(layout)
    offsets = rollouts.response_offsets
    out = {"log_probs": torch.empty(int(offsets[-1]), dtype=torch.float32)}
    if whole is not None:
        out |= {n: torch.empty(len(whole.at), dtype=torch.float64) for n in ("kl", "kl_reverse", "total_variation")}
    device = next(model.parameters()).device
    for batch in _batches(rollouts, layout, batch_tokens):
        logits = model(**{name: x.to(device) for name, x in batch.inputs.items()}, use_cache=False).logits
        for (row, column), i in zip(batch.at, batch.sequences, strict=True):
            sequence, first = rollouts.sequence(i), int(rollouts.prompts[i])
            log_probs = logits[row, column + first - 1 : column + len(sequence) - 1].float().log_softmax(-1)
            chosen = log_probs.gather(-1, sequence[first:].to(device)[:, None])[:, 0]
            out["log_probs"][offsets[i] : offsets[i + 1]] = chosen.cpu()
            if whole is not None:
                for n in ((whole.at >= offsets[i]) & (whole.at < offsets[i + 1])).nonzero()[:, 0].tolist():
                    engine = whole.log_probs[n].double()
                    trainer = log_probs[int(whole.at[n]) - int(offsets[i])].double().cpu()
                    p, q = engine.exp(), trainer.exp()
                    # terms are not negative, so that fp32 log-probs that sum to 1 + 1e-7 do not add to a divergence of 1e-6
                    out["kl"][n] = (p * (engine - trainer) - p + q).sum()
                    out["kl_reverse"][n] = (q * (trainer - engine) - q + p).sum()
                    out["total_variation"][n] = (p - q).abs().sum() / 2
            progress(len(chosen))
    return out
