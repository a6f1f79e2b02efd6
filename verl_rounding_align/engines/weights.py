"""Do trainer and engine hold the same weights? Digests under Hugging Face's names, without moving a weight.

Each tensor is hashed (SHA-256: equal bits or not) and sketched: with independent signs s_i, of the same seeds on both sides,
S_b is the sum of s_i w_i over i mod 64 = b. The sketch is linear and E |S(a) - S(b)|^2 = |a - b|^2, so that two digests also
tell by how much tensors differ.

Both sides are brought to one form first. The engine's room cuts its fused tensors into Hugging Face's parts
(``engines/vllm/weights.py``). The trainer's tensors are cut here to the part that one rank of the engine holds (:class:`Shard`),
and cast to the engine's dtype, as weight synchronisation does. A digest remembers its cast: what is equal after it need not
have been equal before, and :attr:`Coverage.equal` says so.

Families: those whose layers are named as Llama's (llama, mistral, qwen2, qwen3), and qwen3_moe's fused experts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

BUCKETS = 64
BLOCK = 1 << 20  # weights at a time; each block's signs have the block's number as seed
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# dimension that tensor parallelism splits; other tensors are whole on every rank
SPLIT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
SERVED = (torch.bfloat16, torch.float16)  # dtypes that engines hold as they are stored; others are cast to the first


@dataclass(frozen=True)
class Digest:
    """One tensor.

    Args:
        shape: of the part that was digested.
        sha256: of its bytes.
        norm: Euclidean, of all elements.
        sketch: 64 numbers.
        dtype: in which it was digested, by name.
        source: in which it was held before that; another one means that it was cast.
    """

    shape: tuple[int, ...]
    sha256: str
    norm: float
    sketch: tuple[float, ...]
    dtype: str = "bfloat16"
    source: str = "bfloat16"

    @classmethod
    def from_dict(cls, values: Mapping) -> Digest:
        """Return the digest whose fields, as JSON holds them, are ``values``.

        >>> one = digest(torch.ones(2))
        >>> Digest.from_dict(json.loads(json.dumps(asdict(one)))) == one
        True
        """
        return cls(**{**values, "shape": tuple(values["shape"]), "sketch": tuple(values["sketch"])})


@dataclass(frozen=True)
class Difference:
    """A tensor that differs, and by about how much: |a - b| / |a|; infinite for another shape."""

    name: str
    relative: float


@dataclass(frozen=True)
class Shard:
    """Which part of the weights one rank of an engine holds.

    Args:
        rank, size: of tensor parallelism.
        kv_heads: K/V heads of the whole model. They are split over the ranks as long as each gets one. With more ranks than
            heads every head is held by ``size / kv_heads`` ranks that follow each other.
        expert_rank, expert_size: of the split of each expert's intermediate size; None for rank and size.
        experts: numbers of the experts that the rank holds, in its order; None for all of them. With expert parallelism an
            expert is whole on its rank (``expert_size=1``).
        vocab_multiple: the vocabulary is padded to a multiple of it before it is split.
    """

    rank: int = 0
    size: int = 1
    kv_heads: int | None = None
    expert_rank: int | None = None
    expert_size: int | None = None
    experts: tuple[int, ...] | None = None
    vocab_multiple: int = 64

    def as_dict(self) -> dict:
        """Return the fields as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> Shard:
        """Return the shard that :meth:`as_dict` was made of.

        >>> one = Shard(1, 2, kv_heads=2, experts=(2, 3))
        >>> Shard.from_dict(json.loads(json.dumps(one.as_dict()))) == one
        True
        """
        experts = values.get("experts")
        return cls(**{**values, "experts": None if experts is None else tuple(experts)})

    def part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor that the rank holds.

        Args:
            name: Hugging Face's; experts are stacked, as models hold them.
            weight: the whole tensor.

        Raises:
            ValueError: it cannot be split so, or the number of K/V heads decides and is not known.
        """
        layer = name.split(".")[-2] if name.endswith((".weight", ".bias")) else ""
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return self._experts(name, weight)
        dim = SPLIT.get(layer)
        if self.size == 1 or dim is None or dim >= weight.ndim:
            return weight
        if layer in ("embed_tokens", "lm_head"):
            rows = -(-weight.shape[0] // self.vocab_multiple) * self.vocab_multiple // self.size
            return weight[self.rank * rows : (self.rank + 1) * rows]
        if layer not in ("k_proj", "v_proj"):
            return _cut(name, weight, dim, self.rank, self.size)
        if self.kv_heads is None:
            raise ValueError(
                f"{name}: how {self.size} ranks share it depends on the number of K/V heads; give kv_heads"
            )
        if self.size < self.kv_heads:
            return _cut(name, weight, dim, self.rank, self.size)
        if self.size % self.kv_heads:
            raise ValueError(f"{name}: {self.kv_heads} K/V heads cannot be shared by {self.size} ranks")
        return _cut(name, weight, dim, self.rank // (self.size // self.kv_heads), self.kv_heads)

    def _experts(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of stacked experts, (experts, 2 * size, hidden) or (experts, hidden, size)."""
        if self.experts is not None:
            weight = weight[list(self.experts)]
        rank = self.rank if self.expert_rank is None else self.expert_rank
        size = self.size if self.expert_size is None else self.expert_size
        if size == 1:
            return weight
        if name.endswith("down_proj"):
            return _cut(name, weight, 2, rank, size)
        # gate and up lie one after the other, and each is split
        return torch.cat([_cut(name, half, 1, rank, size) for half in weight.chunk(2, 1)], 1)


