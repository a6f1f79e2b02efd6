"""The trainer: workers' reports are read and logged, a step's log-probs handed to the monitor, columns join verl's dump.

What is known of a run stands in one `Run` on the trainer object. Within a step, in the order in which verl calls:

    _compute_old_log_prob   verl compares trainer and rollout log-probs in `calculate_debug_metrics`; its padded tensors are
                            kept, with the response mask as it is before rollout correction rejects tokens
    _compute_advantage      the loss's mask and the advantages are fetched, the only transfer; the sub-step is measured
    _compute_metrics        once a step: sites, engines, trend
    _log_rollout_data       where rollouts are dumped: columns from what has been kept

A run without the key and without `trainer.rounding_align_metrics=true` gains the mismatch metrics alone, from the tensors that
verl has compared.

Standard library only at import.
"""

import inspect
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from . import KEY, METRICS_KEY, ROLES, NotApplied
from . import config as keys
from .methods import check, wrap
from .running import Engines

CLIPPED = ("vanilla", "clip_cov")  # policy losses that clip a token's ratio to a range: the others have no such range
_STATE = "_rounding_align"
_comparing: ContextVar = ContextVar("rounding_align_comparing", default=None)  # the Run whose log-probs verl compares


@dataclass
class SubStep:
    """What one sub-step of a trainer is measured by; tensors are padded, (sequences, tokens).

    Args:
        keys: of its sequences in verl's queue.
        prompts: number of tokens of each prompt, None where verl's tags do not say it.
        trainer, rollout, mask, responses: as verl compared log-probs; the mask is the one before rejection.
        lengths: number of response tokens of each sequence.
        loss_mask, advantages: after rejection.
    """

    keys: list
    prompts: list | None = None
    trainer: object = None
    rollout: object = None
    mask: object = None
    responses: object = None
    lengths: list | None = None
    loss_mask: object = None
    advantages: object = None


