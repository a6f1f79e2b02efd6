"""The tokens of a dump as the detectors look at them.

Per token, d = rollout log-prob - trainer log-prob, and p is the probability halfway between the two (their geometric
mean). Rounding moves logits by noise of one size, whatever the token is. So d is noise of size s (1 - p), and

    u = d / (1 - p)

has one spread s for likely and unlikely tokens alike, a mean near zero at every p, and Gaussian tails.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from ..logprobs.intervals import intervals, per_sequence
from ..logprobs.pairs import Pairs
from ..logprobs.tally import k3_terms

FEWEST = 200  # with fewer tokens only identities are tested, no statistics
ENOUGH = 2000  # with so many tokens, faults of the sizes in recipes/triage show


class Sample:
    """The tokens that count and have two finite log-probs, with what the detectors read of them.

    Args:
        pairs: a dump, or a part of one.

    Attributes:
        whole: the pairs as they were given; ``pairs`` has only the tokens that count and are finite.
        first: (tokens,) bool, see :func:`first_of_context`.
        rollout, trainer: (tokens,) fp64 log-probs.
        offsets: (sequences + 1,) int64, where each sequence starts.
        from_start, from_end: (tokens,) distance to the first and to the last token of the response that counts.
    """

    def __init__(self, pairs: Pairs):
        self.whole, self.pairs = pairs, pairs.valid()
        self.first = first_of_context(pairs)
        self.rollout, self.trainer, self.offsets = self.pairs.rollout, self.pairs.trainer, self.pairs.offsets
        lengths, place = np.diff(self.offsets), self.pairs.positions
        self.from_start = place - np.repeat(place[self.offsets[:-1]], lengths)
        self.from_end = np.repeat(place[self.offsets[1:] - 1], lengths) - place

    def without(self, tokens: np.ndarray) -> Sample:
        """Return the sample without some tokens, (tokens,) bool; the others keep their distances to start and end."""
        rest = Sample(replace(self.pairs, mask=self.pairs.mask & ~tokens))
        rest.from_start, rest.from_end = self.from_start[~tokens], self.from_end[~tokens]
        rest.first = self.first[~tokens]
        return rest

    def __len__(self) -> int:
        return len(self.rollout)

    @cached_property
    def d(self) -> np.ndarray:
        """Rollout minus trainer log-prob, nats; (tokens,)."""
        return self.rollout - self.trainer

    @cached_property
    def p(self) -> np.ndarray:
        """Probability halfway between the two sides; (tokens,)."""
        return np.exp(np.minimum((self.rollout + self.trainer) / 2, 0.0))

    @cached_property
    def clear(self) -> np.ndarray:
        """Tokens that statistics of u are taken of; (tokens,) bool.

        For them 1 - p is well above what fp32 resolves in a log-prob near zero (1e-6), and they are no second copy of
        another token (:func:`first_of_context`).
        """
        return (self.p < 0.999) & self.first

    @cached_property
    def u(self) -> np.ndarray:
        """d / (1 - p); (tokens,)."""
        return self.d / np.maximum(1 - self.p, 1e-3)

    @cached_property
    def level(self) -> float:
        """Spread of u, from the median of |u|; the factor 1.4826 makes it a standard deviation for Gaussian noise."""
        size = np.abs(self.u[self.clear])
        return 1.4826 * float(np.median(size)) if len(size) else 0.0

    @cached_property
    def log_size(self) -> np.ndarray:
        """log |u| of the clear tokens, not below that of a hundredth of the spread; (clear tokens,).

        For Gaussian noise its standard deviation is 1.1.
        """
        return np.log(np.maximum(np.abs(self.u[self.clear]), 0.01 * max(self.level, 1e-300)))

    @cached_property
    def k3(self) -> tuple[float, float, float]:
        """k3 in nats per token, with its 95 % interval."""
        tokens = per_sequence(np.ones(len(self)), self.offsets)
        return intervals([(per_sequence(k3_terms(self.d), self.offsets), tokens)])[0]

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence that each token is in; (tokens,)."""
        return np.repeat(np.arange(len(self.pairs)), np.diff(self.offsets))


def first_of_context(pairs: Pairs) -> np.ndarray:
    """Return which of the tokens that count are the first with their context; (tokens,) bool, all of them without ids.

    Answers of one group (GRPO) often begin alike. The same context gives the same d again, which is no second
    observation. A context is recognised by the sum of 64-bit hashes of (token, place) up to and including the token, and
    by the prompt's length.
    """
    keep = pairs.mask & np.isfinite(pairs.rollout) & np.isfinite(pairs.trainer)
    if pairs.ids is None or not keep.any():
        return np.ones(int(keep.sum()), dtype=bool)
    with np.errstate(over="ignore"):
        sums = np.cumsum(_hash(_hash(pairs.positions) + pairs.ids.astype(np.uint64)))
        lengths = np.diff(pairs.offsets)
        before = np.concatenate([[np.uint64(0)], sums])[pairs.offsets[:-1]]
        if pairs.prompts is not None:
            before = before - _hash(pairs.prompts)
        context = (sums - np.repeat(before, lengths))[keep]
    found = np.zeros(len(context), dtype=bool)
    found[np.unique(context, return_index=True)[1]] = True
    return found


def _hash(x: np.ndarray) -> np.ndarray:
    """Return 64 well mixed bits of each integer (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
