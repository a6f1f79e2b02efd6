"""The trainer: workers' reports are read and logged; mismatch metrics, phantom clipping, the trend alarm, the rollout dump."""

import inspect
import json
import os
from collections.abc import Mapping

from . import KEY, METRICS, ROLES
from .config import metrics_obstacle, plain
from .hooks import wrap
from .running import brief, check_engines

CLIPPED = ("vanilla", "clip_cov")  # policy losses that clip a token's ratio to a range: the others have no such range
HISTORY = "rounding_align_trend.json"  # beside verl's checkpoints


class _Trainer:
    """What this process's trainer logs; mismatch metrics are on until a trainer's config says otherwise."""

    metrics = True
    verified = False
    said: set[str] = set()
    detector = None  # trend.Detector of this run's mismatch_k3
    history: str | None = None  # file that keeps its state for a resume
    columns: dict | None = None  # while verl dumps rollouts: key of a sequence -> what joins its line
    masks: dict = {}  # where verl dumps rollouts: key of a sequence -> its mask before rollout correction rejects tokens


def sites(trainer) -> dict[str, int]:
    """Return role -> number of patched sites, as every worker of the trainer reports it.

    Args:
        trainer: verl's PPOTrainer, with its worker groups.

    Raises:
        RuntimeError: ranks disagree, or what they did is not what the config asks for.
    """
    groups = {id(g): g for g in (trainer.actor_rollout_wg, getattr(trainer, "ref_policy_wg", None)) if g is not None}
    reports = []
    for group in groups.values():
        if not hasattr(group, "rounding_align_report"):
            raise RuntimeError(f"{KEY} was asked for, and verl's workers were built without verl_rounding_align")
        reports += group.rounding_align_report()
    counts = {}
    for role in ROLES:
        entries = [report[role] for report in reports if role in report]
        found = {(entry["plan"], entry["sites"]) for entry in entries}
        if role == "ref" and not entries and trainer.use_reference_policy:
            found = {("shared with the actor", counts["actor"])}  # LoRA: the reference is the actor without its adapter
        if len(found) > 1:
            raise RuntimeError(f"{KEY}: the ranks of {role} disagree: {sorted(found)}")
        counts[role] = found.pop()[1] if found else 0
        value = plain(trainer.config.actor_rollout_ref[role].get(KEY))
        built = role == "actor" or trainer.use_reference_policy
        if built and value not in (None, "none") and counts[role] == 0:
            raise RuntimeError(f"actor_rollout_ref.{role}.{KEY}={value!r} was asked for, and no worker has applied it")
        for entry in entries:
            if entry["forwards"] and entry["idle"]:
                raise RuntimeError(f"{KEY}: {role} never reached {entry['idle'][:5]}")
    return counts


