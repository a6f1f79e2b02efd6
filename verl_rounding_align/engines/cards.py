"""What kernels of this machine depend on: a CPU's instruction sets; its GPUs, without touching one from this process.

``python -m verl_rounding_align.engines.cards`` prints torch's answer as JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from . import process

LIMIT = 120  # seconds for torch to be imported and to answer
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def arch(device: str) -> str:
    """Return what kernels on a device type are built for here."""
    import torch

    if device == "cpu":
        amx = torch.cpu._is_amx_tile_supported()  # vLLM takes other kernels for experts then
        return torch.backends.cpu.get_cpu_capability() + (" AMX" if amx else "")
    if device == "cuda":
        return "sm{}{}".format(*torch.cuda.get_device_capability())
    return ""


def cards(device: str) -> tuple[str, ...]:
    """Return the kinds of GPUs of this machine, each once: ``model, compute capability``. Empty where there is none.

    Which kernel runs, and in which order it sums, depends on both: the capability decides what is compiled, and the model's
    number of processors how the work is cut. The host's name tells nothing of it. With the name as a key every new node of a
    cluster asks again, and a node with exchanged cards keeps the answer of the old ones.

    The first of these that answers is asked. None of them makes a CUDA context in this process: a driver that had one would
    hold GPU memory for nothing, and the processes that it forks could not use CUDA.

    - NVML, if ``nvidia-ml-py`` is installed.
    - torch, in a process of its own. It takes seconds, and is the only way on ROCm.

    Cards that ``CUDA_VISIBLE_DEVICES`` hides count as well: a driver often sees none, and its workers see others.

    Args:
        device: ``cuda`` or ``rocm``.
    """
    found = _nvml() if device == "cuda" else None
    return tuple(sorted(set(_torch() if found is None else found)))


def _nvml() -> list[str] | None:
    """Return what NVML says, None where there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver of NVIDIA's
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            "{}, {}.{}".format(pynvml.nvmlDeviceGetName(one), *pynvml.nvmlDeviceGetCudaComputeCapability(one))
            for one in handles
        ]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _torch() -> list[str]:
    """Return what torch says in a process of its own; nothing where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cards.json"
        try:
            process.run(__name__, out=out, limit=LIMIT, environment=dict.fromkeys(HIDING), name="torch")
            return json.loads(out.read_text())
        except (process.TimeLimit, ValueError):
            return []


def main() -> None:
    """Print the GPUs that torch sees, as :func:`cards` names them."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    # on ROCm the architecture has a name (gfx942), and two architectures can have one capability
    built = [getattr(card, "gcnArchName", "") if torch.version.hip else f"{card.major}.{card.minor}" for card in found]
    print(json.dumps([f"{card.name}, {arch}" for card, arch in zip(found, built, strict=True)]))


if __name__ == "__main__":
    main()
