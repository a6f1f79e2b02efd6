"""One side computes another function of the tokens: other weights, other RoPE parameters, or another context."""

from __future__ import annotations

import numpy as np

from ..facts import Facts
from ..rows import LIKELY, POSSIBLE, Sign, interval
from ..sample import FEWEST, Sample
from .statistics import slope

SAME_TOKEN = 0.025  # correlation of u at two places of the same token
LARGE = (0.01, 0.05)  # k3, nats per token: too large for rounding, possibly and likely
FALLING = -0.15  # slope of log |u| on log position below which another context is more likely than other weights


def other_model(sample: Sample | None, facts: Facts) -> Sign | None:
    """One side computes another function: other weights, other RoPE parameters, or another context (prompt, padding).

    (1) With other weights, a token's logit moves in one direction at all its places; rounding has no direction. The
    statistic is the correlation of u at two places, in two sequences, that hold the same token. It is 0.00 +- 0.01 on clean
    runs, 0.11 to 0.15 for other weights, and 0.02 to 0.07 for RoPE or context, in proportion where rounding makes a part of
    the mismatch. Thresholds: 0.025, and a z of 5. It needs ids.
    (2) A mismatch of any shape is too large for rounding: where the 95 % interval of k3 is above 0.01 nats per token (five
    times the largest of the clean runs here, SmolLM2-135M) the cause is possible, above 0.05 it is likely.
    Which of the three it is, the correlation says, and the slope as in ``growth``: another context matters less and less as
    the response goes on (-0.2 to -0.4; other weights -0.05 to -0.1).
    """
    if sample is None or len(sample) < FEWEST:
        return None
    rho, z = _same_token(sample)
    value, low, _ = sample.k3
    bound = value if np.isnan(low) else low
    same = rho > SAME_TOKEN and z > 5
    if not same and bound < LARGE[0]:
        return None
    says = f"k3 = {interval(sample.k3)} nats per token (rounding alone: up to 0.002 on the models measured)"
    places = sample.pairs.positions[sample.clear]
    found, error = slope(np.log1p(places), sample.log_size, sample.sequence[sample.clear])
    if sample.pairs.ids is not None:
        says += (
            "; the same token differs in the same direction in different sequences: correlation of d / (1 - p) "
            f"{rho:.2f} (z = {z:.0f}; rounding 0.00, other weights 0.11 to 0.15, RoPE or context 0.02 to 0.07)"
        )
    if found < FALLING and found < -5 * error:
        says += f"; |u| falls as position^{found:.2f}: more like another context in front than like other weights"
    return Sign(LIKELY if same or bound > LARGE[1] else POSSIBLE, says)


def _same_token(sample: Sample) -> tuple[float, float]:
    """Return the correlation of u at two places, in two sequences, where the same token was sampled, and its z.

    Both are 0 without ids, or where fewer than 100 ordered pairs of places hold the same token.
    """
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
