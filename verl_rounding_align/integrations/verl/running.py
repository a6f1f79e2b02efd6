"""The running engines: each is asked what it is, also one that appears late, and compared with what each role is aligned to."""

import logging
import time
from dataclasses import dataclass, field

from . import KEY, NotApplied
from .config import compute_dtype

logger = logging.getLogger("verl_rounding_align")
TIMEOUT = 120  # seconds that all engines together have to say what they are


@dataclass
class Replica:
    """A rollout replica's answers.

    Args:
        name: what it is called in messages.
        servers: handles of verl's server actors: one for each node, or the prefill and decode servers.
        ranks: workers that there are, None if that is not known.
        fingerprints: what they answered.
        missing: why an answer is missing.
    """

    name: str
    servers: list
    ranks: int | None = None
    fingerprints: list = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def replicas(trainer) -> list[Replica]:
    """Return every rollout replica that a trainer has now: colocated ones, and those on machines of their own.

    Mirrors: verl 0.9.1 ``PPOTrainer._rollout_server_managers``, ``RolloutReplica.servers`` and ``.world_size``.
    """
    if hasattr(trainer, "_rollout_server_managers"):
        managers = trainer._rollout_server_managers()
    else:
        managers = [getattr(trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager")]
    found = []
    for manager in managers:
        for replica in manager.get_replicas() if manager is not None else ():
            servers = list(getattr(replica, "servers", None) or [replica.server_handle])
            number = getattr(replica, "replica_rank", len(found))
            found.append(Replica(f"replica {number}", servers, getattr(replica, "world_size", None)))
    return found


def ask(found: list[Replica]) -> None:
    """Ask every server of some replicas, all at once and with one deadline. A failure becomes a reason."""
    import ray

    from ...engines.fingerprint import Fingerprint

    asked = []
    for replica in found:
        for server in replica.servers:
            try:
                asked.append((replica, server.rounding_align_fingerprint.remote()))
            except Exception as error:  # an engine that cannot answer is no reason to stop a run
                replica.missing.append(_brief(error))
    deadline = time.monotonic() + TIMEOUT
    for replica, answer in asked:
        try:
            for fields in ray.get(answer, timeout=max(0.0, deadline - time.monotonic())):
                if "missing" in fields:
                    replica.missing.append(fields["missing"])
                else:
                    replica.fingerprints.append(Fingerprint.from_dict(fields))
        except (ray.exceptions.RayError, TimeoutError) as error:
            replica.missing.append(_brief(error))
        except Exception as error:
            logger.exception("rounding_align: an engine's answer could not be read")
            replica.missing.append(_brief(error))
    for replica in found:
        heard = len(replica.fingerprints) + len(replica.missing)
        if heard < (replica.ranks or 1):
            replica.missing.append(f"{replica.name}: {heard} of {replica.ranks or 1} ranks answered")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


class Engines:
    """What a trainer knows of its running engines, each replica asked once.

    Args:
        trainer: verl's PPOTrainer.
        plans: role -> Plan of the roles that are aligned.
    """

    def __init__(self, trainer, plans: dict):
        self.trainer, self.plans = trainer, plans
        self.asked: list[Replica] = []
        self.doubted = False  # whether a replica, a rank or a role was not verified
        self.said: set[str] = set()

    def look(self) -> bool:
        """Ask the replicas that are new, say what the plans are worth for them; return whether all are verified.

        Raises:
            NotApplied: an engine contradicts a plan.
        """
        now = replicas(self.trainer)
        known = [replica.servers for replica in self.asked]
        new = [replica for replica in now if replica.servers not in known]
        if new:
            ask(new)
            self.asked += new
            doubted, self.doubted = self.doubted, True  # until every new one is judged, whatever stops that
            self.doubted = not self._judge(new) or doubted
        if not now:
            self._say("engine unverified: the trainer knows no rollout replica")
        return bool(now) and not self.doubted

    def _judge(self, new: list[Replica]) -> bool:
        """Return whether every new replica is verified for every role."""
        from ...engines.fingerprint import CONTRADICTED, VERIFIED
        from ...engines.vllm.settings import override

        model, every = self.trainer.config.actor_rollout_ref.model.path, True
        for role, plan in self.plans.items():
            key, preset = f"actor_rollout_ref.{role}.{KEY}", plan.preset
            auto = override(key, "auto", there=True)
            dtype, _ = compute_dtype(self.trainer.config.actor_rollout_ref[role])
            for fingerprint in dict.fromkeys(x for replica in new for x in replica.fingerprints):
                judgement = preset.judge(fingerprint, dtype, plan.groups)
                if judgement.status == CONTRADICTED:
                    remedy = "probe the engine with the settings it runs with" if preset.probed else f"set {auto}"
                    raise NotApplied(
                        f"{key}: the running engine contradicts the plan: {judgement.why}; engine: {fingerprint}; {remedy}, "
                        "or give the engine the settings that the plan was made for"
                    )
                advice = ""
                if judgement.status != VERIFIED:
                    every = False
                    run = (
                        f"run `verl-rounding-align probe --model {model} --mode {fingerprint.mode}` in the engine's "
                        "environment"
                    )
                    advice = f"; {run}" if preset.probed else f"; {run}, or set {auto}"
                    if set(judgement.fields) == {"tensor_parallel"}:  # a probe runs on one rank: it would not help
                        advice = (
                            "; ranks alone move no rounding point, since the all-reduce stores its sum in the model dtype, and "
                            "no probe runs on several"
                        )
                self._say(f"{role}: engine {judgement}{advice}; {fingerprint}")
            for reason in dict.fromkeys(x for replica in new for x in replica.missing):
                every = False
                self._say(f"{role}: engine unverified: its fingerprint is missing: {reason}")
        return every

    def _say(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            print(f"rounding_align: {line}", flush=True)


def on_server(module) -> None:
    """verl's vLLM server: an actor method that passes the workers' fingerprints on."""
    server = getattr(module, "vLLMHttpServer", None)
    if server is None:
        return

    async def rounding_align_fingerprint(self) -> list[dict]:
        if getattr(self, "node_rank", 0) != 0:  # its ranks answer through the replica's first node
            return []
        return await self.engine.collective_rpc("rounding_align_fingerprint")

    server.rounding_align_fingerprint = rounding_align_fingerprint