class Run:
    """What this package knows of one training run.

    Args:
        trainer: verl's PPOTrainer; its config is as the driver wrote it.
    """

    def __init__(self, trainer):
        from ...monitor import DumpColumns, Monitor

        self.trainer, self.config = trainer, trainer.config
        self.level = keys.metrics(self.config)
        self.asked = keys.asked(self.config)
        self.plans = keys.plans(self.config.actor_rollout_ref) if self.asked else {}
        self.engines = Engines(trainer, self.plans)
        self.monitor = Monitor(KEY)
        self.columns = DumpColumns()
        self.now: SubStep | None = None
        self.dumped: list[SubStep] = []  # the step's, where verl dumps rollouts

    @classmethod
    def of(cls, trainer) -> "Run":
        """Return the trainer's Run, made when it is first asked for."""
        found = vars(trainer).get(_STATE)
        if found is None:
            found = cls(trainer)
            setattr(trainer, _STATE, found)
        return found

    @property
    def full(self) -> bool:
        """Whether every metric was asked for."""
        return self.level == keys.FULL

    @property
    def dumps(self) -> bool:
        """Whether columns join the rollout dump."""
        return self.full and bool(self.config.trainer.get("rollout_data_dir"))

    def begin(self) -> None:
        """Start the trend, with the history of the run that this one resumes where there is one."""
        from ...monitor import HISTORY, Monitor, Resume

        config = self.config.trainer
        step = getattr(self.trainer, "global_steps", 0)  # of the checkpoint that was loaded
        folder = source = config.get("default_local_dir") or "."
        if config.get("resume_mode") == "resume_path" and config.get("resume_from_path"):
            source = os.path.dirname(config.resume_from_path.rstrip("/"))
        history = os.path.join(folder, HISTORY) if config.get("save_freq", -1) > 0 else None
        resume = Resume(step, os.path.join(source, HISTORY)) if step else None
        self.monitor = Monitor(KEY, history=history, resume=resume)

    # --------------------------------------------------------------------------------------------------- a sub-step

    @contextmanager
    def comparing(self, call):
        """Listen, while verl computes the trainer's log-probs, for the tensors that it compares."""
        self.now = None
        with self.monitor.guard("mismatch metrics missing"):
            batch = call("batch")
            tags = getattr(batch, "tags", None) or [{}] * len(batch.keys)
            prompts = [tag["prompt_len"] for tag in tags] if all("prompt_len" in tag for tag in tags) else None
            self.now = SubStep(list(batch.keys), prompts)
        token = _comparing.set(self)
        try:
            yield
        finally:
            _comparing.reset(token)

    def compared(self, call) -> dict:
        """Take the padded tensors that verl compares; return the metrics that they give for free."""
        with self.monitor.guard("mismatch metrics missing"):
            data = call("data").batch
            responses = data["responses"]
            mask = data["response_mask"] if "response_mask" in data else data["attention_mask"]
            found = self.now if self.now is not None else SubStep([])
            found.trainer, found.rollout = data["old_log_probs"], data["rollout_log_probs"]
            found.mask, found.responses = mask[:, -responses.shape[1] :], responses
            if not self.full:
                self.now = None
                return self.monitor.measure(self._batch(found))
        return {}

    def measured(self, tq, call) -> None:
        """Fetch what exists only now, after advantages and rejection, and put the sub-step's metrics among verl's."""
        found, self.now = self.now, None
        with self.monitor.guard("metrics missing"):
            metrics, batch = call("metrics"), call("batch")
            if found is None or found.trainer is None or found.keys != list(batch.keys):
                found = SubStep(list(batch.keys))
            else:
                with self.monitor.guard("the loss's mask and the advantages are missing"):
                    self._fetch(tq, batch, found)
            metrics.update(self.monitor.measure(self._batch(found)))
            if self.dumps:
                self.dumped.append(found)

    def _fetch(self, tq, batch, found: SubStep) -> None:
        fields = ["response_mask", "advantages"]
        fields += ["prompts"] if self.dumps and found.prompts is None else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        known = set(data.keys())
        found.lengths = data["response_mask"].offsets().diff().tolist()
        found.prompts = data["prompts"].offsets().diff().tolist() if "prompts" in known else found.prompts
        found.loss_mask = data["response_mask"].to_padded_tensor(0)
        found.advantages = data["advantages"].to_padded_tensor(0) if "advantages" in known else None

    def _batch(self, found: SubStep):
        """Return the monitor's Batch of a sub-step."""
        from ...monitor import Batch

        mode = (self.config.trainer.get("v1") or {}).get("trainer_mode", "sync")
        stale = "" if mode == "sync" else f"trainer.v1.trainer_mode={mode}: rollouts go on while weights change"
        clip, no_clip = None, ""
        if self.full:
            clip, no_clip = clip_range(self.config)
            if found.trainer is not None and found.loss_mask is None:
                clip, no_clip = None, "the loss's mask and the advantages could not be fetched"
        return Batch(
            trainer=found.trainer,
            rollout=found.rollout,
            response_mask=found.mask,
            loss_mask=found.loss_mask,
            advantages=found.advantages,
            clip=clip,
            no_clip=no_clip,
            missing="" if found.trainer is not None else self.obstacle(),
            stale=stale,
        )

    def obstacle(self) -> str:
        """Return why a step has no log-probs to compare."""
        return keys.metrics_obstacle(self.config) or "verl has not compared log-probs in this step"

    # ------------------------------------------------------------------------------------------------------ a step

    def step(self, call) -> None:
        """Put what is known once a step among verl's metrics.

        Raises:
            NotApplied: a worker or an engine does not do what was asked for.
        """
        found: dict[str, float] = {}
        if self.asked:
            counts = self.attempt("the workers' reports are missing", lambda: sites(self.trainer))
            found |= {f"{KEY}/sites_{role}": count for role, count in (counts or {}).items()}
        if self.plans:
            verified = self.attempt("the running engines cannot be asked", self.engines.look)
            found[f"{KEY}/engine_verified"] = float(bool(verified))
        if not (self.full or found):
            return
        with self.monitor.guard("metrics missing"):
            metrics = call("metrics")
            metrics.update(found)
            if self.full:
                if f"{KEY}/missing" not in metrics:
                    metrics.update(self.monitor.measure(self._batch(SubStep([]))))
                metrics.update(self.monitor.follow(call("global_steps"), metrics))

    def attempt(self, what: str, function):
        """Return ``function()``; None where it fails otherwise than by :class:`NotApplied`, which stops the training."""
        try:
            return function()
        except NotApplied:
            raise
        except Exception:
            with self.monitor.guard(what):
                raise
        return None

    # ------------------------------------------------------------------------------------------------ rollout dump

    def fill(self, call) -> None:
        """Make the dump's columns of everything that the step has kept."""
        from ...monitor import Missing

        with self.monitor.guard("no log-probs in verl's rollout dump"):
            subs, whole = self.dumped, list(call("batch").keys)
            if not subs or any(sub.loss_mask is None or sub.prompts is None for sub in subs):
                raise Missing(
                    self.obstacle() if not subs or subs[0].trainer is None else "the step was not measured whole"
                )
            names = {
                "rollout_log_probs": "rollout",
                "trainer_log_probs": "trainer",
                "loss_mask": "loss_mask",
                "response_ids": "responses",
                "advantages": "advantages",
            }
            rows = {
                name: [
                    row[:length].tolist()
                    for sub in subs
                    for row, length in zip(getattr(sub, field), sub.lengths, strict=True)
                ]
                for name, field in names.items()
                if all(getattr(sub, field) is not None for sub in subs)
            }
            known = [key for sub in subs for key in sub.keys]
            if set(known) != set(whole):
                raise Missing("the step's sequences are not those that were measured")
            for sub in subs:
                masks = (row[:n].tolist() for row, n in zip(sub.mask, sub.lengths, strict=True))
                self.columns.keep_masks(sub.keys, masks)
            self.columns.fill(known, prompt_length=[n for sub in subs for n in sub.prompts], **rows)

    def forget(self) -> None:
        """Forget a step that has been dumped."""
        self.columns.clear()
        self.dumped = []