def _cut(name: str, weight: torch.Tensor, dim: int, part: int, parts: int) -> torch.Tensor:
    """Return one of equal parts along a dimension."""
    if weight.shape[dim] % parts:
        raise ValueError(f"{name}: {weight.shape[dim]} rows or columns cannot be split over {parts} ranks")
    return weight.chunk(parts, dim)[part]


def digest(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Digest:
    """Return the digest of one tensor, cast to ``dtype`` first; any device, any shape.

    >>> round(digest(torch.ones(2, 3)).norm ** 2, 9)
    6.0
    """
    source = _name(weight.dtype if weight.is_floating_point() else dtype)
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
    return Digest(tuple(weight.shape), sha, square**0.5, tuple(sketch.tolist()), _name(dtype), source)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def digest_hf(
    model, dtype: torch.dtype | None = None, shard: Shard | None = None, engine: Mapping[str, Digest] | None = None
) -> dict[str, Digest]:
    """Return name -> digest of a trainer's weights.

    Args:
        model: a Transformers model, a state dict of whole tensors, or a checkpoint's folder (read tensor by tensor).
        dtype: cast to it; None for bf16 and fp16 as they are held, and others to bf16.
        shard: digest the part that this rank of an engine holds; None for whole tensors. K/V heads that it does not
            state are read from the model's config.
        engine: the engine's digests; a tensor that it has too is cast to the engine's dtype, as weight synchronisation does.

    Raises:
        ValueError: a folder without weights, or tensors that the ranks cannot share.
    """
    shard = shard or Shard()
    if shard.kv_heads is None:
        shard = replace(shard, kv_heads=_kv_heads(model))
    if isinstance(model, str | Path):
        tensors = _files(Path(model))
    else:
        tensors = (model if isinstance(model, Mapping) else model.state_dict()).items()
    found = {}
    for name, weight in _stacked(tensors):
        to = dtype or (weight.dtype if weight.dtype in SERVED else SERVED[0])
        if engine and name in engine:
            to = getattr(torch, engine[name].dtype)
        found[name] = digest(shard.part(name, weight), to)
    return found


def _kv_heads(model) -> int | None:
    """Return how many K/V heads a model's config says it has; None for a state dict, or where it does not say."""
    if isinstance(model, str | Path):
        file = Path(model) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
    else:
        config = vars(model.config) if hasattr(model, "config") else {}
    return config.get("num_key_value_heads") or config.get("num_attention_heads")


@dataclass(frozen=True)
class Coverage:
    """What two sides' digests let one compare.

    Args:
        both: names that both sides have.
        trainer, engine: names that only one side has.
        casts: the casts that were made first, in words: ``the trainer's float32 is cast to bfloat16``.
    """

    both: tuple[str, ...]
    trainer: tuple[str, ...]
    engine: tuple[str, ...]
    casts: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether no tensor was left out."""
        return not self.trainer and not self.engine

    @property
    def equal(self) -> str:
        """What tensors without a difference are, in words: equal in every bit, or equal after a cast.

        >>> Coverage(("x",), (), ()).equal
        'equal in every bit'
        >>> Coverage(("x",), (), (), ("the trainer's float32 is cast to bfloat16",)).equal
        "equal once the trainer's float32 is cast to bfloat16"
        """
        return f"equal once {' and '.join(self.casts)}" if self.casts else "equal in every bit"

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

    both = tuple(n for n in trainer if n in engine)
    casts = {
        f"the {side}'s {digests[name].source} is cast to {digests[name].dtype}": None
        for side, digests in (("trainer", trainer), ("engine", engine))
        for name in both
        if digests[name].source != digests[name].dtype
    }
    return Coverage(both, only(trainer, engine), only(engine, trainer), tuple(casts))


def compare(trainer: Mapping[str, Digest], engine: Mapping[str, Digest]) -> list[Difference]:
    """Return the tensors that differ, largest difference first.

    None differs if all tensors that both sides name are equal, as :attr:`Coverage.equal` puts it. What only one side names
    is not looked at: ask :func:`coverage`.

    Raises:
        ValueError: no name in common, or a tensor that was digested in two dtypes.
    """
    common = [name for name in trainer if name in engine]
    if not common:
        raise ValueError(
            f"no tensor in common: the trainer has {next(iter(trainer), 'none')}, ..., the engine {next(iter(engine), 'none')}, ..."
        )
    out = []
    for name in common:
        a, b = trainer[name], engine[name]
        if a.dtype != b.dtype:
            raise ValueError(
                f"{name}: digested in {a.dtype} for the trainer and in {b.dtype} for the engine; digest the trainer with engine="
            )
        if a.shape != b.shape:
            out.append(Difference(name, float("inf")))
        elif a.sha256 != b.sha256:
            distance = sum((x - y) ** 2 for x, y in zip(a.sketch, b.sketch, strict=True)) ** 0.5
            out.append(Difference(name, distance / max(a.norm, 1e-300)))
    return sorted(out, key=lambda difference: -difference.relative)
