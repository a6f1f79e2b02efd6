"""Every metric that the monitor can return, as a table. The documentation's table of metrics is generated from it.

A framework may combine the metrics of several sub-steps by words in their names. The names are chosen for that: what is
to be added has ``total`` in its name, the maximum has ``max``, and all others are averaged. A value that cannot be
computed is left out rather than NaN, so it cannot spoil an average.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What one metric is.

    Args:
        meaning: one line of plain text.
        unit: its unit.
        range: the values that it can take.
        combined: how the values of several sub-steps of one step are combined: ``mean``, ``max`` or ``total``.
    """

    meaning: str
    unit: str
    range: str
    combined: str = "mean"


def _comparison(kind: str, between: str) -> dict[str, Metric]:
    """Return the rows of one comparison of log-probs, whose names start with ``kind``."""
    size = "" if kind == "mismatch" else f"{kind}_"
    return {
        f"{kind}_kl": Metric(f"mean of rollout minus trainer log-prob{between} (k1)", "nats per token", "any"),
        f"{kind}_kl_se": Metric(
            f"standard error of {kind}_kl, clustered by sequence; averaged over sub-steps it is an upper limit",
            "nats per token",
            ">= 0",
        ),
        f"{kind}_k3": Metric(
            f"mean of r - log r - 1, log r = trainer minus rollout log-prob{between}; far less noise than k1",
            "nats per token",
            ">= 0",
        ),
        f"{kind}_k3_se": Metric(
            f"standard error of {kind}_k3, clustered by sequence; averaged over sub-steps it is an upper limit",
            "nats per token",
            ">= 0",
        ),
        f"{size}abs_diff_mean": Metric(f"mean absolute difference of the log-probs{between}", "nats", ">= 0"),
        f"{size}abs_diff_max": Metric(f"largest absolute difference of the log-probs{between}", "nats", ">= 0", "max"),
    }


def _clipping(kind: str, because: str) -> dict[str, Metric]:
    """Return the rows of clipping, whose names start with ``kind``."""
    share, zero = "share of the loss's tokens", "0 to 1"
    return {
        f"{kind}_clip": Metric(
            f"tokens whose ratio of trainer to rollout probability lies outside the clip range {because}", share, zero
        ),
        f"{kind}_clip_positive": Metric(f"of {kind}_clip: above the range, with a positive advantage", share, zero),
        f"{kind}_clip_negative": Metric(f"of {kind}_clip: below the range, with a negative advantage", share, zero),
    }


_APART = ", of different weights"

METRICS: dict[str, Metric] = {
    **_comparison("mismatch", ""),
    "tokens_total": Metric("response tokens with two finite log-probs, which were compared", "tokens", ">= 0", "total"),
    "nonfinite_total": Metric("response tokens left out: a log-prob is NaN or infinite", "tokens", ">= 0", "total"),
    "missing": Metric(
        "1 where log-probs could not be compared, and the log says why once; averaged: the share of sub-steps",
        "flag",
        "0 or 1",
    ),
    **_clipping("phantom", "before any update"),
    "phantom_missing": Metric("1 where phantom clipping could not be computed", "flag", "0 or 1"),
    "trend": Metric(
        "growth of mismatch_k3, a robust slope over the last 200 steps (0: flat, 1: doubling); from step 30 on",
        "relative, per 100 steps",
        ">= -1",
    ),
    "trend_low": Metric("lower end of the 95 % interval of trend", "relative, per 100 steps", ">= -1"),
    "trend_high": Metric("upper end of the 95 % interval of trend", "relative, per 100 steps", ">= -1"),
    "alarm": Metric(
        "1 from the step on at which mismatch_k3 was found rising or had jumped, and the log says so once",
        "flag",
        "0 or 1",
    ),
    "trend_missing": Metric("1 where the trend could not take this step", "flag", "0 or 1"),
    "stale": Metric(
        "1 where rollout and trainer log-probs are of different weights: staleness_* then stands in place of mismatch_*, "
        "abs_diff_* and phantom_clip*, and there is no trend; averaged: the share of sub-steps",
        "flag",
        "0 or 1",
    ),
    **_comparison("staleness", _APART),
    **_clipping("staleness", "because the weights differ"),
}
