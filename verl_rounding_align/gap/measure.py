"""The gap: the same tokens, the same weights, the engine's log-probs against the trainer's, unaligned and aligned.

d is the rollout's log-prob of a response token minus the trainer's. A row holds k1 = mean d, the paper's estimate of the KL
divergence, which is noisy; k3 = mean(exp(-d) + d - 1), an estimate of it with low variance; and mean and max |d|. Intervals
are clustered by sequence (:mod:`verl_rounding_align.logprobs.intervals`). Comparisons with the unaligned trainer are paired:
they use the same tokens and the same draws.

Beside the gap stands its *floor*: the trainer against itself with sequences laid out in another way, and the engine against
itself scheduled in another way. No alignment can be expected to go below it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..engines.presets import TRAINER, Preset, get
from ..engines.rollouts import read_arrays
from ..logprobs.intervals import Interval, intervals, per_sequence
from ..logprobs.tally import BATCHED, FLOOR, GapRow, Tally, gap_row, k3_terms, tally_row
from ..plan import find_preset
from ..report import rows as report
from ..trainers.huggingface import align
from .arms import NONE, live, plan, points
from .rollouts import PREFILL, NextTokens, Rollouts, checkpoint_digest, save
from .score import check_layout, score

# layouts (:mod:`score`) in which the trainer is compared with itself, but for the one that arms are scored in
FLOORS = {
    "batched": "trainer against itself, batched, padded on the right",
    "single": "trainer against itself, one sequence at a time",
    "padded": "trainer against itself, padded on both sides",
    "packed": "trainer against itself, packed (attention with a block mask)",
}
# engine variants: folder -> (what it is, options of rollout.make)
VARIANTS = {
    "scheduling": ("engine against itself, 8 sequences at a time", {"sequences_at_once": 8}),
    "prefix_cache": ("engine against itself, prompts from a prefix cache", {"prefix_cache": True, "block_size": 32}),
}
PREFILL_ROW = "engine against itself, prefill against decoding"


@dataclass(frozen=True)
class ExactRow:
    """KL divergence of the trainer from the engine over the whole vocabulary, at some positions; nats, 95 % intervals.

    ``k1`` and ``k3`` are the sampled estimates at the same positions. How much noise the exact divergence saves shows in the
    width of its interval against theirs.
    """

    arm: str
    engine: str
    positions: int
    kl: Interval
    kl_reverse: Interval
    total_variation: Interval
    k1: Interval
    k3: Interval
    kl_ratio: Interval


def common(a: Rollouts, b: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (d, offsets, indices): a - b log-probs of the tokens that both drew before the first one that differs.

    The sequences that both have are taken in order, and must have the same prompts. One whose first token differs is left out.
    Tokens at which the draw changed are not compared, so that the largest differences are a little under-represented.

    Returns:
        d: (tokens,) fp64; offsets: (sequences + 1,); indices: (tokens,) of the tokens in ``a.log_probs``.

    Raises:
        ValueError: the prompts of a sequence differ.
    """
    indices, other, lengths = [], [], []
    for i in range(min(len(a), len(b))):
        if not torch.equal(a.sequence(i)[: int(a.prompts[i])], b.sequence(i)[: int(b.prompts[i])]):
            raise ValueError(f"sequence {i} has another prompt: these rollouts do not belong together")
        x, y = a.sequence(i)[int(a.prompts[i]) :], b.sequence(i)[int(b.prompts[i]) :]
        n = min(len(x), len(y))
        differ = (x[:n] != y[:n]).nonzero()
        n = int(differ[0]) if len(differ) else n
        if n:
            lengths.append(n)
            indices.append(a.response_offsets[i] + np.arange(n))
            other.append(b.response_offsets[i] + np.arange(n))
    if not lengths:
        return np.zeros(0), np.zeros(1, np.int64), np.zeros(0, np.int64)
    at = np.concatenate(indices)
    d = a.log_probs.double().numpy()[at] - b.log_probs.double().numpy()[np.concatenate(other)]
    return d, np.concatenate([[0], np.cumsum(lengths)]), at


def _tokens_digest(rollouts: Rollouts) -> str:
    return hashlib.sha256(rollouts.tokens.numpy().tobytes() + rollouts.prompts.numpy().tobytes()).hexdigest()[:16]


