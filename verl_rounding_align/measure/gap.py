"""The gap: the same tokens, the same weights, the engine's log-probs against the trainer's, unaligned and aligned.

Per response token d = rollout log-prob - trainer log-prob. k1 = mean d (the paper's estimate of the KL divergence, with
much noise), k3 = mean(exp(-d) + d - 1) (its low-variance estimate), mean and max |d|. Intervals are bootstrapped over
sequences; comparisons with the unaligned trainer are paired: the same tokens, the same draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .. import report
from ..patch import align
from ..plan import find_preset, parse_plan
from ..presets import Preset
from ..regions import GROUPS
from .rollout import Rollouts
from .stats import intervals, per_sequence

NONE = "none"
SELF = "trainer against itself, one sequence at a time"
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class GapRow:
    """One trainer variant against one set of log-probs; intervals are 95 %, in nats per token.

    ``k3_change`` is this row's k3 minus the unaligned trainer's, ``k3_ratio`` their ratio; both paired.
    """

    arm: str
    engine: str
    tokens: int
    sequences: int
    k1: tuple[float, float, float]
    k3: tuple[float, float, float]
    abs_mean: tuple[float, float, float]
    abs_max: float
    k3_change: tuple[float, float, float]
    k3_ratio: tuple[float, float, float]


def k3_terms(difference: np.ndarray) -> np.ndarray:
    """Return exp(-d) + d - 1 per token, d = rollout - trainer, without cancellation for small d."""
    return np.expm1(-difference) + difference


def gap_row(arm: str, engine: str, d: np.ndarray, d0: np.ndarray, offsets: np.ndarray) -> GapRow:
    """Return the row of one trainer variant.

    Args:
        d, d0: (response tokens,) rollout minus trainer log-prob of this variant, and of the unaligned trainer.
        offsets: (sequences + 1,) where each sequence's responses start.
    """
    n = per_sequence(np.ones_like(d), offsets)
    k3, k3_base = per_sequence(k3_terms(d), offsets), per_sequence(k3_terms(d0), offsets)
    k1, size = per_sequence(d, offsets), per_sequence(np.abs(d), offsets)
    ratios = [(k1, n), (k3, n), (size, n), (k3 - k3_base, n), (k3, k3_base)]
    k1, k3, abs_mean, k3_change, k3_ratio = intervals(ratios)
    return GapRow(arm, engine, len(d), len(n), k1, k3, abs_mean, float(np.abs(d).max()), k3_change, k3_ratio)


@torch.no_grad()
def score(
    model, rollouts: Rollouts, batch_tokens: int = 2048, progress: Callable[[int], None] = lambda n: None
) -> torch.Tensor:
    """Return the model's log-probs (response tokens,) fp32 of the rollouts' responses, as verl's actor computes them.

    Sequences are right-padded and batched by length; logits in the model dtype, log-softmax in fp32.

    Args:
        batch_tokens: most tokens, padding included, per forward.
        progress: called with the number of response tokens done.
    """
    offsets = rollouts.response_offsets
    out = torch.empty(int(offsets[-1]), dtype=torch.float32)
    lengths = (rollouts.offsets[1:] - rollouts.offsets[:-1]).tolist()
    order = sorted(range(len(rollouts)), key=lambda i: lengths[i])
    while order:
        batch = [order.pop()]
        while order and (len(batch) + 1) * lengths[batch[0]] <= batch_tokens:
            batch.append(order.pop())
        width = lengths[batch[0]]
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : lengths[i]], mask[row, : lengths[i]] = rollouts.sequence(i), 1
        device = next(model.parameters()).device
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        for row, i in enumerate(batch):
            first = int(rollouts.prompts[i])
            responses = rollouts.sequence(i)[first:].to(device)
            log_probs = logits[row, first - 1 : lengths[i] - 1].float().log_softmax(-1)
            out[offsets[i] : offsets[i + 1]] = log_probs.gather(-1, responses[:, None])[:, 0].cpu()
            progress(len(responses))
    return out


def measure(
    model: str,
    rollouts: Rollouts,
    arms: Sequence[str],
    engine: Preset | str,
    folder: Path,
    backend: str = "auto",
    progress: Callable[[str, int], None] = lambda arm, n: None,
) -> list[GapRow]:
    """Return one row per arm, the unaligned trainer first, then the trainer against itself at another batch size.

    Log-probs of each arm are kept in ``folder``; an interrupted run goes on where it stopped.

    Args:
        model: folder of the checkpoint that made the rollouts.
        arms: values of the key, e.g. ``rope``, ``rope+carry``; ``none`` is added.
        engine: preset to align to, or its name.
        backend: see :func:`verl_rounding_align.align`.
    """
    from transformers import AutoModelForCausalLM

    loaded = None

    def log_probs(arm: str, batch_tokens: int) -> np.ndarray:
        nonlocal loaded
        file = folder / f"trainer.{arm}.{NONE if arm == NONE else preset.name}.{batch_tokens}.safetensors"
        if not file.exists():
            if loaded is None:
                loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
            alignment = align(loaded, parse_plan(arm, engine=preset), backend=backend)
            scores = score(loaded, rollouts, batch_tokens, lambda n: progress(arm, n))
            assert not alignment.idle(), alignment.idle()
            alignment.undo()
            save_file({"log_probs": scores}, str(file) + ".part")
            Path(str(file) + ".part").replace(file)
        return load_file(file)["log_probs"].numpy().astype(np.float64)

    preset = find_preset(engine)
    for arm in arms:
        parse_plan(arm, engine=preset)
    folder.mkdir(parents=True, exist_ok=True)
    rollout, offsets = rollouts.log_probs.numpy().astype(np.float64), rollouts.response_offsets
    base = log_probs(NONE, BATCH_TOKENS)
    unaligned = rollout - base
    rows = [gap_row(NONE, NONE, unaligned, unaligned, offsets)]
    for arm in arms:
        if arm != NONE:
            rows.append(gap_row(arm, preset.name, rollout - log_probs(arm, BATCH_TOKENS), unaligned, offsets))
    rows.append(gap_row(SELF, NONE, log_probs(NONE, 1) - base, unaligned, offsets))
    return rows


def kept_scores(folder: Path) -> tuple[dict[frozenset[str], np.ndarray], str]:
    """Return (set of groups -> the trainer's log-probs in fp64, the preset's name) that :func:`measure` left in a folder.

    Raises:
        ValueError: scores of several presets.
    """
    pattern = re.compile(rf"trainer\.(.+)\.([^.]+)\.{BATCH_TOKENS}\.safetensors")
    files = [(m, file) for file in sorted(folder.iterdir()) if (m := pattern.fullmatch(file.name))]
    names = sorted({m[2] for m, _ in files} - {NONE})
    if len(names) > 1:
        raise ValueError(
            f"{folder}: scores of several presets, {', '.join(names)}; measure them in folders of their own"
        )
    scores = {}
    for m, file in files:
        groups = frozenset() if m[1] == NONE else frozenset(m[1].split("+"))
        if groups <= set(GROUPS):
            scores[groups] = load_file(file)["log_probs"].numpy().astype(np.float64)
    return scores, names[0] if names else NONE


def every_subset() -> list[str]:
    """Return all non-empty subsets of the groups, as values of the key."""
    names = list(GROUPS)
    return ["+".join(g for i, g in enumerate(names) if mask >> i & 1) for mask in range(1, 2 ** len(names))]


def render(rows: Sequence[GapRow], title: str):
    """Return a rich table of the rows, in units of 1e-4 nats per token."""

    def unit(x):
        return f"{1e4 * x[0]:.2f} [{1e4 * x[1]:.2f}, {1e4 * x[2]:.2f}]"

    columns = ("arm", "k1", "k3", "k3 change, paired", "k3 ratio, paired", "mean |d|", "max |d|")
    cells = [
        (
            r.arm,
            unit(r.k1),
            unit(r.k3),
            unit(r.k3_change) if r.arm not in (NONE, SELF) else "",
            f"{r.k3_ratio[0]:.3f} [{r.k3_ratio[1]:.3f}, {r.k3_ratio[2]:.3f}]" if r.arm != NONE else "",
            unit(r.abs_mean),
            f"{1e4 * r.abs_max:.0f}",
        )
        for r in rows
    ]
    return report.table(f"{title}; 1e-4 nats per token, 95 % intervals over sequences", columns, cells)


def as_json(rows: Sequence[GapRow]) -> list[dict]:
    """Return the rows as plain data."""
    return [asdict(row) for row in rows]
