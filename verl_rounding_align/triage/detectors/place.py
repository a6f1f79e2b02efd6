"""Causes that make the mismatch depend on where a token stands: at the edge of a response, late in it, in a long response,
or at a training step."""

from __future__ import annotations

import numpy as np

from ...logprobs import intervals as stats
from ...logprobs.intervals import intervals, per_sequence
from ...logprobs.tally import k3_terms
from ..facts import Facts
from ..rows import LIKELY, POSSIBLE, Explained, Sign
from ..sample import FEWEST, Sample
from .statistics import apart, binomial_tail, slope

GROWTH, SPAN = 0.2, 32  # slope of log |u| on log position; position that one token in ten is beyond
APART = (4, 1.5)  # t, and factor in |u|
CANDIDATES = 5  # changes whose intervals are looked at, the largest first
LEVEL = 0.999  # of the intervals of k3 before and after a change


def edges(sample: Sample | None, facts: Facts) -> Sign | None:
    """Only the first or the last token of responses is off: the mask is one token out, or that token has another context.

    |u| is beyond the 99th percentile of the other tokens in too many sequences (a binomial tail below 1e-9, as for 6 of
    10). Its median is 6 times that of the others (in clean runs, a response's first token is up to twice as noisy as the
    others) and 4 times that of the four tokens beside it. Those are at most 2.5 times as far off as the others, because
    another prompt puts them off too.
    """
    if sample is None or not len(sample):
        return None
    for name, position in (("first", sample.from_start), ("last", sample.from_end)):
        edge = position == 0
        inner, edge = sample.clear & ~edge, sample.clear & edge
        if inner.sum() < FEWEST or edge.sum() < 3 or not sample.level:
            continue
        size = np.abs(sample.u)
        beyond, n = int((size[edge] > np.quantile(size[inner], 0.99)).sum()), int(edge.sum())
        ratio = float(np.median(size[edge]) / np.median(size[inner]))
        beside = sample.clear & (position >= 1) & (position <= 4)
        near = float(np.median(size[beside])) if beside.any() else np.inf
        if np.median(size[edge]) < 4 * near or near > 2.5 * np.median(size[inner]):
            continue
        if binomial_tail(beyond, n, 0.01) < 1e-9 and ratio > 6:
            return Explained(
                LIKELY,
                f"the {name} token of a response differs {ratio:.1f} times as much as others (median |u|, {n} sequences)",
                edge,
            )
    return None


