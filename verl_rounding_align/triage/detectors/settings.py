"""Causes that settings tell, alone or with the size of the mismatch, and how a setting counts beside log-probs."""

from __future__ import annotations

import numpy as np

from ...logprobs.intervals import per_sequence
from ..facts import KNOWN_STRATEGIES, Facts
from ..rows import CERTAIN, POSSIBLE, Sign, percent
from ..sample import ENOUGH, FEWEST, Sample

SPREAD = 0.83  # nats; a product of ratios whose log spreads more has an effective sample size below one half


def by_setting(says: str, sample: Sample | None) -> Sign:
    """Return the sign of a setting: certain, unless there are enough log-probs and they show nothing of it."""
    if sample is None or len(sample) < ENOUGH:
        return Sign(CERTAIN, says)
    return Sign(POSSIBLE, f"{says}; these log-probs show nothing of it: are they of a run with these settings?")


def truncation(facts: Facts) -> str:
    """Return which settings cut tokens off, ``top_p=0.9 and top_k=50``; empty if none does."""
    says = [
        f"top_p={facts.top_p:g}" if facts.top_p not in (None, 1.0) and facts.top_p < 1 else "",
        f"top_k={facts.top_k}" if facts.top_k not in (None, 0, -1) else "",
    ]
    return " and ".join(filter(None, says))


def sampled_elsewhere(sample: Sample | None, facts: Facts) -> Sign | None:
    """A note: both sides' log-probs are of one distribution, but tokens are sampled from another.

    By settings: log-probs are raw, the trainer divides by 1, and sampling is heated or truncated. This causes no mismatch,
    but a policy gradient on such tokens is biased.
    """
    if facts.logprobs_mode != "raw_logprobs" or facts.trainer_temperature != 1:
        return None
    says = [f"temperature={facts.temperature:g}" if facts.temperature not in (None, 1) else "", truncation(facts)]
    says = " and ".join(filter(None, says))
    if not says:
        return None
    return Sign(
        POSSIBLE,
        f"tokens are sampled with {says}; both sides' log-probs are raw, of all tokens at temperature 1: no part of the mismatch",
    )


def sequence_ratio(sample: Sample | None, facts: Facts) -> Sign | None:
    """Ratios are multiplied over a sequence, and the spread of sum(d) makes the product meaningless.

    The effective sample size of weights exp(-sum d), as a share of the sequences, is exp(-spread^2) for Gaussian sums. The
    cause is named where a setting asks for such a product and less than half of the sequences are effective (a spread of
    sum d above 0.83). The spread is sqrt(mean of sum d^2), as if tokens' differences were independent: it is well known from
    a few sequences, where the spread of their sums is not. From 30 sequences on it is the spread of the sums, if that is
    larger.
    """
    if not facts.sequence_ratio:
        return None
    if sample is None or len(sample) < FEWEST:
        return Sign(
            POSSIBLE,
            f"{facts.sequence_ratio}: without {FEWEST} tokens' log-probs the spread of the product is not known",
        )
    spread = float(np.sqrt(per_sequence(sample.d**2, sample.offsets).mean()))
    if len(sample.pairs) >= 30:
        spread = max(spread, float(per_sequence(sample.d, sample.offsets).std(ddof=1)))
    if spread < SPREAD:
        return None
    return Sign(
        CERTAIN,
        f"{facts.sequence_ratio}: sum of d over a sequence spreads by {spread:.2g} nats (mean length "
        f"{len(sample) / len(sample.pairs):.0f}), so the effective sample size is {percent(np.exp(-(spread**2)))} of the "
        "sequences, from rounding alone or not",
    )


def backend(sample: Sample | None, facts: Facts) -> Sign | None:
    """The training backend is one that this package does not align."""
    if facts.strategy is None or facts.strategy in KNOWN_STRATEGIES:
        return None
    return Sign(
        CERTAIN,
        f"actor.strategy={facts.strategy}: alignment works with {', '.join(KNOWN_STRATEGIES)}; nothing is aligned here",
    )