def clip_range(config) -> tuple[tuple[float, float] | None, str]:
    """Return (verl's clip_ratio_low and clip_ratio_high, why there is none); each side falls back to clip_ratio as in verl."""
    actor = config.actor_rollout_ref.actor
    loss = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    if loss not in CLIPPED:
        return None, (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss!r} has no clip range for a token's ratio "
            f"({', '.join(CLIPPED)} have)"
        )
    sides = (actor.get("clip_ratio_low"), actor.get("clip_ratio_high"))
    low, high = (actor.clip_ratio if side is None else side for side in sides)
    return (float(low), float(high)), ""


def sites(trainer) -> dict[str, int]:
    """Return role -> number of patched sites, as every worker of the trainer reports it.

    Args:
        trainer: verl's PPOTrainer, with its worker groups.

    Raises:
        NotApplied: ranks disagree, or what they did is not what the config asks for.
    """
    groups = {id(g): g for g in (trainer.actor_rollout_wg, getattr(trainer, "ref_policy_wg", None)) if g is not None}
    reports, plans = [], Run.of(trainer).plans
    for group in groups.values():
        if hasattr(group, "rounding_align_report"):
            reports += group.rounding_align_report()
        elif plans:
            raise NotApplied(f"{KEY} was asked for, and verl's workers were built without verl_rounding_align")
    counts = {}
    for role in ROLES:
        entries = [report[role] for report in reports if role in report]
        found = {(entry["plan"], entry["sites"]) for entry in entries}
        if role == "ref" and not entries and trainer.use_reference_policy:
            found = {("shared with the actor", counts["actor"])}  # LoRA: the reference is the actor without its adapter
        if len(found) > 1:
            raise NotApplied(f"{KEY}: the ranks of {role} disagree: {sorted(found)}")
        counts[role] = found.pop()[1] if found else 0
        built = role == "actor" or trainer.use_reference_policy
        if built and role in plans and counts[role] == 0:
            key = f"actor_rollout_ref.{role}.{KEY}"
            raise NotApplied(f"{key}={str(plans[role])!r} was asked for, and no worker has applied it")
        for entry in entries:
            if entry["forwards"] and entry["idle"]:
                raise NotApplied(f"{KEY}: {role} never reached {entry['idle'][:5]}")
    return counts


# -------------------------------------------------------------------------------------------------------------- hooks