class Trainer:
    """Scores of one rollout folder by one checkpoint, arm by arm, kept in the folder: what is there is not done again.

    Arms are scored in one layout, and whole distributions are compared in it. A score is kept with all that it depends on:
    rollouts, checkpoint, rounding points, backend, device, versions. Where any of it differs now, the score is made again.

    Args:
        model: folder of the checkpoint that made the rollouts.
        folder: of the rollouts; every score is a file ``trainer.<points>.<preset>.<layout>.safetensors`` in it.
        backend: see :func:`verl_rounding_align.align`.
        device: where the trainer runs: ``cpu`` or ``cuda``.
        progress: called with the arm and a number of response tokens done.
        layout: of ``score.LAYOUTS``.

    Raises:
        ValueError: no such layout.
    """

    def __init__(
        self,
        model: str,
        rollouts: Rollouts,
        folder: Path,
        backend: str = "auto",
        device: str = "cpu",
        progress: Callable[[str, int], None] = lambda arm, n: None,
        layout: str = BATCHED,
    ):
        self.model, self.rollouts, self.folder, self.layout = model, rollouts, folder, check_layout(layout)
        self.backend, self.device, self.progress = backend, device, progress
        self.whole = NextTokens.load(folder)
        self._loaded = None
        tokens = _tokens_digest(rollouts)
        names = ("torch", "transformers", "verl-rounding-align")
        self._depends = dict(rollouts=tokens, checkpoint=checkpoint_digest(Path(model)), backend=backend, device=device)
        self._depends |= {name: version for name, version in report.versions().items() if name in names}

    def scores(self, arm: str, preset: Preset, layout: str | None = None) -> dict[str, np.ndarray]:
        """Return what :func:`score` returns for an arm, as fp64 arrays.

        Args:
            arm: see :mod:`.arms`.
            preset: of the engine to align to.
            layout: of ``score.LAYOUTS``; None for the trainer's own.

        Raises:
            ValueError: no such arm, or a model whose forward pass does not reach what was aligned.
        """
        layout = layout or self.layout
        chosen = points(arm, preset) & live(preset)
        name = "+".join(sorted(chosen)) or NONE
        file = self.folder / f"trainer.{name}.{preset.name if chosen else NONE}.{layout}.safetensors"
        whole = self.whole if layout == self.layout else None
        wanted = plan(arm, preset)
        how = dict(points="+".join(sorted(chosen)), preset=preset.name if chosen else NONE)
        how["live"] = "+".join(sorted(live(preset))) if chosen else ""
        before = get(TRAINER).points
        moved = {kind: str(r) for kind, r in wanted.roundings if r.points != before[kind]}
        how["depends"] = json.dumps({**self._depends, "roundings": moved}, sort_keys=True)
        kept = _kept(file, how)
        if not kept or (whole is not None and len(kept.get("kl", ())) != len(whole.at)):
            if self._loaded is None:
                from transformers import AutoModelForCausalLM

                self._loaded = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16).eval()
                self._loaded.to(self.device)
            said = arm if layout == self.layout else FLOORS[layout]
            with align(self._loaded, wanted, backend=self.backend) as alignment:
                kept = score(
                    self._loaded, self.rollouts, layout, progress=lambda n: self.progress(said, n), whole=whole
                )
                idle = alignment.idle()
            if idle:
                raise ValueError(
                    f"model={self.model!r}: the forward pass did not reach {len(idle)} modules that were aligned, {idle[0]} "
                    "first; its log-probs are not those of the aligned model"
                )
            save(file, kept, how)
        return {n: x.numpy().astype(np.float64) for n, x in kept.items()}


@contextmanager
def _opened(file: Path) -> Iterator[tuple[dict[str, str], Callable[[str], torch.Tensor], list[str]]]:
    """Open a file of scores; yield (how they were made, name -> tensor, names).

    Raises:
        ValueError: it is damaged, or no file of scores.
    """
    try:
        with safe_open(file, "pt") as kept:
            names = list(kept.keys())
            if "log_probs" not in names:
                raise ValueError(f"{file}: expected scores in it, found {', '.join(names) or 'nothing'}; remove it")
            yield kept.metadata() or {}, kept.get_tensor, names
    except SafetensorError as error:
        raise ValueError(f"{file}: no safetensors in it ({error}); remove it") from error


