"""Causes that change the shape of u: log-probs of one side are sharper or flatter, mass was cut off, or tails are heavy."""

from __future__ import annotations

import numpy as np

from ..facts import Facts
from ..rows import CERTAIN, LIKELY, POSSIBLE, Sign, percent
from ..sample import ENOUGH, FEWEST, Sample
from .identities import one_kept
from .settings import by_setting, truncation

HIGH = (0.5, 0.999)  # probabilities at which a token is the likeliest, so that the sign of d says which side is sharper
TILT = 0.3  # rank correlation of d and log p at unlikely tokens
ONE_SIDED, NOISE = 0.25, 0.12  # share of d < 0 where mass was cut off, and the median size of those d
HEAVY = 0.35  # share of sum u^2 in 1 % of the tokens


def _signs(sample: Sample) -> tuple[float, float, float, int]:
    """Return the share of d < 0 at likely tokens, the share at unlikely ones, the rank correlation of d with log p at
    unlikely ones, and the number of likely tokens."""
    likely, unlikely = (sample.p > HIGH[0]) & (sample.p < HIGH[1]), sample.p < HIGH[0]
    if likely.sum() < 30 or unlikely.sum() < 30:
        return 0.5, 0.5, 0.0, 0
    d, p = sample.d[unlikely], np.log(np.maximum(sample.p[unlikely], 1e-30))
    ranks = [np.argsort(np.argsort(x)) for x in (d, p)]
    tilt = float(np.corrcoef(*ranks)[0, 1]) if np.ptp(d) else 0.0
    return float((sample.d[likely] < 0).mean()), float((d < 0).mean()), tilt, int(likely.sum())


def temperature(sample: Sample | None, facts: Facts) -> Sign | None:
    """The rollout's log-probs are sharper (or flatter) than the trainer's, token by token.

    If the temperatures are 1/T apart, d = (1/T - 1) (log p + H) with H an entropy of the context. For a likely token (p in
    0.5 .. 0.999) d > 0 whatever the context is. For unlikely tokens d grows with log p. With rounding, d < 0 at half of the
    likely tokens (the spread of that share is 0.02 at 2,000 tokens), and neither rounding nor other weights tie d to
    log p. Thresholds: d < 0 at less than a quarter of the likely tokens (sharper) or at more than three quarters (flatter),
    and a rank correlation of d and log p at p < 0.5 beyond 0.3, of the sign that fits.
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
        return by_setting(says, sample) if set_so else None
    sharper = high < 0.5
    if not sharper and _raw(sample, facts):
        return None
    ratio = _temperature_ratio(sample)
    share = 1 - high if sharper else high
    return Sign(
        CERTAIN if set_so else LIKELY,
        f"the rollout is {'sharper' if sharper else 'flatter'} than the trainer at {percent(share)} of {n:,} likely tokens "
        f"(rounding: half), rank correlation of d and log p at unlikely ones {tilt:+.2f} (rounding: 0): as if the rollout's "
        f"temperature were {ratio:.2g} of the trainer's" + (f"; {says}" if says else ""),
    )


def _temperature_ratio(sample: Sample) -> float:
    """Return the temperature of the rollout's log-probs over that of the trainer's, estimated from likely tokens.

    With one competing token, logit(p) is divided by the temperature. With more, the ratio is further from 1, so the tenth
    of the tokens that is nearest to 1 is read.
    """
    likely = (sample.p > 0.7) & (sample.p < HIGH[1]) & (np.maximum(sample.rollout, sample.trainer) < -1e-6)
    logit = [x[likely] - np.log(-np.expm1(x[likely])) for x in (sample.rollout, sample.trainer)]
    ratio = logit[1] / logit[0]
    return float(np.quantile(ratio, 0.9 if np.median(ratio) < 1 else 0.1)) if len(ratio) else float("nan")


def _raw(sample: Sample, facts: Facts) -> bool:
    """Return whether flatter rollout log-probs are raw ones: a setting says so, or tokens were sampled from the trainer's
    side (E[d] < 0)."""
    if facts.logprobs_mode is not None:
        return facts.logprobs_mode == "raw_logprobs"
    return float(sample.d.mean()) < 0


def raw(sample: Sample | None, facts: Facts) -> Sign | None:
    """The rollout's log-probs are raw (before temperature, top-p, top-k), the trainer's are of the processed distribution.

    Settings: raw log-probs at a temperature other than 1 that the trainer divides by. Where the trainer does not divide,
    both sides' log-probs are of one distribution (see ``sampled_elsewhere``). Log-probs: the rollout is flatter than the
    trainer (see ``temperature``) and mean d < 0. Then tokens come from the distribution of the trainer's side, because
    KL >= 0 makes mean d > 0 for tokens that come from what the rollout's log-probs say (a temperature above 1, processed).
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
                f"the rollout is flatter than the trainer at {percent(high)} of {n:,} likely tokens (rounding: half), rank "
                f"correlation of d and log p at unlikely ones {tilt:+.2f} (rounding: 0), mean d {sample.d.mean():.2g} < 0: "
                f"tokens come from the trainer's distribution; temperatures differ by {_temperature_ratio(sample):.2g}"
                + (f"; {says}" if says else ""),
            )
        if set_so and facts.temperature == facts.trainer_temperature:
            return None  # the log-probs themselves show no difference in sharpness
    return Sign(CERTAIN, f"{says}, and the trainer divides by {facts.trainer_temperature:g}") if set_so else None