def growth(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch grows with the position in the response.

    The statistic is the slope of log |u| on log(1 + position), without the first token (whose context is the prompt alone),
    where one token in ten is beyond position 32. Rounding accumulates over the context a little: the slope is 0.03 to 0.05
    on clean runs (SmolLM2-135M). Thresholds: 0.2 (the size doubles in 30 times the length), and 5 standard errors.
    """
    if sample is None or sample.clear.sum() < FEWEST:
        return None
    places = sample.pairs.positions[sample.clear]
    inner = places > 0
    if inner.sum() < FEWEST or np.quantile(places, 0.9) < SPAN:
        return None
    x, y = np.log1p(places[inner]), sample.log_size[inner]
    found, error = slope(x, y, sample.sequence[sample.clear][inner])
    if found < GROWTH or found < 5 * error:
        return None
    early, late = (np.exp(y[x < np.median(x)].mean()), np.exp(y[x >= np.median(x)].mean()))
    return Sign(
        LIKELY,
        f"|u| grows as position^{found:.2f} (s.e. {error:.2f}; rounding: 0.03 to 0.05): {late / early:.1f} times larger in the "
        "later half of positions",
    )


def length(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch depends on how long a response is: long ones are scored in another way (cut, chunked, repacked).

    The statistic is :func:`.statistics.apart` from a length on, with 60 tokens. Thresholds: a factor of 1.5 in |u| and a t
    of 4 (the least spread is twice that of a clean run, which makes it 8 of its standard errors, and there are a dozen
    lengths), and no training step that tells the sequences apart as well.
    """
    if sample is None or sample.clear.sum() < FEWEST or len(sample.pairs) < 6:
        return None
    lengths = sample.pairs.positions[sample.offsets[1:] - 1] + 1
    lengths = lengths + (0 if sample.pairs.prompts is None else sample.pairs.prompts)
    best = apart(sample, lengths, "from", 60)
    if best is None or best[0] < APART[0] or best[1] < np.log(APART[1]):
        return None
    by_step = _by_step(sample)
    if by_step is not None and by_step[0] >= best[0]:
        return None
    unit = "tokens with the prompt" if sample.pairs.prompts is not None else "tokens"
    return Sign(
        LIKELY,
        f"|u| is {np.exp(best[1]):.1f} times as large in sequences of {best[2]} {unit} and more (t = {best[0]:.0f}; rounding: no "
        "dependence)",
    )


def steps(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch changes with the training step: at a resume or reload, or without any update.

    The statistic is :func:`.statistics.apart` of the steps from one on, of those before one, and of one step alone, with 200
    tokens. The thresholds are those of ``length``, with a t of 5 for one step alone (there may be a thousand). Or, where few
    tokens move far: mean k3 from a step on (or before it) is more than twice that of the other steps and their 99.9 %
    intervals do not meet, with 1,000 tokens and 12 sequences on both sides.
    """
    if sample is None or sample.pairs.steps is None or sample.clear.sum() < FEWEST:
        return None
    best = _by_step(sample)
    if best is not None:
        says = f"|u| is {np.exp(best[1]):.1f} times as large {best[2]} as in the other steps (t = {best[0]:.0f})"
    else:
        says = _few_tokens(sample)
        if says is None:
            return None
    still = facts.lr == 0
    return Sign(
        LIKELY if still else POSSIBLE,
        says + ("; the learning rate is 0, so no update explains it" if still else ""),
    )


def _by_step(sample: Sample) -> tuple[float, float, str] | None:
    """Return (t, difference in log |u|, which steps in words) where steps tell sequences apart; see :func:`steps`."""
    if sample.pairs.steps is None:
        return None
    seen = []
    for side, where in (("from", "from step {} on"), ("before", "before step {}"), ("at", "at step {}")):
        best = apart(sample, sample.pairs.steps, side, FEWEST)
        if best is not None and best[0] > APART[0] + (side == "at") and best[1] > np.log(APART[1]):
            seen.append((*best[:2], where.format(best[2])))
    return max(seen, default=None)


def _few_tokens(sample: Sample) -> str | None:
    """Return what ``steps`` says where mean k3 changes at a step though the typical size does not; None if it does not."""
    each, found = sample.pairs.steps, []
    k3, tokens = (per_sequence(x, sample.offsets) for x in (k3_terms(sample.d), np.ones(len(sample))))
    values, which = np.unique(each, return_inverse=True)
    sums = np.stack([np.bincount(which, x) for x in (k3, tokens, np.ones(len(each)))])  # (3, steps)
    early, late = np.cumsum(sums, 1)[:, :-1], np.cumsum(sums[:, ::-1], 1)[:, ::-1][:, 1:]
    enough = (np.minimum(early[1], late[1]) >= 1000) & (np.minimum(early[2], late[2]) >= stats.FEWEST)
    for at in np.flatnonzero(enough):
        before, after, start = early[0, at] / early[1, at], late[0, at] / late[1, at], values[at + 1]
        if after > 2 * before:
            found.append((after / max(before, 1e-300), start, True))
        elif before > 2 * after:
            found.append((before / max(after, 1e-300), start, False))
    for ratio, start, rises in sorted(found, key=lambda x: -x[0])[:CANDIDATES]:
        part = (each >= start) == rises
        (_, low, _), (_, _, high) = (intervals([(k3[x], tokens[x])], level=LEVEL)[0] for x in (part, ~part))
        if low > high:
            where = f"from step {start} on" if rises else f"before step {start}"
            return f"k3 is {ratio:.1f} times as large {where} as in the other steps"
    return None
