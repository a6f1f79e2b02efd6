"""``rounding_align=auto``: the engine that the rollout will run is probed once, and the result is kept.

A result is kept under a key of everything that the engine's fingerprint depends on and that is known before the engine
starts: releases, device, what kernels are built for there, mode, the rollout's dtype and compilation settings, environment
variables, the model's sizes, and the probe's own code. The fingerprint itself stands in the file, and is compared with the
one that the running engine publishes. Several jobs that need the same result wait for one that makes it.

The probe runs in a process of its own: a driver that imports an engine would start its platform. For the same reason this
process asks no GPU anything through torch (:mod:`.cards`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import filelock
import platformdirs
import torch

from . import process
from .cards import arch, cards
from .presets import Preset
from .probe import result
from .spec import ModelSpec

FOLDER = "VERL_ROUNDING_ALIGN_CACHE"  # environment variable: where results are kept
TIMEOUT, PATIENCE = 600, 20  # seconds: for a probe, and between two signs of life
VARIABLES = ("VLLM_BATCH_INVARIANT", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS")  # they move an engine's rounding


@dataclass(frozen=True)
class Rollout:
    """An inference engine as a run will start it.

    Args:
        version: its installed release.
        device: ``cpu``, ``cuda``, ``rocm``.
        eager: whether the engine runs op by op.
        dtype: the model dtype it is given: ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's.
        compilation: fields of its ``compilation_config`` that move rounding (``custom_ops``).
        environment: variables that the run sets for the engine.
        tensor_parallel: most ranks that one model has.
        engine: of ``engines.ENGINES``.
    """

    version: str
    device: str
    eager: bool
    dtype: str = "auto"
    compilation: Mapping = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    engine: str = "vllm"

    @property
    def mode(self) -> str:
        return "eager" if self.eager else "compiled"

    def __str__(self) -> str:
        ranks = f", {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        return f"rollout {self.engine} {self.version}, {self.mode}, {self.device}{ranks}"


@functools.cache
def _code() -> str:
    """Return a digest of the code that a probe's answer depends on."""
    package = Path(__file__).parents[1]
    files = sorted([*Path(__file__).parent.rglob("*.py"), *(package / "regions").glob("*.py"), package / "backend.py"])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _machine(device: str) -> list[str]:
    """Return what kernels are chosen by: a CPU's instruction sets, the GPUs."""
    return [arch(device)] if device == "cpu" else list(cards(device))


def sized(model: str, rollout: Rollout) -> ModelSpec:
    """Return the model's sizes, in the dtype that the rollout gives it.

    Raises:
        ValueError: the model's config cannot be read, or its family or dtype has no rounding points.
    """
    spec = ModelSpec.from_model(model)
    return spec if rollout.dtype == "auto" else replace(spec, dtype=getattr(torch, rollout.dtype))


def folder() -> Path:
    """Return the folder of kept results: $VERL_ROUNDING_ALIGN_CACHE, or one in the user's cache folder."""
    return Path(os.environ.get(FOLDER) or platformdirs.user_cache_dir("verl-rounding-align", appauthor=False))


def kept(rollout: Rollout, spec: ModelSpec) -> Path:
    """Return the file in which a probe of this engine for this model is kept, there or not."""
    variables = {name: os.environ.get(name, "") for name in VARIABLES} | dict(rollout.environment)
    asked = dict(
        code=_code(),
        engine=(rollout.engine, rollout.version),
        torch=metadata.version("torch"),
        transformers=metadata.version("transformers"),
        device=rollout.device,
        machine=_machine(rollout.device),
        mode=rollout.mode,
        compilation=dict(rollout.compilation),
        variables=variables,
        spec=spec.as_dict(),
    )
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return (
        folder() / f"{rollout.engine}-{rollout.version}-{rollout.device}-{rollout.mode}-{spec.model_type}-{digest}.json"
    )


