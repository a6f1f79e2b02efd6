"""The key in verl: read in the driver, applied in the workers, proved and measured in the trainer. verl is not changed.

plugin.py    verl's entry point; every process of a run loads it
hooks.py     which of verl's modules is followed by which hook, and how a method of verl is wrapped
config.py    the package's keys in verl's config
driver.py    before Ray starts: the key and every setting that is in its way are checked, the plans are written back
workers.py   the model is aligned where verl builds it, and the worker reports what it has patched
trainer.py   the reports are read and logged; mismatch metrics, phantom clipping, the trend alarm, the rollout dump
running.py   the running engines are asked what they are, and compared with the plans
cpu.py       a platform without a GPU

Nothing is skipped silently: a worker without these hooks meets a key that verl rejects; an aligned engine refuses to run
until a trainer has read its report; a site that the first forward pass has not reached is an error.

Standard library only at import.
"""

KEY = "rounding_align"
METRICS = "rounding_align_metrics"
ROLES = ("actor", "ref")
STRATEGIES = ("fsdp", "fsdp2")
VERL = ("0.9", "0.10")  # releases [low, high) whose extension points are these
VERL_TESTED = "0.9.1"

KEYS = {  # config key -> (values, default, meaning): the documentation's table
    f"actor_rollout_ref.actor.{KEY}": (
        "a value of the key: none, a group, groups joined with +, paper, all, auto, or {regions, engine, backend}",
        "none",
        "what the trainer rounds as the rollout engine does, in the actor",
    ),
    f"actor_rollout_ref.ref.{KEY}": (
        "a value of the key",
        "the actor's",
        "the same for the reference model",
    ),
    f"trainer.{METRICS}": (
        "true, false, null",
        "null",
        "whether every step logs the mismatch of trainer and rollout; null: where there are log-probs",
    ),
}
