"""The running engines: each is asked what it is, and compared with what each role is aligned to."""

import time

from . import KEY, ROLES
from .config import plain

ENGINE_TIMEOUT = 120  # seconds that an engine has to say what it is


def engines(trainer) -> tuple[list, list[str]]:
    """Return (fingerprints, reasons why one is missing) of the running engines, each once.

    Every rank of every rollout replica is asked; of a replica with data parallelism vLLM lets its first engine answer.
    """
    import ray

    from ...engines.fingerprint import Fingerprint

    managers = [getattr(trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager")]
    replicas = [replica for manager in managers if manager is not None for replica in manager.get_replicas()]
    asked, running, missing = [], [], [] if replicas else ["the trainer knows no rollout replica"]
    for replica in replicas:  # all at once, with one deadline
        try:
            asked.append(replica.server_handle.rounding_align_fingerprint.remote())
        except Exception as error:  # an engine that cannot answer is no reason to stop a run
            missing.append(brief(error))
    deadline = time.monotonic() + ENGINE_TIMEOUT
    for answer in asked:
        try:
            for fields in ray.get(answer, timeout=max(0.0, deadline - time.monotonic())):
                if "missing" in fields:
                    missing.append(fields["missing"])
                else:
                    running.append(Fingerprint.from_dict(fields))
        except Exception as error:
            missing.append(brief(error))
    return list(dict.fromkeys(running)), list(dict.fromkeys(missing))


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def check_engines(trainer) -> bool:
    """Compare the running engines with what each role is aligned to, and say so; return whether all are verified.

    Raises:
        RuntimeError: an engine contradicts a plan.
    """
    from ...engines.fingerprint import CONTRADICTED, VERIFIED
    from ...plan import find_preset

    running, missing = engines(trainer)
    model = trainer.config.actor_rollout_ref.model.path
    every = not missing
    for role in ROLES:
        value = plain(trainer.config.actor_rollout_ref[role].get(KEY))
        if value in (None, "none"):
            continue
        preset = find_preset(value["engine"], f"actor_rollout_ref.{role}.{KEY}.engine")
        for fingerprint in running:
            judgement = preset.judge(fingerprint)
            if judgement.status == CONTRADICTED:
                remedy = "probe the engine with the settings it runs with" if preset.probed else f"set {KEY}=auto"
                raise RuntimeError(
                    f"actor_rollout_ref.{role}.{KEY}: the running engine contradicts the plan: {judgement.why}; engine: "
                    f"{fingerprint}; {remedy}, or give the engine the settings that the plan was made for"
                )
            advice = ""
            if judgement.status != VERIFIED:
                every = False
                run = f"run `verl-rounding-align probe --model {model} --mode {fingerprint.mode}` in the engine's environment"
                advice = f"; {run}" if preset.probed else f"; {run}, or set {KEY}=auto"
            print(f"rounding_align: {role}: engine {judgement}{advice}; {fingerprint}", flush=True)
        for reason in missing:
            print(f"rounding_align: {role}: engine unverified: its fingerprint is missing: {reason}", flush=True)
    return every


def on_server(module) -> None:
    """verl's vLLM server: an actor method that passes the workers' fingerprints on."""
    server = getattr(module, "vLLMHttpServer", None)
    if server is None:
        return

    async def rounding_align_fingerprint(self) -> list[dict]:
        return await self.engine.collective_rpc("rounding_align_fingerprint")

    server.rounding_align_fingerprint = rounding_align_fingerprint
