"""The key in verl: read in the driver, applied in the workers, proved and measured in the trainer. verl is not changed.

plugin.py    verl's entry point; every process of a run loads it
hooks.py     which of verl's modules is followed by which hook
methods.py   how a method of verl is wrapped, and what was not there to wrap
config.py    the package's keys in verl's config
driver.py    before Ray starts: the key and every setting that conflicts with it are checked, the plans are written back
workers.py   the model is aligned where verl builds it, and the worker reports what it has patched
trainer.py   the reports are read and logged; a step's log-probs are handed to the monitor; columns join the rollout dump
running.py   the running engines are asked what they are, and compared with the plans
cpu.py       a platform without a GPU

A run with neither the key nor ``trainer.rounding_align_metrics=true`` gains no transfer, no file and no column of a dump.
Nothing that was asked for is skipped silently: a worker without these hooks meets a key that verl rejects; an aligned engine
refuses to run until a trainer has read its report; a site that the first forward pass has not reached is an error, and so is
a method of verl that a hook does not find.

Standard library only at import.
"""

from .. import FRAMEWORKS

_ROW = FRAMEWORKS["verl"]
KEY = _ROW.key.rpartition(".")[2]
METRICS_KEY = _ROW.metrics
METRICS = METRICS_KEY.rpartition(".")[2]
VERL = _ROW.releases  # releases whose extension points are the ones that are hooked
TESTED = _ROW.tested[-1]
ROLES = ("actor", "ref")
STRATEGIES = ("fsdp", "fsdp2")

KEYS = {  # config key -> (values, default, meaning): the documentation's table
    f"actor_rollout_ref.actor.{KEY}": (
        "a value of the key, or a mapping of regions, engine and backend",
        "none",
        "where the actor rounds as the rollout engine does",
    ),
    f"actor_rollout_ref.ref.{KEY}": (
        "the same",
        "the actor's",
        "where the reference model does",
    ),
    METRICS_KEY: (
        "true, false, null",
        "null",
        "true: every metric, and the columns of the rollout dump; false: none; null: with the key (also none) every one, "
        "without it only those that verl's own data give for free",
    ),
}


class NotApplied(RuntimeError):
    """Something that was asked for was not done: the training stops."""