class _Call:
    """One call of a method of verl; its arguments by name, whatever the order in which they were given."""

    def __init__(self, original, args: tuple, kwargs: dict):
        self.original, self.args, self.kwargs = original, args, kwargs

    def bound(self) -> inspect.BoundArguments:
        return inspect.signature(self.original).bind(*self.args, **self.kwargs)

    def __call__(self, name: str):
        """Return an argument.

        Raises:
            Missing: verl's method takes none of that name.
        """
        from ...monitor import Missing

        try:
            return self.bound().arguments[name]
        except (KeyError, TypeError, ValueError) as error:
            called = getattr(self.original, "__name__", self.original)
            raise Missing(
                f"verl's {called} was called without {name!r}, which was there in the tested release"
            ) from error


def on_trainer(module) -> list[str]:
    """verl.trainer.ppo.v1.trainer_base: read reports after set-up and at every step, measure, and log.

    Returns:
        Names that verl's module does not have.
    """
    trainer_cls = getattr(module, "PPOTrainer", None)
    if trainer_cls is None:
        return ["PPOTrainer"]
    absent = [] if hasattr(module, "tq") else ["tq"]

    def checked(trainer) -> Run:
        run = Run.of(trainer)
        if run.full or run.plans:
            check(KEY if run.asked else f"{METRICS_KEY}=True", absent)
        return run

    def make_setup(original):
        def _setup(self, *args, **kwargs):
            run = checked(self)
            result = original(self, *args, **kwargs)
            if run.asked:
                sites(self)
            return result

        return _setup

    def make_fit(original):
        def fit(self, *args, **kwargs):
            run = checked(self)
            if run.full:
                run.begin()
            if run.plans:  # the engines are up, no step has run
                run.attempt("the running engines cannot be asked", run.engines.look)
            return original(self, *args, **kwargs)

        return fit

    def make_old_log_prob(original):
        def _compute_old_log_prob(self, *args, **kwargs):
            run = Run.of(self)
            if run.level == keys.OFF:
                return original(self, *args, **kwargs)
            with run.comparing(_Call(original, (self, *args), kwargs)):
                return original(self, *args, **kwargs)

        return _compute_old_log_prob

    def make_debug_metrics(original):
        def calculate_debug_metrics(*args, **kwargs):
            result, run = original(*args, **kwargs), _comparing.get()
            if run is None:
                return result
            free = run.compared(_Call(original, args, kwargs))
            return {**result, **free} if free else result

        return calculate_debug_metrics

    def make_advantage(original):
        def _compute_advantage(self, *args, **kwargs):
            result, run = original(self, *args, **kwargs), Run.of(self)
            if run.full:
                run.measured(module.tq, _Call(original, (self, *args), kwargs))
            return result

        return _compute_advantage

    def make_metrics(original):
        def _compute_metrics(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            Run.of(self).step(_Call(original, (self, *args), kwargs))
            return result

        return _compute_metrics

    def make_log(original):
        def _log_rollout_data(self, *args, **kwargs):
            run = Run.of(self)
            if not run.dumps:
                return original(self, *args, **kwargs)
            run.fill(_Call(original, (self, *args), kwargs))
            try:
                return original(self, *args, **kwargs)
            finally:
                run.forget()

        return _log_rollout_data

    def make_dump(original):
        def _dump_generations(self, *args, **kwargs):
            run = Run.of(self)
            if run.columns:
                with run.monitor.guard("no log-probs in verl's rollout dump"):
                    call = _Call(original, (self, *args), kwargs)
                    infos, given = call("reward_extra_infos_dict"), call.bound()
                    given.arguments["reward_extra_infos_dict"] = {**infos, **run.columns.join(infos.get("uid", [None]))}
                    self, *args = given.args
                    kwargs = given.kwargs
            return original(self, *args, **kwargs)

        return _dump_generations

    for owner, name, make in (
        (trainer_cls, "_setup", make_setup),
        (trainer_cls, "fit", make_fit),
        (trainer_cls, "_compute_old_log_prob", make_old_log_prob),
        (module, "calculate_debug_metrics", make_debug_metrics),
        (trainer_cls, "_compute_advantage", make_advantage),
        (trainer_cls, "_compute_metrics", make_metrics),
        (trainer_cls, "_log_rollout_data", make_log),
        (trainer_cls, "_dump_generations", make_dump),
    ):
        absent += wrap(owner, name, make)
    return absent
