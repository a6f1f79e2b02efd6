"""Which cause that is *not* rounding explains the mismatch between rollout and trainer log-probs?

Per token d = rollout log-prob - trainer log-prob, p = the probability halfway between the two (geometric mean). Rounding
moves logits by noise of one size whatever the token, so d is noise of size s (1 - p), and

    u = d / (1 - p)

has one spread s for likely and unlikely tokens alike, a mean near zero at every p, and Gaussian tails. Every fault here
breaks one of these, or an identity of the log-probs themselves; each detector below states its statistic, its threshold
and why. Absolute size says little: clean models differ from k3 = 3e-6 (tiny) to 2e-3 nats per token (SmolLM2-135M).

What log-probs cannot tell from rounding: weights that differ by less than rounding moves logits (by more, the same token
differs in the same direction everywhere). For that the weights' digests are there (:mod:`.weights`); see ``recipes/triage``
for the smallest size of each fault that is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from ..gap.measure import k3_terms
from ..logprobs import intervals as stats
from ..logprobs.intervals import intervals, per_sequence
from ..logprobs.pairs import Pairs
from .facts import KNOWN_STRATEGIES, Facts

ROUNDING = "rounding-sized"
NOTE = "sampled-elsewhere"  # of the sampling, not of the mismatch
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
FEWEST = 200  # tokens below which only identities are tested, no statistics


@dataclass(frozen=True)
class Finding:
    """One cause, how sure it is (certain, likely, possible), what shows it, and what to do next."""

    cause: str
    confidence: str
    evidence: str
    next_step: str


@dataclass(frozen=True)
class Sign:
    """What a detector saw."""

    confidence: str
    evidence: str


class Sample:
    """The tokens of a dump, seen as the detectors need them; ``pairs`` has only tokens that count and are finite."""

    def __init__(self, pairs: Pairs):
        self.whole, self.pairs = pairs, pairs.valid()
        self.first = _first(pairs)
        self.rollout, self.trainer, self.offsets = self.pairs.rollout, self.pairs.trainer, self.pairs.offsets
        lengths, place = np.diff(self.offsets), self.pairs.positions
        # distance to the first and to the last token of the response that counts; (tokens,), kept by `without`
        self.from_start = place - np.repeat(place[self.offsets[:-1]], lengths)
        self.from_end = np.repeat(place[self.offsets[1:] - 1], lengths) - place

    def without(self, tokens: np.ndarray) -> Sample:
        """Return the sample less some tokens, (tokens,) bool; the others keep their places."""
        rest = Sample(replace(self.pairs, mask=self.pairs.mask & ~tokens))
        rest.from_start, rest.from_end = self.from_start[~tokens], self.from_end[~tokens]
        rest.first = self.first[~tokens]
        return rest

    def __len__(self) -> int:
        return len(self.rollout)

    @cached_property
    def d(self) -> np.ndarray:
        return self.rollout - self.trainer

    @cached_property
    def p(self) -> np.ndarray:
        return np.exp(np.minimum((self.rollout + self.trainer) / 2, 0.0))

    @cached_property
    def clear(self) -> np.ndarray:
        """Tokens that statistics of u are taken of: 1 - p well above what fp32 resolves in a log-prob near zero (1e-6), and
        no second copy (:func:`_first`)."""
        return (self.p < 0.999) & self.first

    @cached_property
    def u(self) -> np.ndarray:
        return self.d / np.maximum(1 - self.p, 1e-3)

    @cached_property
    def level(self) -> float:
        """Spread of u, from its median size (1.4826 makes it a standard deviation for Gaussian noise)."""
        size = np.abs(self.u[self.clear])
        return 1.4826 * float(np.median(size)) if len(size) else 0.0

    @cached_property
    def k3(self) -> tuple[float, float, float]:
        tokens = per_sequence(np.ones(len(self)), self.offsets)
        return intervals([(per_sequence(k3_terms(self.d), self.offsets), tokens)])[0]

    @cached_property
    def sequence(self) -> np.ndarray:
        """Each token's sequence; (tokens,)."""
        return np.repeat(np.arange(len(self.pairs)), np.diff(self.offsets))


