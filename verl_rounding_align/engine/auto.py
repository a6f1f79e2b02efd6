"""``rounding_align=auto``: the engine that the rollout will run is probed once, and the result is kept.

A result is kept under a key of everything the engine's fingerprint depends on that is known before the engine starts:
releases, device, mode, the rollout's compilation settings, environment variables, and the model's sizes. The fingerprint
itself stands in the file, and is compared with the one that the running engine publishes.

The probe runs in a process of its own: a driver that imports an engine would start its platform.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..presets import Preset
from . import result
from .spec import ModelSpec

FOLDER = "VERL_ROUNDING_ALIGN_CACHE"  # environment variable: where results are kept
VARIABLES = ("VLLM_BATCH_INVARIANT", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS")  # they move an engine's rounding


@dataclass(frozen=True)
class Rollout:
    """An inference engine as a run will start it.

    Args:
        version: installed release of vLLM.
        device: ``cpu``, ``cuda``, ``rocm``.
        eager: whether the engine runs op by op.
        compilation: fields of its ``compilation_config`` that move rounding (``custom_ops``).
        environment: variables that the run sets for the engine.
    """

    version: str
    device: str
    eager: bool
    compilation: Mapping = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return "eager" if self.eager else "compiled"

    def __str__(self) -> str:
        return f"rollout vllm {self.version}, {self.mode}, {self.device}"


def folder() -> Path:
    """Return the folder of kept results: $VERL_ROUNDING_ALIGN_CACHE, or one in the user's cache folder."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-rounding-align"


def kept(rollout: Rollout, spec: ModelSpec) -> Path:
    """Return the file in which a probe of this engine for this model is kept, there or not."""
    variables = {name: os.environ.get(name, "") for name in VARIABLES} | dict(rollout.environment)
    asked = dict(
        package=__version__,
        vllm=rollout.version,
        torch=metadata.version("torch"),
        transformers=metadata.version("transformers"),
        device=rollout.device,
        mode=rollout.mode,
        compilation=dict(rollout.compilation),
        variables=variables,
        spec=spec.as_dict(),
    )
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"vllm-{rollout.version}-{rollout.device}-{rollout.mode}-{spec.model_type}-{digest}.json"


def probe(
    model: str, rollout: Rollout, key: str = "rounding_align", say: Callable[[str], None] = print
) -> tuple[Preset, str]:
    """Return (preset, where it is from): what the engine stores for a model, probed now or earlier.

    Args:
        model: folder or hub name with the model's config.json.
        rollout: the engine.
        key: the config key, for messages.
        say: called with a line before and after a probe.

    Raises:
        ValueError: the model's config cannot be read, or the probe cannot run here.
    """
    spec = ModelSpec.from_model(model)
    file = kept(rollout, spec)
    if file.is_file():
        return result.load(file, spec, rollout.mode, key), f"probed earlier, {file}"
    say(
        f"rounding_align: asking {str(rollout).removeprefix('rollout ')} where it rounds, about a minute; once, then kept"
    )
    start = time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
        made = Path(temporary) / "probe.json"
        command = [sys.executable, "-m", "verl_rounding_align", "probe", "--model", model, "--mode", rollout.mode]
        command += ["--compilation-config", json.dumps(dict(rollout.compilation)), "--json", str(made)]
        # its table goes to a file, its progress to the terminal
        with (Path(temporary) / "table").open("w+") as table:
            status = subprocess.run(command, stdout=table, env={**os.environ, **rollout.environment}).returncode
        if not made.is_file():  # exit code 1 with a result: some site has no exact answer, and the result says which
            raise ValueError(
                f"{key}='auto': the probe of {rollout} ended with status {status} (its message is above); it runs where the "
                "engine runs: run `verl-rounding-align probe --json FILE` there and set "
                f"{key}={{regions: all, engine: FILE}}, or name a preset"
            )
        found = result.load(made, spec, rollout.mode, key)
        if found.device != rollout.device:
            raise ValueError(
                f"{key}='auto': the rollout runs on {rollout.device}, and the probe found {found.device} here; run "
                f"`verl-rounding-align probe --json FILE` on a machine with the rollout's device and set "
                f"{key}={{regions: all, engine: FILE}}"
            )
        made.replace(file)
    say(f"rounding_align: probed in {time.monotonic() - start:.0f} s, kept in {file}")
    return found, f"probed now, {file}"