def kept_mass(sample: Sample | None, facts: Facts) -> Sign | None:
    """Top-p or top-k: the rollout's log-probs are renormalised over the tokens kept, so that d = -log(kept mass) >= 0.

    (1) Top-p keeps one token where p >= top_p. Its log-prob is exactly 0 and the trainer's is not (see ``one_kept``).
    Threshold: 3 tokens and 0.2 % of them. This does not apply where d grows with log p, as a low temperature takes likely
    tokens to 0 too.
    (2) d < 0 (which noise alone causes) at less than a quarter of all tokens, likely or not, and such d are small: their
    median size is below 0.12 (it is 0.02 to 0.04 where mass was kept, and 0.2 or more with other weights, where d < 0 is as
    rare once log-probs fall apart). Log-probs must correlate beyond 0.9, and d must not grow with log p, or it would be a
    temperature.
    """
    says = "" if facts.logprobs_mode == "raw_logprobs" else truncation(facts)  # raw ones are of all tokens
    if sample is not None and len(sample) >= FEWEST:
        high, low, tilt, n = _signs(sample)
        exact = one_kept(sample)
        kept = float(np.exp(-sample.d).mean())
        if exact.any() and tilt < TILT:
            least = float(np.exp(sample.trainer[exact].min()))
            return Sign(
                CERTAIN,
                f"{percent(exact.mean())} of rollout log-probs are exactly 0 where the trainer's p is {least:.3g} to 1: "
                f"one token was kept; mean exp(-d) = {kept:.3f}, the mean mass kept" + (f"; {says}" if says else ""),
            )
        together = float(np.corrcoef(sample.rollout, sample.trainer)[0, 1]) if n else 0.0
        noise = float(np.median(-sample.d[sample.d < 0])) if (sample.d < 0).any() else 0.0
        if n and low < ONE_SIDED and high < 0.4 and tilt < TILT / 2 and together > 0.9 and noise < NOISE:
            return Sign(
                CERTAIN if says else LIKELY,
                f"d < 0 at {percent(low)} of unlikely and {percent(high)} of likely tokens (rounding: half), d not growing "
                f"with log p (rank correlation {tilt:+.2f}); mean exp(-d) = {kept:.3f}, the mean mass kept"
                + (f"; {says}" if says else ""),
            )
    if not says:
        return None
    return by_setting(f"{says}: the trainer's log-probs are of all tokens, the rollout's samples are not", sample)


def routing(sample: Sample | None, facts: Facts) -> Sign | None:
    """MoE routing flips, in a model that is known to have experts; see ``_heavy_tail``."""
    share = _heavy_tail(sample) if facts.experts else 0.0
    return Sign(LIKELY, f"{_tail_says(share)}; the model has {facts.experts} experts") if share > HEAVY else None


def perhaps_routing(sample: Sample | None, facts: Facts) -> Sign | None:
    """A heavy tail that nothing else explains, where it is not known whether the model has experts; needs 1,000 tokens."""
    enough = facts.experts is None and sample is not None and sample.clear.sum() >= ENOUGH / 2
    share = _heavy_tail(sample) if enough else 0.0
    says = "whether the model has experts is not known (--model PATH says so)"
    return Sign(POSSIBLE, f"{_tail_says(share)}; {says}") if share > HEAVY else None


def _heavy_tail(sample: Sample | None) -> float:
    """Return the share of sum u^2 that the 1 % of tokens with the largest u^2 carry.

    It is 0.08 for Gaussian noise and 0.10 to 0.16 on clean dense models. A token whose experts differ moves far, the others
    move by rounding.
    """
    if sample is None or sample.clear.sum() < FEWEST:
        return 0.0
    square = np.sort(np.square(sample.u[sample.clear]))[::-1]
    return float(square[: max(1, len(square) // 100)].sum() / max(square.sum(), 1e-300))


def _tail_says(share: float) -> str:
    return f"1 % of tokens carry {percent(share)} of the squared difference (rounding: 8 to 16 %)"