def _kept(file: Path, how: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return a score that is kept, if it was made as it would be made now; a damaged one is none."""
    if not file.exists():
        return {}
    with suppress(ValueError), _opened(file) as (made, tensor, names):
        return {name: tensor(name) for name in names} if made == how else {}
    return {}


def measure(
    trainer: Trainer, arms: Sequence[str], engine: Preset | str, floors: Sequence[str] = ("single",)
) -> list[GapRow]:
    """Return one row per arm, the unaligned trainer first, then the floors that there are.

    Args:
        arms: values of the key, or points joined with ``+`` (:mod:`arms`); ``none`` is added.
        engine: preset to align to, or its name.
        floors: layouts (``FLOORS``) in which the trainer is compared with itself, less its own layout. The engine is
            compared with itself where the folder holds what it said otherwise (``prefill``, ``VARIANTS``).

    Raises:
        ValueError: an arm that is none.
    """
    preset, rollouts = find_preset(engine), trainer.rollouts
    for arm in arms:
        plan(arm, preset)
    rollout, offsets = rollouts.log_probs.double().numpy(), rollouts.response_offsets
    base = trainer.scores(NONE, preset)["log_probs"]
    unaligned = Tally().add(rollout - base, offsets)
    rows = [tally_row(NONE, NONE, unaligned, unaligned)]
    for arm in arms:
        if arm != NONE:
            tally = Tally().add(rollout - trainer.scores(arm, preset)["log_probs"], offsets)
            rows.append(tally_row(arm, preset.name, tally, unaligned))
    for layout in (other for other in floors if other != trainer.layout):
        tally = Tally().add(trainer.scores(NONE, preset, layout)["log_probs"] - base, offsets)
        rows.append(tally_row(FLOORS[layout], NONE, tally, unaligned, FLOOR))
    return rows + _engine_floors(trainer.folder, rollouts, rollout - base)


def _engine_floors(folder: Path, rollouts: Rollouts, unaligned: np.ndarray) -> list[GapRow]:
    rows, offsets = [], rollouts.response_offsets
    if (folder / f"{PREFILL}.safetensors").exists():
        other = read_arrays(folder / f"{PREFILL}.safetensors", "log_probs")["log_probs"].double().numpy()
        if len(other) != len(unaligned):
            raise ValueError(
                f"{folder}: {len(other)} log_probs in {PREFILL}.safetensors for {len(unaligned)} response tokens"
            )
        rows.append(gap_row(PREFILL_ROW, NONE, rollouts.log_probs.double().numpy() - other, unaligned, offsets, FLOOR))
    for name, (title, _) in VARIANTS.items():
        if (folder / name / "rollouts.safetensors").exists():
            again = Rollouts.load(folder / name)
            d, its_offsets, at = common(rollouts, again)
            if len(d) and again.meta.get("cached_prompt_tokens") != 0:  # 0: prompts shorter than a block of the cache
                rows.append(gap_row(title, NONE, d, unaligned[at], its_offsets, FLOOR))
    return rows


def exact(trainer: Trainer, arms: Sequence[str], engine: Preset | str) -> list[ExactRow]:
    """Return the KL divergence over the whole vocabulary of each arm, ``none`` first; empty without whole distributions."""
    preset, rollouts, whole = find_preset(engine), trainer.rollouts, trainer.whole
    if whole is None:
        return []
    at = whole.at.numpy()
    owner = np.searchsorted(rollouts.response_offsets, at, side="right") - 1
    offsets = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1, [len(at)]])
    n = per_sequence(np.ones(len(at)), offsets)
    rows, base = [], None
    for arm in [NONE, *(a for a in arms if a != NONE)]:
        found = trainer.scores(arm, preset)
        d = rollouts.log_probs.double().numpy()[at] - found["log_probs"][at]
        terms = (found["kl"], found["kl_reverse"], found["total_variation"], d, k3_terms(d))
        sums = [per_sequence(x, offsets) for x in terms]
        base = sums[0] if base is None else base
        *each, ratio = intervals([*((x, n) for x in sums), (sums[0], base)])
        rows.append(ExactRow(arm, NONE if arm == NONE else preset.name, len(at), *each, ratio))
    return rows


@dataclass(frozen=True)
class Kept:
    """Scores of one preset that :class:`Trainer` has kept: set of points moved -> log-probs in fp64."""

    scores: dict[frozenset[str], np.ndarray]
    live: frozenset[str]  # points at which trainer and engine differ


def _basis(how: dict[str, str]) -> dict[str, str]:
    """Return what a score was made from and with, but for where the trainer rounded."""
    return {name: x for name, x in json.loads(how.get("depends", "{}")).items() if name != "roundings"}


def kept_scores(folder: Path, layout: str = BATCHED) -> dict[str, Kept]:
    """Return preset's name -> what :class:`Trainer` has kept for it in a layout; the unaligned scores are in each.

    Scores of other rollouts, another checkpoint, backend, device or version than the unaligned trainer's are left out.

    Raises:
        ValueError: a damaged file.
    """
    found: dict[str, Kept] = {}
    unaligned = folder / f"trainer.{NONE}.{NONE}.{layout}.safetensors"
    if not unaligned.exists():
        return {}
    with _opened(unaligned) as (how, _, _):
        basis = _basis(how)
    for file in sorted(folder.glob(f"trainer.*.{layout}.safetensors")):
        with _opened(file) as (how, tensor, _):
            if _basis(how) != basis:
                continue
            moved, its_live = (frozenset(filter(None, how[name].split("+"))) for name in ("points", "live"))
            one = found.setdefault(how["preset"], Kept({}, its_live))
            one.scores[moved] = tensor("log_probs").double().numpy()
    none = found.pop(NONE)
    return {preset: Kept({**none.scores, **one.scores}, one.live) for preset, one in found.items()}


def unaligned_scores(folder: Path, rollouts: Rollouts, layout: str = BATCHED) -> np.ndarray | None:
    """Return the log-probs (responses,) fp32 that :class:`Trainer` has kept of the unaligned trainer; None if there are none.

    Raises:
        ValueError: they are of other rollouts, or of another checkpoint.
    """
    file = folder / f"trainer.{NONE}.{NONE}.{layout}.safetensors"
    if not file.exists():
        return None
    with _opened(file) as (how, tensor, _):
        its = _basis(how)
        wanted = {"rollouts": _tokens_digest(rollouts), "checkpoint": rollouts.meta.get("checkpoint")}
        other = [name for name, value in wanted.items() if value and its.get(name, value) != value]
        if other:
            raise ValueError(
                f"{file}: scores of other {' and '.join(other)} than the folder's; "
                f"run `verl-rounding-align gap score {folder.parent}`"
            )
        return tensor("log_probs").numpy()
