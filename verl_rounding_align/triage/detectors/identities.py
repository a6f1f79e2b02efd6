"""Causes that break an identity of log-probs or of the mask. A few tokens can show them, so that most of these detectors
need no statistics and no minimum of tokens."""

from __future__ import annotations

import numpy as np

from ...logprobs.intervals import per_sequence
from ..facts import Facts
from ..rows import CERTAIN, LIKELY, Explained, Sign, percent
from ..sample import Sample


def missing(sample: Sample | None, facts: Facts) -> Sign | None:
    """Log-probs were not computed, or were copied from the other side.

    A setting says so. Or tokens that count have no finite log-prob. Or one side is zero everywhere, as a field that was
    never filled. Or both sides are equal in every bit for 100 tokens or more, though rollout and trainer run different
    kernels.
    """
    if facts.calculate_log_probs is False:
        return Sign(CERTAIN, "rollout.calculate_log_probs=False: the rollout engine returns no log-probs")
    if facts.bypass:
        return Sign(
            CERTAIN, "rollout_correction.bypass_mode=True: the trainer takes the rollout's log-probs for its own"
        )
    if sample is None:
        return None
    counted = int(sample.whole.mask.sum())
    if sample.whole.missing:
        return Sign(CERTAIN, f"{sample.whole.missing:,} of {counted:,} tokens that count lack a finite log-prob")
    if not len(sample):
        return Sign(CERTAIN, "no token counts: the mask is empty")
    for name, side in (("rollout", sample.rollout), ("trainer", sample.trainer)):
        if not side.any():
            return Explained(CERTAIN, f"every {name} log-prob is exactly 0", np.ones(len(sample), dtype=bool))
    if len(sample) >= 100 and not sample.d.any():
        says = f"rollout and trainer log-probs are equal in every bit for all {len(sample):,} tokens"
        return Explained(LIKELY, says, np.ones(len(sample), dtype=bool))
    return None


def shift(sample: Sample | None, facts: Facts) -> Sign | None:
    """One side's log-probs are moved along the sequence.

    The statistic is mean |rollout[t] - trainer[t + k]| for k from -2 to 2, for each sequence of 8 tokens or more, over at
    least 6 pairs of tokens that are k apart in the response (masked tokens are not skipped over). Without a shift it is
    about 0.04 at k = 0 and about 3 at any other k, as neighbouring tokens have nothing to do with each other. Threshold:
    less than a quarter of its value at k = 0 at another k; the best of four sums of 6 unrelated differences is rarely so
    low. One sequence is enough, or 2 % of them where there are more than 50, if three in four agree on k.
    """
    if sample is None or not len(sample):
        return None
    lengths = np.diff(sample.offsets)
    here = per_sequence(np.abs(sample.d), sample.offsets) / lengths
    best, at = here.copy(), np.zeros(len(here), dtype=int)
    position, last = sample.pairs.positions, len(sample) - 1
    for k in (-2, -1, 1, 2):
        # tokens are in order, so one that is k further in the response lies at most |k| places further here
        other, inside = np.zeros(len(sample)), np.zeros(len(sample), dtype=bool)
        for step in range(int(np.sign(k)), k + int(np.sign(k)), int(np.sign(k))):
            there = np.clip(np.arange(len(sample)) + step, 0, last)
            found = (sample.sequence[there] == sample.sequence) & (position[there] - position == k)
            other, inside = np.where(found, sample.trainer[there], other), inside | found
        pairs = per_sequence(inside, sample.offsets)
        size = per_sequence(np.where(inside, np.abs(sample.rollout - other), 0.0), sample.offsets)
        size /= np.maximum(pairs, 1)
        better = (size < best) & (lengths >= 8) & (pairs >= 6)
        best, at = np.where(better, size, best), np.where(better, k, at)
    moved = (at != 0) & (best < 0.25 * here)
    if moved.sum() < max(1, 0.02 * len(moved)):
        return None
    k = int(np.bincount(at[moved] + 2).argmax()) - 2
    chosen = moved & (at == k)
    if chosen.sum() < 0.75 * moved.sum():
        return None
    return Explained(
        CERTAIN,
        f"in {moved.sum()} of {len(moved)} sequences rollout[t] agrees with trainer[t{k:+d}]: mean |difference| "
        f"{best[chosen].mean():.2g}, {here[chosen].mean():.2g} at the same t",
        moved[sample.sequence],
    )