def probe(
    model: str, rollout: Rollout, key: str = "rounding_align", say: Callable[[str], None] = print
) -> tuple[Preset, str]:
    """Return (preset, where it is from): what the engine stores for a model, probed now or earlier.

    Args:
        model: folder or hub name with the model's config.json.
        rollout: the engine.
        key: the config key, for messages.
        say: called with a line before and after a probe, and now and then while it runs or another job's is waited for.

    Raises:
        ValueError: the model's config cannot be read, the probe cannot run here, or its result cannot be kept.
    """
    spec = sized(model, rollout)
    file = kept(rollout, spec)

    def earlier() -> Preset | None:
        if file.is_file():
            with contextlib.suppress(ValueError):  # a damaged file: ask again
                return result.load(file, spec, rollout.mode, key)
        return None

    found = earlier()
    if found is not None:
        return found, f"probed earlier, {file}"
    elsewhere = (
        f"run `verl-rounding-align probe --json FILE` where the engine runs and set {key}={{regions: all, engine: FILE}}, or "
        "name a preset"
    )
    if rollout.device != "cpu" and not cards(rollout.device):
        raise ValueError(f"{key}='auto': the rollout runs on {rollout.device}, and there is none here; {elsewhere}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _alone(file, say):
            found = earlier()
            if found is not None:
                return found, f"probed by another job, {file}"
            say(
                f"rounding_align: asking {str(rollout).removeprefix('rollout ')} where it rounds, about a minute; once, "
                "then kept"
            )
            start = time.monotonic()
            with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
                made = Path(temporary) / "probe.json"
                status = _run(model, rollout, made, say)
                if not made.is_file():
                    raise ValueError(
                        f"{key}='auto': the probe of {rollout} ended with {status} (see above); {elsewhere}"
                    )
                found = result.load(made, spec, rollout.mode, key)
                if (found.engine, found.versions[0], found.device) != (rollout.engine, rollout.version, rollout.device):
                    raise ValueError(
                        f"{key}='auto': the rollout is {rollout.engine} {rollout.version} on {rollout.device}, and the probe "
                        f"found {found.engine} {found.versions[0]} on {found.device} here; {elsewhere}"
                    )
                made.replace(file)
    except OSError as error:
        raise ValueError(f"{FOLDER}={str(folder())!r}: results cannot be kept there: {error}; name a folder") from error
    say(f"rounding_align: probed in {time.monotonic() - start:.0f} s, kept in {file}")
    return found, f"probed now, {file}"


@contextlib.contextmanager
def _alone(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one job at a time make a result; the lock ends with its process.

    Nobody waits longer than a probe may take. Where a file system has no locks, every job makes the result for itself.

    Args:
        file: the result; the lock is a file beside it.
        say: called with a line now and then while another job is waited for.
    """
    lock = filelock.FileLock(file.with_suffix(".lock"))
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        waited = 0
        while waited < TIMEOUT:
            try:
                lock.acquire(timeout=PATIENCE)
                break
            except filelock.Timeout:
                waited += PATIENCE
                say(f"rounding_align: another job asks this engine, waited {waited} s for its answer")
            except (NotImplementedError, OSError):
                break
        yield


def _run(model: str, rollout: Rollout, made: Path, say: Callable[[str], None]) -> str:
    """Run the probe in a process of its own, result in ``made``; return how it ended.

    Its table goes to a file beside ``made``, its progress to the terminal. Status 1 with a result is an answer: some site
    has no exact one, and the result says which.
    """
    arguments = [
        "probe",
        "--model",
        model,
        "--engine",
        rollout.engine,
        "--mode",
        rollout.mode,
        "--dtype",
        rollout.dtype,
    ]
    arguments += ["--compilation-config", json.dumps(dict(rollout.compilation)), "--json", str(made)]
    try:
        status = process.run(
            "verl_rounding_align",
            arguments,
            limit=TIMEOUT,
            out=made.with_suffix(".txt"),
            environment=rollout.environment,
            every=PATIENCE,
            tell=lambda seconds: say(f"rounding_align: still asking, {seconds:.0f} s"),
        )
    except process.TimeLimit:
        return f"no answer in {TIMEOUT} s"
    return f"status {status}"
