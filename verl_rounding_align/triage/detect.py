"""Which cause that is *not* rounding explains the mismatch between rollout and trainer log-probs?

Rounding gives u (:mod:`.sample`) one spread for likely and unlikely tokens alike, a mean near zero at every p, and Gaussian
tails. Every fault that is known here breaks one of these, or an identity of the log-probs themselves. The faults are listed
in :mod:`.causes`; how each is seen, with its threshold and the reason for it, stands in :mod:`.detectors`. Absolute size
says little: clean models differ from k3 = 3e-6 (tiny) to 2e-3 nats per token (SmolLM2-135M).

Log-probs cannot tell rounding from weights that differ by less than rounding moves logits (weights that differ by more move
the same token in the same direction everywhere). The digests of weights can: see :mod:`.compare`. ``recipes/triage`` has the
smallest size of each fault that is detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..logprobs.pairs import Pairs
from .causes import CAUSES, SHAPES
from .facts import Facts, of_rollouts
from .rows import LIKELY, NOT_COMPARED, POSSIBLE, ROUNDING, Explained, Finding, interval
from .sample import ENOUGH, FEWEST, Sample

NEXT = "align rounding (`rounding_align=auto`); weights that differ by as little as rounding show in digests alone"


def triage(
    pairs: Pairs | None,
    facts: Facts = Facts(),  # noqa: B008
    found: Sequence[Finding] = (),
    compared: str = "",
) -> list[Finding]:
    """Return the causes that show, the one to look at first in front, ``rounding-sized`` where none does, and then notes.

    Args:
        pairs: log-probs of both sides; None to look at the settings alone.
        facts: what is known beside the log-probs.
        found: what comparisons of weights or RoPE have found; a difference explains the mismatch's shape and size.
        compared: what was compared and is equal, for the evidence of ``rounding-sized``.
    """
    sample = None if pairs is None else Sample(pairs)
    out = [finding for finding in found if finding.cause != NOT_COMPARED]
    notes = [finding for finding in found if finding.cause == NOT_COMPARED]
    beside: list[Finding] = []
    explained = set(SHAPES) if out else set()
    for cause in CAUSES:
        if cause.name in explained:
            continue
        sign = cause.detect(sample, facts)
        if sign is None:
            continue
        kind = notes if cause.note else beside if cause.beside else out
        kind.append(Finding(cause.name, sign.confidence, sign.evidence, cause.next_step))
        explained |= set(cause.explains)
        if isinstance(sign, Explained):
            sample = sample.without(sign.tokens)
            if len(sample) < FEWEST:  # what is left shows nothing: only settings are looked at from here
                sample, explained = None, explained | {"sequence-level-ratio"}
    if not out and (pairs is not None or not beside):
        beside.append(_rounding_sized(sample, compared))
    return [*out, *beside, *notes]


def _rounding_sized(sample: Sample | None, compared: str) -> Finding:
    """Return the finding of a mismatch that nothing but rounding is known to explain."""
    more = f"; {compared}" if compared else ""
    if sample is None:
        return Finding(ROUNDING, POSSIBLE, f"no setting explains a mismatch; no log-probs were given{more}", NEXT)
    if len(sample) < FEWEST:
        says = f"{len(sample):,} tokens are too few to see any cause but those that one token shows{more}"
        return Finding(ROUNDING, POSSIBLE, says, NEXT)
    low = len(sample) < ENOUGH
    return Finding(
        ROUNDING,
        POSSIBLE if low else LIKELY,
        f"k3 = {interval(sample.k3)} nats per token over {len(sample):,} tokens in {len(sample.pairs)} sequences; spread "
        f"of d / (1 - p) {sample.level:.2g} at every p, position and length{more}"
        + (f"; {ENOUGH:,} tokens are needed to see the other causes" if low else ""),
        NEXT,
    )


def triage_rollouts(pairs: Pairs, meta: Mapping, facts: Facts = Facts()) -> list[Finding]:  # noqa: B008
    """Return :func:`triage` of pairs that come from a rollout file, whose ``meta`` says how the engine sampled."""
    return triage(pairs, of_rollouts(meta) | facts)