def on_trainer(module) -> None:
    """verl.trainer.ppo.v1.trainer_base: read the workers' reports after set-up and at every step, and log them."""
    trainer_cls = getattr(module, "PPOTrainer", None)
    if trainer_cls is None:
        return

    def asked(trainer) -> bool:
        return any(KEY in trainer.config.actor_rollout_ref[role] for role in ROLES)

    def aligned(trainer) -> bool:
        return any(plain(trainer.config.actor_rollout_ref[role].get(KEY)) not in (None, "none") for role in ROLES)

    def make_setup(original):
        def _setup(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            _Trainer.metrics = self.config.trainer.get(METRICS) is not False
            if asked(self):
                sites(self)
            return result

        return _setup

    def make_fit(original):
        def fit(self, *args, **kwargs):
            if aligned(self):  # the engines are up, no step has run
                _Trainer.verified = check_engines(self)
            if _Trainer.metrics:
                _begin_trend(self)
            return original(self, *args, **kwargs)

        return fit

    def make_metrics(original):
        parameters = inspect.signature(original)

        def _compute_metrics(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            given = parameters.bind(self, *args, **kwargs).arguments
            metrics = given["metrics"]
            if asked(self):
                metrics.update({f"{KEY}/sites_{role}": n for role, n in sites(self).items()})
            if aligned(self):
                metrics[f"{KEY}/engine_verified"] = float(_Trainer.verified)
            if _Trainer.metrics and f"{KEY}/tokens" not in metrics:
                reason = metrics_obstacle(self.config) or "verl has not compared log-probs in this step"
                metrics.update(_mismatch_metrics(reason=reason))
            if _Trainer.metrics:
                metrics.update(_phantom_metrics(module, self.config, given["batch"]))
                metrics.update(_trend_metrics(given["global_steps"], metrics.get(f"{KEY}/mismatch_k3", float("nan"))))
            return result

        return _compute_metrics

    def make_advantage(original):
        parameters = inspect.signature(original)

        def _compute_advantage(self, *args, **kwargs):
            if _Trainer.metrics and self.config.trainer.get("rollout_data_dir"):
                _keep_masks(module, parameters.bind(self, *args, **kwargs).arguments["batch"])
            return original(self, *args, **kwargs)

        return _compute_advantage

    def make_log(original):
        parameters = inspect.signature(original)

        def _log_rollout_data(self, *args, **kwargs):
            batch = parameters.bind(self, *args, **kwargs).arguments["batch"]
            _Trainer.columns = _dump_columns(module, self.config, batch) if _Trainer.metrics else None
            try:
                return original(self, *args, **kwargs)
            finally:
                _Trainer.columns, _Trainer.masks = None, {}

        return _log_rollout_data

    def make_dump(original):
        parameters = inspect.signature(original)

        def _dump_generations(self, *args, **kwargs):
            given = parameters.bind(self, *args, **kwargs)
            if _Trainer.columns is not None:
                given.arguments["reward_extra_infos_dict"] = _with_columns(given.arguments["reward_extra_infos_dict"])
            return original(*given.args, **given.kwargs)

        return _dump_generations

    wrap(trainer_cls, "_setup", make_setup)
    wrap(trainer_cls, "fit", make_fit)
    wrap(trainer_cls, "_compute_metrics", make_metrics)
    wrap(trainer_cls, "_compute_advantage", make_advantage)
    wrap(trainer_cls, "_log_rollout_data", make_log)
    wrap(trainer_cls, "_dump_generations", make_dump)


def _mismatch_metrics(batch=None, reason: str = "") -> dict[str, float]:
    """Return the mismatch metrics of verl's padded batch; they report a failure as missing and never raise."""
    from ...monitor.mismatch import Mismatch, mismatch

    try:
        if reason:
            found = Mismatch(missing=reason)
        else:
            responses = batch["responses"].shape[1]
            mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"]
            found = mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask[:, -responses:])
    except Exception as error:  # a metric must not stop a training run
        found = Mismatch(missing=f"{type(error).__name__}: {error}")
    if found.missing:
        _say(f"mismatch metrics missing: {found.missing}")
    return {f"{KEY}/{name}": value for name, value in found.values().items()}


def _say(line: str) -> None:
    """Print a line once in a run."""
    if line not in _Trainer.said:
        _Trainer.said.add(line)
        print(f"rounding_align: {line}", flush=True)


def _clip_range(config) -> tuple[float, float]:
    """Return verl's (clip_ratio_low, clip_ratio_high), each falling back to clip_ratio as verl's losses do.

    Raises:
        ValueError: the policy loss has no range for a token's ratio.
    """
    actor = config.actor_rollout_ref.actor
    loss = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    if loss not in CLIPPED:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss!r} has no clip range for a token's ratio "
            f"({', '.join(CLIPPED)} have)"
        )
    sides = (actor.get("clip_ratio_low"), actor.get("clip_ratio_high"))
    low, high = (actor.clip_ratio if side is None else side for side in sides)
    return float(low), float(high)


def _phantom_metrics(module, config, batch) -> dict[str, float]:
    """Return phantom clipping of a step's batch; it reports a failure as missing and never raises.

    Everything is read here, after the update and before verl empties its queue (the advantages do not exist yet where
    verl compares log-probs): one transfer of four fields. The mask is the loss's, since clipping acts on its tokens: without
    what verl's rollout correction has rejected, which the mismatch metrics count.
    """
    from ...monitor.phantom import Phantom, phantom

    try:
        reason = metrics_obstacle(config)
        if reason:  # said for the mismatch metrics
            return {f"{KEY}/{name}": value for name, value in Phantom(missing=reason).values().items()}
        low, high = _clip_range(config)
        fields = ["old_log_probs", "rollout_log_probs", "response_mask", "advantages"]
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data = data.to_padded_tensor()
        advantages = data["advantages"] if "advantages" in data.keys() else None  # noqa: SIM118 - a TensorDict
        found = phantom(*(data[name] for name in fields[:3]), advantages, low, high)
    except Exception as error:  # a metric must not stop a training run
        found = Phantom(missing=brief(error))
    if found.missing:
        _say(f"phantom clipping missing: {found.missing}")
    return {f"{KEY}/{name}": value for name, value in found.values().items()}


def _begin_trend(trainer) -> None:
    """Start the trend alarm, with the history of the run that this one resumes where there is one; never raises."""
    from ...monitor.trend import Detector

    _Trainer.detector, _Trainer.history = Detector(), None
    step = getattr(trainer, "global_steps", 0)  # of the checkpoint that was loaded
    try:
        config = trainer.config.trainer
        if config.get("save_freq", -1) > 0:
            _Trainer.history = os.path.join(config.default_local_dir, HISTORY)
        if step == 0:
            return
        folder = config.default_local_dir
        if config.get("resume_mode") == "resume_path":
            folder = os.path.dirname(config.resume_from_path.rstrip("/"))
        file = os.path.join(folder, HISTORY)
        with open(file) as f:
            _Trainer.detector = Detector.restore(json.load(f), step)
        _say(f"trend of mismatch_k3: resumed at step {step} with {len(_Trainer.detector.steps)} steps of {file}")
    except Exception as error:
        _say(f"trend of mismatch_k3: starts anew at step {step}, a jump at this resume cannot be seen: {brief(error)}")


