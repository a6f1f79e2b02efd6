"""The monitor: what every framework logs in a step, without any framework in it.

    mismatch.py    how far the trainer's log-probs are from the rollout engine's
    phantom.py     how many tokens a clip range would cut because of that alone
    trend.py       whether the mismatch is growing or has jumped, as a test with an error rate
    table.py       every metric with its meaning, unit and range
    monitor.py     Monitor: a step's tensors in, a step's metrics out, and the history for a resume
    columns.py     the columns of a rollout dump

A new metric is a row of ``METRICS`` and a number that `Monitor.measure` or `Monitor.follow` returns. A new framework
builds a `Batch` in every step and logs what `Monitor.observe` returns.
"""

from .columns import COLUMNS, DumpColumns
from .mismatch import Mismatch
from .monitor import HISTORY, Batch, Missing, Monitor, Resume
from .phantom import Phantom
from .table import METRICS, Metric
from .trend import Detector, Reading

__all__ = [
    "COLUMNS",
    "HISTORY",
    "METRICS",
    "Batch",
    "Detector",
    "DumpColumns",
    "Metric",
    "Mismatch",
    "Missing",
    "Monitor",
    "Phantom",
    "Reading",
    "Resume",
]
