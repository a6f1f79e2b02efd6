"""Do trainer and engine hold the same weights? Digests under Hugging Face's names, without moving a weight.

Both sides' tensors go through one small transformation: vLLM's fused ones (``qkv_proj``, ``gate_up_proj``, ``w13_weight``)
are cut into Hugging Face's parts by rows, padding of the vocabulary is cut off, values are cast to the engine's dtype. Then
each tensor is hashed (SHA-256: equal bits or not) and sketched: independent signs s_i, of the same seeds on both sides,
S_b = sum of s_i w_i over i mod 64 = b. The sketch is linear and E |S(a) - S(b)|^2 = |a - b|^2, so two digests tell by how
much tensors differ.

Families: those whose layers are named as Llama's (llama, mistral, qwen2, qwen3), and qwen3_moe's fused experts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

BUCKETS = 64
BLOCK = 1 << 20  # weights at a time; each block's signs have the block's number as seed
VOCAB = 64  # vLLM pads the vocabulary to a multiple of it
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
# dimension that tensor parallelism splits; other tensors are whole on every rank
SPLIT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}


@dataclass(frozen=True)
class Digest:
    """One tensor: its shape, the SHA-256 of its bytes, its norm, and its sketch (64 numbers)."""

    shape: tuple[int, ...]
    sha256: str
    norm: float
    sketch: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs, and by about how much: |a - b| / |a|; infinite for another shape."""

    name: str
    relative: float


