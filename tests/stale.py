"""An engine that ignores weight updates: the negative control of every check that must notice it.

It is a vLLM plugin in a distribution of its own, which a test writes into a folder and puts on the path of the processes
that it starts. The package itself has no such switch.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path


def register() -> None:
    """Let the linear layers of a vLLM engine on a CPU keep the weights of the first synchronisation.

    vLLM packs a layer's weights whenever they have been loaded. The first time is the engine's start on dummy weights, the
    second the first synchronisation, and later ones are skipped.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(pack)
    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        layer.times_packed = getattr(layer, "times_packed", 0) + 1
        if layer.times_packed <= 2:
            pack(layer, remove_weight=remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def path(folder: Path) -> str:
    """Write the plugin into ``folder`` and return the PYTHONPATH with which every vLLM engine loads it."""
    info = folder / "stale_weights-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, folder / "stale_weights.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale-weights\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstale_weights = stale_weights:register\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