def padding(sample: Sample | None, facts: Facts) -> Sign | None:
    """Tokens count that are no sampled tokens: padding, tool output, a wrong end.

    (1) A log-prob is above 0. (2) One side is exactly 0 where the other gives p < 0.999, for two such tokens: placeholders.
    Top-p makes exact zeros too, but at every token whose p is above one bound; under top-p, zeros count only where
    p < 0.1. (3) One side repeats one value 3 times or more while the other moves by 0.1.
    """
    if sample is None or not len(sample):
        return None
    r, t = sample.rollout, sample.trainer
    above = np.maximum(r, t) > 1e-3
    bound = np.log(0.1 if one_kept(sample).any() else 0.999)
    zeros = ((r == 0) & (t < bound)) | ((t == 0) & (r < np.log(0.999)))
    same_sequence = np.diff(sample.sequence) == 0
    repeats = np.zeros(len(sample), dtype=bool)
    for a, b in ((r, t), (t, r)):
        pair = same_sequence & (np.diff(a) == 0) & (np.abs(np.diff(b)) > 0.1)
        run = pair[:-1] & pair[1:]
        repeats[:-2] |= run
        repeats[1:-1] |= run
        repeats[2:] |= run
    odd = above | zeros | repeats
    if odd.sum() >= max(2, 2e-4 * len(sample)):
        kinds = {"are above 0": above, "are exactly 0 on one side alone": zeros}
        says = [f"{x.sum():,} {name}" for name, x in kinds.items() if x.any()]
        rest = repeats & ~above & ~zeros
        says += [f"{rest.sum():,} repeat the value before on one side only"] if rest.any() else []
        ends = odd[sample.offsets[1:] - 1].mean()
        where = f"; {percent(ends)} of sequences end in one" if ends > 0.2 else ""
        return Explained(CERTAIN, f"of {len(sample):,} log-probs that count, {', '.join(says)}{where}", odd)
    return None


def one_kept(sample: Sample) -> np.ndarray:
    """Return where top-p kept a single token: rollout exactly 0, trainer not; (tokens,) bool.

    fp32 gives exactly 0 only to p > 1 - 6e-8. The zeros count if they follow one bound on p: among the tokens whose p (the
    trainer's) is above the zeros' lower quartile, four in five must be zeros. Otherwise no token is returned.
    """
    zeros = (sample.rollout == 0) & (sample.trainer < np.log(0.999)) & (sample.trainer > np.log(0.1))
    if zeros.sum() < max(3, 0.002 * len(sample)):
        return np.zeros(len(sample), dtype=bool)
    above = (sample.trainer >= np.quantile(sample.trainer[zeros], 0.25)) & (sample.trainer < np.log(0.999))
    return zeros & bool(zeros[above].mean() > 0.8)


def coarse(sample: Sample | None, facts: Facts) -> Sign | None:
    """Log-probs are kept in 16 bits: every value of one side (50 or more that are not 0) is a bf16 or an fp16 number.

    An fp32 value is a bf16 number with probability 2^-16.
    """
    if sample is None:
        return None
    found = []
    for name, side in (("rollout", sample.rollout), ("trainer", sample.trainer)):
        values = side[side != 0].astype(np.float32)
        if len(values) < 50:
            continue
        if np.mean(values.view(np.uint32) & 0xFFFF == 0) > 0.999:
            found.append(f"every {name} log-prob is a bf16 number: steps of {_step(values, 8)} at the median")
        elif np.mean(values.astype(np.float16).astype(np.float32) == values) > 0.999:
            found.append(f"every {name} log-prob is an fp16 number: steps of {_step(values, 11)} at the median")
    return Sign(CERTAIN, "; ".join(found)) if found else None


def _step(values: np.ndarray, bits: int) -> str:
    """Return the distance between neighbouring numbers of ``bits`` significant bits around the median."""
    return f"{2.0 ** (np.floor(np.log2(np.median(np.abs(values)))) + 1 - bits):.2g}"