def _trend_metrics(step: int, value: float) -> dict[str, float]:
    """Take a step's mismatch_k3, warn once, keep the history; it reports a failure as missing and never raises."""
    from ...monitor.trend import NAN, Detector, Reading

    try:
        if _Trainer.detector is None:
            _Trainer.detector = Detector()
        reading = _Trainer.detector.update(step, float(value))
        if reading.warning:
            _say(
                f"WARNING: step {step}: mismatch_k3 {reading.warning}. To see where it comes from: `verl-rounding-align "
                "triage` on a rollout dump (trainer.rollout_data_dir), `verl-rounding-align gap` on fixed weights"
            )
        found = reading.values()
    except Exception as error:  # a metric must not stop a training run
        _say(f"trend of mismatch_k3 missing: {brief(error)}")
        found = Reading(alarm=NAN).values()
    try:
        if _Trainer.history is not None and _Trainer.detector is not None:
            _write_json(_Trainer.history, _Trainer.detector.state())
    except Exception as error:
        _say(f"trend of mismatch_k3: its history is not kept for a resume: {brief(error)}")
    return {f"{KEY}/{name}": number for name, number in found.items()}


def _write_json(file: str, value) -> None:
    """Write a JSON file whole or not at all."""
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(f"{file}.{os.getpid()}", "w") as f:
        json.dump(value, f)
    os.replace(f.name, file)


def _keep_masks(module, batch) -> None:
    """Remember the response masks as verl compares log-probs, before its rollout correction rejects tokens; never raises.

    One transfer of one field, in runs that dump rollouts only: rejection overwrites it in verl's queue.
    """
    try:
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        _Trainer.masks |= {
            key: row.tolist() for key, row in zip(batch.keys, data["response_mask"].unbind(), strict=True)
        }
    except Exception as error:
        _say(f"the dump's response_mask is the loss's, after rejection: {brief(error)}")


def _dump_columns(module, config, batch) -> dict | None:
    """Return key of a sequence -> {column: value} for verl's rollout dump; None, and why said once, where that fails.

    The dump's schema, per line: `rollout_log_probs`, `trainer_log_probs` (floats, one a response token; the trainer's
    before the update), `response_mask` (0 or 1; of the tokens that the mismatch metrics count), `loss_mask` (the loss's:
    without what verl's rollout correction has rejected), `response_ids`, `prompt_length` (tokens), `advantages`. A value that
    is not finite is written as Python's json writes it (NaN, Infinity).
    """
    try:
        reason = metrics_obstacle(config)
        if reason:
            raise ValueError(reason)
        names = {
            "rollout_log_probs": "rollout_log_probs",
            "old_log_probs": "trainer_log_probs",
            "response_mask": "loss_mask",
            "responses": "response_ids",
            "advantages": "advantages",
        }
        fields = [*names, "prompts"]
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {name: [row.tolist() for row in data[field].unbind()] for field, name in names.items()}
        kept = [_Trainer.masks.get(key, own) for key, own in zip(batch.keys, rows["loss_mask"], strict=True)]
        for name, masks in (("response_mask", kept), ("loss_mask", rows["loss_mask"])):
            rows[name] = [[int(flag) for flag in row] for row in masks]
        rows["prompt_length"] = [len(row) for row in data["prompts"].unbind()]
        columns = {}
        for i, key in enumerate(batch.keys):
            columns[key] = {name: values[i] for name, values in rows.items()}
            lengths = {name: len(values) for name, values in columns[key].items() if name != "prompt_length"}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"the fields of sequence {key} differ in length: {lengths}")
        return columns
    except Exception as error:
        _say(f"no log-probs in verl's rollout dump: {brief(error)}")
        return None


def _with_columns(infos: Mapping) -> Mapping:
    """Return verl's columns of a rollout dump with this package's, or as they are where its rows are not known."""
    unknown = [key for key in infos.get("uid", [None]) if key not in _Trainer.columns]
    if unknown:
        _say(f"no log-probs in verl's rollout dump: its rows are not the batch's sequences: {unknown[0]}")
        return infos
    rows = [_Trainer.columns[key] for key in infos["uid"]]
    return {**infos, **{name: [row[name] for row in rows] for name in (rows[0] if rows else ())}}


def on_metrics(module) -> None:
    """verl.utils.debug.metrics: verl's comparison of trainer and rollout log-probs, with this package's beside it."""

    def make(original):
        def calculate_debug_metrics(data):
            result = original(data)
            if _Trainer.metrics:
                result = {**result, **_mismatch_metrics(data.batch)}
            return result

        return calculate_debug_metrics

    wrap(module, "calculate_debug_metrics", make)