def _first(pairs: Pairs) -> np.ndarray:
    """Return which tokens that count are the first with their context, (tokens,) bool; all of them without ids.

    Answers of one group (GRPO) often begin alike: the same context gives the same d again, which is no second observation.
    A context is told by the sum of 64-bit hashes of (token, place) up to the token, and by the prompt's length.
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


# ---- detectors: each takes (Sample or None, Facts) and returns a Sign or None. `drops` marks tokens that are explained.


@dataclass(frozen=True)
class Explained(Sign):
    """A sign that explains some tokens; later detectors look at the others."""

    tokens: np.ndarray  # (tokens,) bool, of the sample's tokens


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def missing(sample: Sample | None, facts: Facts) -> Sign | None:
    """Log-probs that were not computed, or copied from the other side.

    A setting that says so; tokens that count without a finite log-prob; one side zero everywhere (a field never filled);
    or both sides equal in every bit for 100 tokens or more: rollout and trainer run different kernels.
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
    """One side's log-probs moved along the sequence.

    For each sequence of 8 tokens or more, mean |rollout[t] - trainer[t + k]|, k from -2 to 2, over at least 6 pairs of tokens
    that are k apart in the response (masked ones are not skipped over). Unshifted it is about 0.04 at k = 0 and, as
    neighbouring tokens have nothing to do with each other, about 3 elsewhere; threshold: less than a quarter of k = 0's at
    another k (the best of four sums of 6 unrelated differences is rarely so low). One sequence, or 2 % of more than 50, three
    in four of them by the same k.
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
    """Tokens that count and are no sampled tokens: padding, tool output, a wrong end.

    (1) A log-prob above 0. (2) One side exactly 0 where the other gives p < 0.999, two such tokens: placeholders. Top-p makes
    exact zeros too, but at every token with p above one bound; those of p < 0.1 count here even so. (3) One side repeats one
    value 3 times and more while the other moves by 0.1.
    """
    if sample is None or not len(sample):
        return None
    r, t = sample.rollout, sample.trainer
    above = np.maximum(r, t) > 1e-3
    bound = np.log(0.1 if _one_kept(sample).any() else 0.999)
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
        where = f"; {_percent(ends)} of sequences end in one" if ends > 0.2 else ""
        return Explained(CERTAIN, f"of {len(sample):,} log-probs that count, {', '.join(says)}{where}", odd)
    return None


def _one_kept(sample: Sample) -> np.ndarray:
    """Return where top-p kept one token: rollout exactly 0, trainer not; (tokens,) bool, none if zeros follow no bound on p.

    fp32 gives exactly 0 to p > 1 - 6e-8 only. Of the tokens whose p (trainer's) is above the lower quartile of the zeros',
    four in five must be zeros.
    """
    zeros = (sample.rollout == 0) & (sample.trainer < np.log(0.999)) & (sample.trainer > np.log(0.1))
    if zeros.sum() < max(3, 0.002 * len(sample)):
        return np.zeros(len(sample), dtype=bool)
    above = (sample.trainer >= np.quantile(sample.trainer[zeros], 0.25)) & (sample.trainer < np.log(0.999))
    return zeros & bool(zeros[above].mean() > 0.8)


def _binomial_tail(k: int, n: int, p: float) -> float:
    """Return P(X >= k) for X of n draws with probability p.

    >>> round(_binomial_tail(2, 2, 0.1), 6)
    0.01
    """
    from math import exp, lgamma, log

    def term(i):
        return exp(lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) + i * log(p) + (n - i) * log(1 - p))

    return min(1.0, sum(term(i) for i in range(k, n + 1)))


def coarse(sample: Sample | None, facts: Facts) -> Sign | None:
    """Log-probs kept in 16 bits: every value of one side (50 or more that are not 0) is a bf16 or an fp16 number.

    A fp32 value is a bf16 number with probability 2^-16.
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
    """Return the distance of neighbouring numbers of ``bits`` significant bits around the median."""
    return f"{2.0 ** (np.floor(np.log2(np.median(np.abs(values)))) + 1 - bits):.2g}"


HIGH = (0.5, 0.999)  # probabilities at which a token is the likeliest, so that the sign of d says which side is sharper


def _signs(sample: Sample) -> tuple[float, float, float, int]:
    """Return (share of d < 0 at likely tokens, share at unlikely ones, correlation of d with log p there, likely tokens)."""
    likely, unlikely = (sample.p > HIGH[0]) & (sample.p < HIGH[1]), sample.p < HIGH[0]
    if likely.sum() < 30 or unlikely.sum() < 30:
        return 0.5, 0.5, 0.0, 0
    d, p = sample.d[unlikely], np.log(np.maximum(sample.p[unlikely], 1e-30))
    ranks = [np.argsort(np.argsort(x)) for x in (d, p)]
    tilt = float(np.corrcoef(*ranks)[0, 1]) if np.ptp(d) else 0.0
    return float((sample.d[likely] < 0).mean()), float((d < 0).mean()), tilt, int(likely.sum())


def temperature(sample: Sample | None, facts: Facts) -> Sign | None:
    """The rollout's log-probs are sharper (or flatter) than the trainer's, token by token.

    With 1/T apart, d = (1/T - 1) (log p + H), H an entropy of the context: for a likely token (p in 0.5 .. 0.999) d > 0
    whatever the context, for unlikely ones d grows with log p. Rounding has d < 0 at half of the likely tokens (spread
    0.02 at 2,000 tokens), and neither it nor other weights tie d to log p. Thresholds: d < 0 at less than a quarter of them
    (sharper) or more than three quarters (flatter); rank correlation of d and log p at p < 0.5 beyond 0.3, of that sign.
    """
    differ = (
        None not in (facts.temperature, facts.trainer_temperature) and facts.temperature != facts.trainer_temperature
    )
    set_so = differ and facts.logprobs_mode == "processed_logprobs"
    says = f"the rollout's log-probs are at temperature {facts.temperature:g}, the trainer's at " if set_so else ""
    says += f"{facts.trainer_temperature:g}" if set_so else ""
    if sample is None or len(sample) < FEWEST:
        return Sign(CERTAIN, says) if set_so else None
    high, _, tilt, n = _signs(sample)
    if not n or abs(tilt) < TILT or 0.25 <= high <= 0.75 or (high < 0.5) != (tilt > 0):
        return _by_setting(says, sample) if set_so else None
    sharper = high < 0.5
    if not sharper and _raw(sample, facts):
        return None
    ratio = _temperature_ratio(sample)
    share = 1 - high if sharper else high
    return Sign(
        CERTAIN if set_so else LIKELY,
        f"the rollout is {'sharper' if sharper else 'flatter'} than the trainer at {_percent(share)} of {n:,} likely tokens "
        f"(rounding: half), rank correlation of d and log p at unlikely ones {tilt:+.2f} (rounding: 0): as if the rollout's "
        f"temperature were {ratio:.2g} of the trainer's" + (f"; {says}" if says else ""),
    )


def _temperature_ratio(sample: Sample) -> float:
    """Return the temperature of the rollout's log-probs over that of the trainer's, estimated from likely tokens.

    With one competitor logit(p) is divided by the temperature; with more, the ratio is further from 1: the nearest tenth.
    """
    likely = (sample.p > 0.7) & (sample.p < HIGH[1]) & (np.maximum(sample.rollout, sample.trainer) < -1e-6)
    logit = [x[likely] - np.log(-np.expm1(x[likely])) for x in (sample.rollout, sample.trainer)]
    ratio = logit[1] / logit[0]
    return float(np.quantile(ratio, 0.9 if np.median(ratio) < 1 else 0.1)) if len(ratio) else float("nan")


def _raw(sample: Sample, facts: Facts) -> bool:
    """Whether flatter rollout log-probs are raw ones: tokens were sampled from the trainer's side (E[d] < 0), or it is set."""
    if facts.logprobs_mode is not None:
        return facts.logprobs_mode == "raw_logprobs"
    return float(sample.d.mean()) < 0


def raw(sample: Sample | None, facts: Facts) -> Sign | None:
    """Raw log-probs (before temperature, top-p, top-k) where the trainer's are of the processed distribution.

    Settings: raw log-probs at a temperature other than 1 that the trainer divides by; where it does not, both sides' log-probs
    are of one distribution (see ``sampled_elsewhere``). Log-probs: the rollout is flatter than the trainer (see
    ``temperature``), and mean d < 0: tokens come from the trainer's side's distribution, as KL >= 0 makes mean d > 0 for
    tokens that come from what the rollout's log-probs say (a temperature above 1, processed).
    """
    set_so = (
        facts.logprobs_mode == "raw_logprobs"
        and None not in (facts.temperature, facts.trainer_temperature)
        and facts.temperature != 1
        and facts.trainer_temperature != 1
    )
    says = f"logprobs_mode=raw_logprobs at temperature {facts.temperature:g}" if set_so else ""
    if sample is not None and len(sample) >= FEWEST:
        high, _, tilt, n = _signs(sample)
        if n and high > 0.75 and tilt < -TILT and _raw(sample, facts):
            return Sign(
                CERTAIN if set_so else LIKELY,
                f"the rollout is flatter than the trainer at {_percent(high)} of {n:,} likely tokens (rounding: half), rank "
                f"correlation of d and log p at unlikely ones {tilt:+.2f} (rounding: 0), mean d {sample.d.mean():.2g} < 0: "
                f"tokens come from the trainer's distribution; temperatures differ by {_temperature_ratio(sample):.2g}"
                + (f"; {says}" if says else ""),
            )
        if set_so and facts.temperature == facts.trainer_temperature:
            return None  # the log-probs themselves show no difference in sharpness
    return Sign(CERTAIN, f"{says}, and the trainer divides by {facts.trainer_temperature:g}") if set_so else None


def kept_mass(sample: Sample | None, facts: Facts) -> Sign | None:
    """Top-p or top-k: the rollout's log-probs are renormalised over the tokens kept, d = -log(kept mass) >= 0.

    (1) Top-p keeps one token where p >= top_p: its log-prob is exactly 0, the trainer's is not (see ``_one_kept``); threshold:
    3 tokens and 0.2 %. Not where d grows with log p: a low temperature takes likely tokens to 0 too.
    (2) d < 0 (noise alone) at less than a quarter of all tokens, likely or not, and small there: a median below 0.12 (0.02 to
    0.04 where mass is kept, 0.2 and more with other weights, whose d < 0 is as rare once log-probs fall apart); log-probs
    correlated beyond 0.9 and d not growing with log p: not a temperature.
    """
    says = "" if facts.logprobs_mode == "raw_logprobs" else _truncation(facts)  # raw ones are of all tokens
    if sample is not None and len(sample) >= FEWEST:
        high, low, tilt, n = _signs(sample)
        exact = _one_kept(sample)
        kept = float(np.exp(-sample.d).mean())
        if exact.any() and tilt < TILT:
            least = float(np.exp(sample.trainer[exact].min()))
            return Sign(
                CERTAIN,
                f"{_percent(exact.mean())} of rollout log-probs are exactly 0 where the trainer's p is {least:.3g} to 1: "
                f"one token was kept; mean exp(-d) = {kept:.3f}, the mean mass kept" + (f"; {says}" if says else ""),
            )
        together = float(np.corrcoef(sample.rollout, sample.trainer)[0, 1]) if n else 0.0
        noise = float(np.median(-sample.d[sample.d < 0])) if (sample.d < 0).any() else 0.0
        if n and low < ONE_SIDED and high < 0.4 and tilt < TILT / 2 and together > 0.9 and noise < NOISE:
            return Sign(
                CERTAIN if says else LIKELY,
                f"d < 0 at {_percent(low)} of unlikely and {_percent(high)} of likely tokens (rounding: half), d not growing "
                f"with log p (rank correlation {tilt:+.2f}); mean exp(-d) = {kept:.3f}, the mean mass kept"
                + (f"; {says}" if says else ""),
            )
    if not says:
        return None
    return _by_setting(f"{says}: the trainer's log-probs are of all tokens, the rollout's samples are not", sample)


def _by_setting(says: str, sample: Sample | None) -> Sign:
    """Return the sign of a setting: certain, but not where enough log-probs show nothing of it."""
    if sample is None or len(sample) < ENOUGH:
        return Sign(CERTAIN, says)
    return Sign(POSSIBLE, f"{says}; these log-probs show nothing of it: are they of a run with these settings?")


ENOUGH = 2000  # tokens at which faults of the sizes in recipes/triage show


def _truncation(facts: Facts) -> str:
    says = [
        f"top_p={facts.top_p:g}" if facts.top_p not in (None, 1.0) and facts.top_p < 1 else "",
        f"top_k={facts.top_k}" if facts.top_k not in (None, 0, -1) else "",
    ]
    return " and ".join(filter(None, says))


def sampled_elsewhere(sample: Sample | None, facts: Facts) -> Sign | None:
    """A note: both sides' log-probs are of one distribution, tokens are sampled from another.

    By settings: raw log-probs, the trainer divides by 1, and sampling is heated or truncated. No cause of a mismatch, but a
    policy gradient on such tokens is biased.
    """
    if facts.logprobs_mode != "raw_logprobs" or facts.trainer_temperature != 1:
        return None
    says = [f"temperature={facts.temperature:g}" if facts.temperature not in (None, 1) else "", _truncation(facts)]
    says = " and ".join(filter(None, says))
    if not says:
        return None
    return Sign(
        POSSIBLE,
        f"tokens are sampled with {says}; both sides' log-probs are raw, of all tokens at temperature 1: no part of the mismatch",
    )


def edges(sample: Sample | None, facts: Facts) -> Sign | None:
    """Only the first or the last token of responses is off: the mask is one token out, or that token has another context.

    |u| beyond the 99th percentile of the other tokens in too many sequences: binomial tail below 1e-9 (6 of 10), and a median
    6 times that of the others (a response's first token is up to twice as noisy as others in clean runs) and 4 times that of the
    four tokens beside it, which are at most 2.5 times as far off as the others (another prompt puts these off too).
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
        if _binomial_tail(beyond, n, 0.01) < 1e-9 and ratio > 6:
            return Explained(
                LIKELY,
                f"the {name} token of a response differs {ratio:.1f} times as much as others (median |u|, {n} sequences)",
                edge,
            )
    return None


TILT = 0.3
ONE_SIDED, NOISE = 0.25, 0.12


def routing(sample: Sample | None, facts: Facts) -> Sign | None:
    """MoE routing, in a model that is known to have experts; see ``_heavy_tail``."""
    share = _heavy_tail(sample) if facts.experts else 0.0
    return Sign(LIKELY, f"{_tail_says(share)}; the model has {facts.experts} experts") if share > HEAVY else None


def perhaps_routing(sample: Sample | None, facts: Facts) -> Sign | None:
    """A heavy tail that nothing else explains, where it is not known whether the model has experts; 1,000 tokens."""
    enough = facts.experts is None and sample is not None and sample.clear.sum() >= ENOUGH / 2
    share = _heavy_tail(sample) if enough else 0.0
    says = "whether the model has experts is not known (--model PATH says so)"
    return Sign(POSSIBLE, f"{_tail_says(share)}; {says}") if share > HEAVY else None


def _heavy_tail(sample: Sample | None) -> float:
    """Return the share of sum u^2 that the 1 % of tokens with the largest u^2 carry.

    0.08 for Gaussian noise, 0.10 to 0.16 on clean dense models. A token whose experts differ moves far, the others by rounding.
    """
    if sample is None or sample.clear.sum() < FEWEST:
        return 0.0
    square = np.sort(np.square(sample.u[sample.clear]))[::-1]
    return float(square[: max(1, len(square) // 100)].sum() / max(square.sum(), 1e-300))


def _tail_says(share: float) -> str:
    return f"1 % of tokens carry {_percent(share)} of the squared difference (rounding: 8 to 16 %)"


HEAVY = 0.35


def _log_size(sample: Sample) -> np.ndarray:
    """Return log |u| of the clear tokens, floored at a hundredth of their spread; its spread is 1.1 for Gaussian noise."""
    return np.log(np.maximum(np.abs(sample.u[sample.clear]), 0.01 * max(sample.level, 1e-300)))


def growth(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch grows with the position in the response.

    Slope of log |u| on log(1 + position), without the first token (whose context is the prompt alone), where one in ten is
    beyond position 32. Rounding accumulates over the context a little: 0.03 to 0.05 on clean runs (SmolLM2-135M). Threshold
    0.2 (size doubles in 30 times the length), and 5 standard errors.
    """
    if sample is None or sample.clear.sum() < FEWEST:
        return None
    places = sample.pairs.positions[sample.clear]
    inner = places > 0
    if inner.sum() < FEWEST or np.quantile(places, 0.9) < SPAN:
        return None
    x, y = np.log1p(places[inner]), _log_size(sample)[inner]
    slope, error = _slope(x, y, sample.sequence[sample.clear][inner])
    if slope < GROWTH or slope < 5 * error:
        return None
    early, late = (np.exp(y[x < np.median(x)].mean()), np.exp(y[x >= np.median(x)].mean()))
    return Sign(
        LIKELY,
        f"|u| grows as position^{slope:.2f} (s.e. {error:.2f}; rounding: 0.03 to 0.05): {late / early:.1f} times larger in the "
        "later half of positions",
    )


GROWTH, SPAN = 0.2, 32


def _slope(x: np.ndarray, y: np.ndarray, sequence: np.ndarray) -> tuple[float, float]:
    """Return the least-squares slope of y on x and its standard error, clustered by sequence; (tokens,) each."""
    x = x - x.mean()
    total = float((x * x).sum())
    if total == 0:
        return 0.0, float("inf")
    slope = float((x * y).sum() / total)
    rest = y - y.mean() - slope * x
    return slope, float(np.sqrt((np.bincount(sequence, x * rest) ** 2).sum()) / total)


def _apart(sample: Sample, value: np.ndarray, side: str, fewest: int) -> tuple[float, float, int] | None:
    """Which sequences differ most from the others: (t, their mean log |u| less the others', a value); None if too few.

    The spread between sequences of one kind counts, but not less than 0.15 (0.05 to 0.1 on clean runs).

    Args:
        value: (sequences,) integers.
        side: ``from`` a value on, ``before`` a value, or ``at`` a value.
        fewest: tokens that both kinds must have; a sequence needs 8.
    """
    where, n = sample.sequence[sample.clear], len(sample.pairs)
    count = np.bincount(where, minlength=n)
    mean = np.bincount(where, weights=_log_size(sample), minlength=n) / np.maximum(count, 1)
    usable = count >= 8
    count, mean = count[usable].astype(float), mean[usable]
    if not len(count):
        return None
    values, which = np.unique(value[usable], return_inverse=True)
    columns = (np.ones(len(count)), mean, mean * mean, count, count * mean)
    sums = np.stack([np.bincount(which, column) for column in columns])
    whole = sums.sum(1, keepdims=True)
    before = np.cumsum(sums, 1) - sums
    inside = {"at": sums, "before": before, "from": whole - before}[side]
    both = np.stack([inside, whole - inside])  # (2, 5, values)
    good = (both[:, 3] >= fewest).all(0)
    if not good.any():
        return None
    values, (size, total, square, tokens, weighted) = values[good], both[:, :, good].swapaxes(0, 1)
    between = np.maximum(0.0225, (square - total * total / size).sum(0) / max(1, len(count) - 2))
    error = np.sqrt((between / size + 1.2 / tokens).sum(0))
    apart = weighted[0] / tokens[0] - weighted[1] / tokens[1]
    best = int(np.argmax(apart / error))
    return float(apart[best] / error[best]), float(apart[best]), int(values[best])


def length(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch depends on how long a response is: long ones are scored in another way (cut, chunked, repacked).

    :func:`_apart`, from a length on, 60 tokens. Thresholds: a factor of 1.5 in |u|, t of 4 (twice the spread makes it 8 of a
    clean run's standard errors, and there are a dozen lengths), and no training step that tells them apart as well.
    """
    if sample is None or sample.clear.sum() < FEWEST or len(sample.pairs) < 6:
        return None
    lengths = sample.pairs.positions[sample.offsets[1:] - 1] + 1
    lengths = lengths + (0 if sample.pairs.prompts is None else sample.pairs.prompts)
    best = _apart(sample, lengths, "from", 60)
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


APART = (4, 1.5)


def steps(sample: Sample | None, facts: Facts) -> Sign | None:
    """The mismatch changes with the training step: at a resume or reload, or without any update.

    :func:`_apart`, of steps from one on, of those before one, of one step alone, 200 tokens; ``length``'s thresholds, t of 5
    for one step alone (there may be a thousand). Or, where few tokens move far, mean k3 from a step on (or before it) more
    than twice that of the other steps, and their 99.9 % intervals apart, 1,000 tokens and 12 sequences on both sides.
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
    """Return (t, log |u| apart, which steps) where steps tell sequences apart; see :func:`steps`."""
    if sample.pairs.steps is None:
        return None
    seen = []
    for side, where in (("from", "from step {} on"), ("before", "before step {}"), ("at", "at step {}")):
        best = _apart(sample, sample.pairs.steps, side, FEWEST)
        if best is not None and best[0] > APART[0] + (side == "at") and best[1] > np.log(APART[1]):
            seen.append((*best[:2], where.format(best[2])))
    return max(seen, default=None)


def _few_tokens(sample: Sample) -> str | None:
    """Return what ``steps`` says where mean k3, not the typical size, changes at a step."""
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
        (_, low, _), (_, _, high) = (intervals([(k3[x], tokens[x])], level=0.999)[0] for x in (part, ~part))
        if low > high:
            where = f"from step {start} on" if rises else f"before step {start}"
            return f"k3 is {ratio:.1f} times as large {where} as in the other steps"
    return None


CANDIDATES = 5  # changes whose intervals are looked at, the largest first


def _same_token(sample: Sample) -> tuple[float, float]:
    """Return (correlation of u at two places, in two sequences, where the same token was sampled; its z); (0, 0) without ids."""
    if sample.pairs.ids is None or not sample.level:
        return 0.0, 0.0
    x = np.clip(sample.u[sample.clear] / sample.level, -3, 3)
    x = x - x.mean()
    _, token = np.unique(sample.pairs.ids[sample.clear], return_inverse=True)
    _, both = np.unique(token * len(sample.pairs) + sample.sequence[sample.clear], return_inverse=True)

    def pairs(values: np.ndarray) -> float:
        """Return the sum of products over ordered pairs of one token in two sequences."""
        return float((np.bincount(token, values) ** 2).sum() - (np.bincount(both, values) ** 2).sum())

    count, spread = pairs(np.ones_like(x)), np.sqrt(2 * max(pairs(x * x), 0.0))
    if count < 100 or not spread:
        return 0.0, 0.0
    return pairs(x) / count / float(x.var()), pairs(x) / float(spread)


def other_model(sample: Sample | None, facts: Facts) -> Sign | None:
    """One side computes another function: other weights, other RoPE parameters, or another context (prompt, padding in front).

    (1) With other weights a token's logit moves in one direction at all its places; rounding has none. Correlation of u at two
    places, in two sequences, with the same token: 0.00 +- 0.01 on clean runs, 0.11 to 0.15 for other weights, 0.02 to 0.07 for
    RoPE or context, in proportion where rounding makes a part of the mismatch. Threshold 0.025, and z of 5. Needs ids.
    (2) A mismatch of any shape that is too large for rounding: the 95 % interval of k3 above 0.01 nats per token (five times
    the largest of the clean runs here, SmolLM2-135M) is possible, above 0.05 likely.
    Which of the three: the correlation, and another context matters less and less as the response goes on (slope as in
    ``growth``, -0.2 to -0.4; other weights -0.05 to -0.1).
    """
    if sample is None or len(sample) < FEWEST:
        return None
    rho, z = _same_token(sample)
    value, low, _ = sample.k3
    bound = value if np.isnan(low) else low
    same = rho > SAME_TOKEN and z > 5
    if not same and bound < LARGE[0]:
        return None
    says = f"k3 = {_interval(sample.k3)} nats per token (rounding alone: up to 0.002 on the models measured)"
    places = sample.pairs.positions[sample.clear]
    slope, error = _slope(np.log1p(places), _log_size(sample), sample.sequence[sample.clear])
    if sample.pairs.ids is not None:
        says += (
            "; the same token differs in the same direction in different sequences: correlation of d / (1 - p) "
            f"{rho:.2f} (z = {z:.0f}; rounding 0.00, other weights 0.11 to 0.15, RoPE or context 0.02 to 0.07)"
        )
    if slope < FALLING and slope < -5 * error:
        says += f"; |u| falls as position^{slope:.2f}: more like another context in front than like other weights"
    return Sign(LIKELY if same or bound > LARGE[1] else POSSIBLE, says)


SAME_TOKEN = 0.025
LARGE = (0.01, 0.05)
FALLING = -0.15


def sequence_ratio(sample: Sample | None, facts: Facts) -> Sign | None:
    """Ratios multiplied over a sequence: the spread of sum(d) makes the product meaningless.

    Effective sample size of weights exp(-sum d), as a share of sequences: exp(-spread^2) for Gaussian sums. Named where a
    setting asks for it and less than half is effective (spread of sum d above 0.83). The spread is sqrt(mean of sum d^2), as
    if tokens' differences were independent (known well from a few sequences, where that of their sums is not); from 30
    sequences on that of the sums, if it is larger.
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
        f"{len(sample) / len(sample.pairs):.0f}), so the effective sample size is {_percent(np.exp(-(spread**2)))} of the "
        "sequences, from rounding alone or not",
    )


SPREAD = 0.83


def backend(sample: Sample | None, facts: Facts) -> Sign | None:
    """A training backend that this package does not align."""
    if facts.strategy is None or facts.strategy in KNOWN_STRATEGIES:
        return None
    return Sign(
        CERTAIN,
        f"actor.strategy={facts.strategy}: alignment works with {', '.join(KNOWN_STRATEGIES)}; nothing is aligned here",
    )


@dataclass(frozen=True)
class Cause:
    """One row: what it is called, how it is seen, what to do about it, and which later causes it explains away.

    A note causes no mismatch and comes after what does, ``rounding-sized`` included. A cause ``beside`` the mismatch harms
    training whatever the mismatch is: it comes before ``rounding-sized``, and does not stand in its place.
    """

    name: str
    detect: Callable[[Sample | None, Facts], Sign | None]
    next_step: str
    explains: tuple[str, ...] = ()
    note: bool = False
    beside: bool = False


OTHER = "weights-rope-or-context"
MASK = (
    "print response_mask beside both log-probs for one sequence that ends early: padding, tool output and what follows the end "
    "must be masked, the end token must not"
)
ROUTING = (
    "replay the rollout's routing in the trainer (verl: rollout.enable_rollout_routing_replay); alignment of rounding does "
    "not fix a flipped expert"
)
SHAPES = (
    "padding-or-mask",
    "growth-with-position",
    "growth-with-length",
    "moe-routing",
    "changes-with-step",
    OTHER,
)
CAUSES = (
    Cause(
        "missing-log-probs",
        missing,
        "set rollout.calculate_log_probs=True and rollout_correction.bypass_mode=False, so that both sides are computed",
        SHAPES,
    ),
    Cause(
        "one-token-shift",
        shift,
        "log-prob t must be of response token t given those before it: take logits[prompt - 1 : -1] of the trainer, and the "
        "rollout's log-probs without an offset",
    ),
    Cause(
        "padding-or-mask",
        padding,
        MASK,
    ),
    Cause(
        "low-precision-log-probs",
        coarse,
        "cast logits to fp32 before log-softmax on that side, and keep log-probs in fp32 when they are stored or sent",
    ),
    Cause(
        "kept-mass",
        kept_mass,
        "sample with top_p=1 and top_k=-1 in training, or correct the rollout's log-probs by the mass that was kept",
        ("padding-or-mask", "moe-routing", OTHER),
    ),
    Cause(
        "temperature",
        temperature,
        "divide the trainer's logits by the temperature that the rollout's log-probs are of (verl: rollout.temperature)",
        SHAPES,
    ),
    Cause(
        "processed-against-raw",
        raw,
        "set rollout.logprobs_mode=processed_logprobs (vLLM: logprobs_mode), or sample at temperature 1 with all tokens",
        SHAPES,
    ),
    Cause("padding-or-mask", edges, MASK, (OTHER,)),
    Cause(
        "growth-with-position",
        growth,
        "compare the RoPE parameters of both sides (`triage --model A --trainer-model B`), then the KV cache's dtype, sliding "
        "windows and chunked prefill",
        ("growth-with-length", "moe-routing", OTHER),
    ),
    Cause(
        "growth-with-length",
        length,
        "look at what happens to long sequences alone: truncation of prompts, max_model_len, packing, dynamic batch size, "
        "sequence parallelism",
        (OTHER,),
    ),
    Cause(
        "moe-routing",
        routing,
        ROUTING,
        (OTHER,),
    ),
    Cause(
        "changes-with-step",
        steps,
        "look at what happened before that step (resume, reload, weight synchronisation) and run a few steps at lr=0: a "
        "mismatch of rounding stays as it is",
        (OTHER,),
    ),
    Cause(
        OTHER,
        other_model,
        "compare both sides' weights and RoPE parameters (`triage --model A --trainer-model B`; in the engine, "
        "collective_rpc('rounding_align_digest')), first after loading, then after a weight synchronisation; if they are equal, "
        "score one sequence alone, without padding: attention masks, truncated prompts, the chat template",
        ("moe-routing",),
    ),
    Cause("moe-routing", perhaps_routing, ROUTING),
    Cause(
        "sequence-level-ratio",
        sequence_ratio,
        "use rollout_is=token, a geometric mean, or rejection by seq_mean_k3, and align rounding to shrink the spread",
        beside=True,
    ),
    Cause(
        "unsupported-backend",
        backend,
        "use actor.strategy=fsdp or fsdp2, or look for the cause in that backend's own kernels",
        beside=True,
    ),
    Cause(
        NOTE,
        sampled_elsewhere,
        "nothing, to measure rounding; in training set rollout.logprobs_mode=processed_logprobs and divide the trainer's logits "
        "by the same temperature",
        note=True,
    ),
)
NAMES = tuple(dict.fromkeys(cause.name for cause in CAUSES))


def _interval(value: tuple[float, float, float]) -> str:
    number = f"{value[0]:.2g}"
    return number if np.isnan(value[1]) else f"{number} [{value[1]:.2g}, {value[2]:.2g}]"


def triage(
    pairs: Pairs | None,
    facts: Facts = Facts(),  # noqa: B008
    found: Sequence[Finding] = (),
    compared: str = "",
) -> list[Finding]:
    """Return the causes that show, the first the one to look at first; ``rounding-sized`` where none does; then notes.

    Args:
        pairs: None to look at the settings alone.
        facts: what is known beside.
        found: what comparisons of weights or RoPE have found; a difference explains a mismatch's shape and size away.
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
        f"k3 = {_interval(sample.k3)} nats per token over {len(sample):,} tokens in {len(sample.pairs)} sequences; spread "
        f"of d / (1 - p) {sample.level:.2g} at every p, position and length{more}"
        + (f"; {ENOUGH:,} tokens are needed to see the other causes" if low else ""),
        NEXT,
    )


NEXT = "align rounding (`rounding_align=auto`); weights that differ by as little as rounding show in digests alone"


def triage_rollouts(pairs: Pairs, meta, facts: Facts = Facts()) -> list[Finding]:  # noqa: B008
    """Return :func:`triage` of pairs that come from a rollout file, whose ``meta`` says how the engine sampled."""
    from .facts import of_rollouts

    return triage(pairs, of_rollouts(meta) | facts)


def compare_weights(trainer, engine) -> Finding | None:
    """Return what comparing two digests found: tensors that differ, or that only one side has (a tied head aside).

    None only if all tensors of both sides were compared and are equal in every bit.

    Args:
        trainer, engine: name -> :class:`.weights.Digest`.
    """
    from ..engines import weights as digests

    differ, covered = digests.compare(trainer, engine), digests.coverage(trainer, engine)
    if not differ:
        if covered.whole:
            return None
        return Finding(
            NOT_COMPARED,
            POSSIBLE,
            f"{covered}; those are equal in every bit, the others may differ",
            "compare two checkpoints (`triage --model A --trainer-model B`), or start vLLM on a CPU with VERL_PLATFORM=cpu, "
            "which keeps the unpacked weights of its linear layers",
        )
    worst = ", ".join(f"{x.name} by {x.relative:.2g}" for x in differ[:3])
    return Finding(
        "weights",
        CERTAIN,
        f"{covered}; {len(differ)} of them differ, relative to their size {worst}",
        "look at how weights reach the engine: the checkpoint it loaded, the last weight synchronisation, a resume; casts from "
        "fp32 masters must round to nearest once",
    )


NOT_COMPARED = "weights-not-compared"


def compare_rope(trainer, engine) -> Finding | None:
    """Return what comparing two :class:`.rope.Rope` found, None if they are the same."""
    from ..engines import rope

    says = rope.difference(trainer, engine)
    if not says:
        return None
    return Finding(
        "rope-parameters",
        CERTAIN,
        says,
        "give both sides the same rope_parameters (engine: hf_overrides, max_model_len; trainer: the checkpoint's config)",
    )


def compare_engine(model, answer: Mapping, rank: int = 0, size: int = 1) -> list[Finding]:
    """Return what comparing a trainer with a running vLLM found: weights that the worker holds in every bit, RoPE before it
    is rounded. Tensors that only one side has are a finding; an empty list says that all are equal.

    Args:
        model: Transformers model, or a checkpoint's folder.
        answer: one worker's, of ``collective_rpc("rounding_align_digest")``.
        rank, size: that worker's place in tensor parallelism.

    Raises:
        ValueError: the worker gave a reason in place of digests.
    """
    from ..engines import rope
    from ..engines import weights as digests

    if "missing" in answer:
        raise ValueError(f"the engine gave no digest: {answer['missing']}")
    engine = {
        name: digests.Digest(tuple(x["shape"]), x["sha256"], x["norm"], tuple(x["sketch"]))
        for name, x in answer["weights"].items()
    }
    running = rope.Rope(np.asarray(answer["rope"]["frequencies"]), answer["rope"]["factor"])
    found = [
        compare_weights(digests.digest_hf(model, rank=rank, size=size), engine),
        compare_rope(rope.of_config(getattr(model, "config", model)), running),
    ]
    return [finding for finding in found if finding]


def as_json(findings: Sequence[Finding]) -> list[dict]:
    """Return the findings as plain data."""
    return [asdict(finding) for finding in findings]


def render(findings: Sequence[Finding], title: str):
    """Return a rich table."""
    from ..report import rows as report

    columns = ("cause", "confidence", "evidence", "next step")
    return report.table(title, columns, [(f.cause, f.confidence, f.evidence, f.next_step) for f in findings])
