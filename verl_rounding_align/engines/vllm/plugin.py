"""vLLM plugin (entry point group `vllm.general_plugins`), loaded in every process of a vLLM engine.

Every worker can be asked for each setting that can move its rounding, `collective_rpc("rounding_align_fingerprint")`, and for
digests of its weights and its RoPE, `collective_rpc("rounding_align_digest")`; verl's trainer asks for the former. Nothing is
sent unless somebody asks.

vLLM's CPU kernels work on packed weights, and vLLM throws the unpacked ones away once they are packed. verl sends new
weights after every step: it loads them into the unpacked parameters and asks for packing again. In a verl run on a CPU
(`VERL_PLATFORM=cpu`) the plugin therefore keeps the unpacked weights, and elsewhere leaves them alone.
"""

import functools
import inspect
import logging
import os

from ... import postimport as _postimport

TESTED = "0.30.0"

logger = logging.getLogger(__name__)


def register() -> None:
    """Let workers publish their fingerprint, and keep unpacked weights in a verl run on a CPU; again does nothing."""
    try:
        _postimport.install({"vllm.v1.worker.worker_base": _publish})
    except ImportError as error:  # such an engine still serves; the trainer says that the fingerprint is missing
        logger.warning("rounding_align: this engine cannot publish its fingerprint: %s", error)
    _keep_unpacked_weights()


def _publish(module) -> None:
    """Give vLLM's workers the method that ``collective_rpc`` calls; nothing is imported before vLLM does."""
    worker = getattr(module, "WorkerBase", None)
    if worker is not None:
        worker.rounding_align_fingerprint = rounding_align_fingerprint
        worker.rounding_align_digest = rounding_align_digest


def rounding_align_fingerprint(worker) -> dict:
    """Return the fields of a worker's :class:`~verl_rounding_align.engines.fingerprint.Fingerprint`, or why there are none.

    A worker is never harmed by being asked: whatever goes wrong becomes ``{"missing": reason}``.
    """
    try:
        from .fingerprint import of_worker

        return {name: list(x) if isinstance(x, tuple) else x for name, x in vars(of_worker(worker)).items()}
    except Exception as error:
        logger.exception("rounding_align: this worker cannot say what it is asked")
        return {"missing": f"{type(error).__name__}: {error}"}


def rounding_align_digest(worker) -> dict:
    """Return what triage compares with the trainer (``weights.of_worker``), or why there is nothing.

    A worker is never harmed by being asked: whatever goes wrong becomes ``{"missing": reason}``.
    """
    try:
        from .weights import of_worker

        return of_worker(worker)
    except Exception as error:
        logger.exception("rounding_align: this worker cannot say what it is asked")
        return {"missing": f"{type(error).__name__}: {error}"}


def _keep_unpacked_weights() -> None:
    """Keep vLLM's unpacked weights in a verl run on a CPU.

    Raises:
        RuntimeError: if vLLM's packing function is not the one that is known.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_weight", False):
        return
    parameters = tuple(inspect.signature(pack).parameters)
    if parameters != ("layer", "remove_weight"):
        import vllm

        raise RuntimeError(
            f"VERL_PLATFORM=cpu was tested with vLLM {TESTED}, where dispatch_cpu_unquantized_gemm takes "
            f"('layer', 'remove_weight'); here (vLLM {vllm.__version__}) it takes {parameters}"
        )

    @functools.wraps(pack)
    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        pack(layer, remove_weight=False)

    dispatch_cpu_unquantized_gemm.keeps_weight = True
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