def digest(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Digest:
    """Return the digest of one tensor, cast to ``dtype`` first; any device, any shape.

    >>> round(digest(torch.ones(2, 3)).norm ** 2, 9)
    6.0
    """
    weight = weight.detach().to(dtype).contiguous().cpu()
    flat = weight.flatten()
    sketch, square = torch.zeros(BUCKETS, dtype=torch.float64), 0.0
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK].double()
        square += float(block.square().sum())
        draw = torch.Generator().manual_seed(start // BLOCK)
        signs = torch.randint(0, 2, (len(block),), generator=draw, dtype=torch.int8).double() * 2 - 1
        signed = torch.nn.functional.pad(block * signs, (0, -len(block) % BUCKETS))
        sketch += signed.view(-1, BUCKETS).sum(0)
    sha = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    return Digest(tuple(weight.shape), sha, square**0.5, tuple(sketch.tolist()))


def _shard(name: str, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the part of a tensor that one rank of tensor parallelism holds."""
    layer = name.split(".")[-2] if name.endswith((".weight", ".bias")) else ""
    dim = SPLIT.get(layer)
    if size == 1 or dim is None or (dim >= weight.ndim):
        return weight
    if layer in ("embed_tokens", "lm_head"):  # vLLM pads the vocabulary before it splits it
        rows = -(-weight.shape[0] // VOCAB) * VOCAB // size
        return weight[rank * rows : (rank + 1) * rows]
    if weight.shape[dim] % size:
        raise ValueError(f"{name}: {weight.shape[dim]} rows or columns cannot be split over {size} ranks")
    return weight.chunk(size, dim)[rank]


def _stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with a checkpoint's experts, one by one there, stacked as models hold them."""
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in tensors:
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = weight
        else:
            yield name, weight
    for prefix, parts in experts.items():
        order = sorted({number for number, _ in parts})
        yield f"{prefix}.gate_up_proj", torch.stack([torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in order])
        yield f"{prefix}.down_proj", torch.stack([parts[n, "down"] for n in order])


def _files(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors in it")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is no mapping)
                yield name, tensors.get_tensor(name)


def digest_hf(model, dtype: torch.dtype = torch.bfloat16, rank: int = 0, size: int = 1) -> dict[str, Digest]:
    """Return name -> digest of a trainer's weights.

    Args:
        model: a Transformers model, a state dict of whole tensors, or a checkpoint's folder (read tensor by tensor).
        dtype: what the engine holds; fp32 master weights are cast to it, as weight synchronisation does.
        rank, size: of the engine's tensor parallelism, to compare with that rank's digest.

    Raises:
        ValueError: a folder without weights.
    """
    if isinstance(model, str | Path):
        tensors = _files(Path(model))
    else:
        tensors = (model if isinstance(model, Mapping) else model.state_dict()).items()
    return {name: digest(_shard(name, weight, rank, size), dtype) for name, weight in _stacked(tensors)}


def digest_vllm(model) -> dict[str, Digest]:
    """Return name -> digest of what one worker of vLLM holds, under Hugging Face's names.

    Tensors without elements are left out: vLLM's CPU kernels throw the unpacked weights of linear layers away, except in a
    verl run on a CPU (``VERL_PLATFORM=cpu``), where this package keeps them. :func:`coverage` says what that leaves.

    Args:
        model: vLLM's model; ``worker.model_runner.get_model()``.
    """
    modules, found = dict(model.named_modules()), {}
    for name, weight in model.named_parameters():
        if not weight.numel():
            continue
        path, leaf = name.rpartition(".")[::2]
        parent, layer = path.rpartition(".")[::2]
        module = modules[path]
        if layer in FUSED:
            for part, rows in zip(FUSED[layer], weight.split(list(module.output_partition_sizes)), strict=True):
                found[f"{parent}.{part}.{leaf}"] = digest(rows, weight.dtype)
        elif leaf in EXPERTS:
            prefix = path[: path.index("experts") + len("experts")]
            found[f"{prefix}.{EXPERTS[leaf]}"] = digest(weight, weight.dtype)
        else:
            if hasattr(module, "shard_indices"):  # vLLM pads the vocabulary
                weight = weight[: module.shard_indices.num_org_elements]
            found[name] = digest(weight, weight.dtype)
    return found


@dataclass(frozen=True)
class Coverage:
    """Names that both sides have, and those that only one has."""

    both: tuple[str, ...]
    trainer: tuple[str, ...]
    engine: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether no tensor was left out."""
        return not self.trainer and not self.engine

    def __str__(self) -> str:
        n = len(self.both)
        says = [f"{n} of {n + len(self.trainer) + len(self.engine)} tensors compared"]
        for side, names in (("trainer", self.trainer), ("engine", self.engine)):
            if names:
                rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
                says.append(f"only the {side} has {', '.join(names[:2])}{rest}")
        return "; ".join(says)


def coverage(trainer: Mapping[str, Digest], engine: Mapping[str, Digest]) -> Coverage:
    """Return which tensors two digests let one compare.

    Left out of the count: a head that is tied (equal to the embedding on the side that has it, and the embedding on both),
    and RoPE's frequencies, which old checkpoints hold (:mod:`.rope` compares them).
    """

    def only(side, other):
        def tied(name):
            head = name == HEAD and EMBEDDING in side and EMBEDDING in other
            return head and side[HEAD].sha256 == side[EMBEDDING].sha256

        return tuple(n for n in side if n not in other and not tied(n) and not n.endswith("rotary_emb.inv_freq"))

    return Coverage(tuple(n for n in trainer if n in engine), only(trainer, engine), only(engine, trainer))


def compare(trainer: Mapping[str, Digest], engine: Mapping[str, Digest]) -> list[Difference]:
    """Return the tensors that differ, largest difference first; none if all that both sides name are equal in every bit.

    What only one side names is not looked at: ask :func:`coverage`.

    Raises:
        ValueError: no name in common.
    """
    common = [name for name in trainer if name in engine]
    if not common:
        raise ValueError(
            f"no tensor in common: the trainer has {next(iter(trainer), 'none')}, ..., the engine {next(iter(engine), 'none')}, ..."
        )
    out = []
    for name in common:
        a, b = trainer[name], engine[name]
        if a.shape != b.shape:
            out.append(Difference(name, float("inf")))
        elif a.sha256 != b.sha256:
            distance = sum((x - y) ** 2 for x, y in zip(a.sketch, b.sketch, strict=True)) ** 0.5
            out.append(Difference(name, distance / max(a.norm, 1e-300)))
    return sorted(out, key=lambda difference: -difference.relative)
