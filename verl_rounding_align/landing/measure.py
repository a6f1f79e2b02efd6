"""Landing score: how unevenly values fall between the two bf16 numbers that they are rounded to.

The position of an fp32 value is how far it lies from the adjacent bf16 number toward zero to the one away from zero,

    u = (|x| - lo) / (hi - lo),    lo <= |x| < hi adjacent bf16 numbers, 0 <= u < 1.

bf16 is the upper half of fp32, and bit patterns are ordered as magnitudes are, so u is *exactly* the lower 16 bits of the
pattern divided by 65536: for either sign, across powers of two (the step is the one above the value) and for subnormals,
which both formats have with the same exponent. Three conventions: a value that bf16 represents, zeros included, is counted
and lands at 0; between the largest finite bf16 number and infinity, hi is 2^128, as it is for rounding; infinities and NaN
are left out and counted.

The score of N values is the root mean square of the first 16 Fourier magnitudes of their distribution,

    c_k = 1/N sum exp(-2 pi i k u),    score = sqrt(1/16 sum over k = 1..16 of |c_k|^2),

0 if positions are spread evenly, 1 if all are the same. N independent, uniform positions have E |c_k|^2 = 1/N: they score
1/sqrt(N), the *floor*, within about 12 % (sqrt of a mean of 16 exponential variables). A model's values are correlated, so
that their own floor is higher: a score of a few floors is no evidence of clustering.

Positions are kept as a histogram of all 65536 of them (512 KiB per quantity and layer, whatever the number of tokens):
streaming changes nothing, in any bit. Source: "Where Rounding Happens Matters", section on the choice of locations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..families import Family
from ..logprobs.tally import VERSION
from ..regions.rope import rotate_half
from ..report import rows as report
from ..rounding import up
from ..trainers.huggingface import find_base_models

POSITIONS = 1 << 16
HARMONICS = 16
BINS = 64
WINDOW = 512  # tokens per forward pass: one layer's tensors of so many tokens are held at a time
ALWAYS = "always"


def landed(x: torch.Tensor) -> torch.Tensor:
    """Return the positions of the finite values of ``x``, in 65536ths: int32, flat.

    Args:
        x: fp32, any shape.

    Raises:
        ValueError: another dtype.

    >>> landed(torch.tensor([1.0, -1.0 - 2**-9, 0.0, float("inf")])).tolist()
    [0, 16384, 0]
    """
    if x.dtype != torch.float32:
        raise ValueError(f"landed: positions are those of torch.float32 values, got {x.dtype}")
    bits = x.detach().contiguous().view(torch.int32).flatten()
    finite = (bits & 0x7F800000) != 0x7F800000
    return (bits if bool(finite.all()) else bits[finite]) & 0xFFFF


def score_of(counts: np.ndarray) -> float:
    """Return the landing score of a histogram of positions; NaN of nothing.

    Args:
        counts: (positions,), of any number of equal parts of a step.

    >>> score_of(np.array([5, 0, 0, 0] * 16)), score_of(np.ones(64)), score_of(np.array([3] + [0] * 63))
    (0.25, 0.0, 1.0)
    """
    n = counts.sum()
    if n == 0:
        return math.nan
    c = np.fft.rfft(counts.astype(np.float64))[1 : HARMONICS + 1] / n
    return float(np.sqrt(np.mean(np.abs(c) ** 2)))


class Counts:
    """How many values landed at each position, so far.

    Attributes:
        counts: int64 (65536,), of the finite values.
        nonfinite: how many infinities and NaN were left out.
    """

    def __init__(self):
        self.counts = np.zeros(POSITIONS, dtype=np.int64)
        self.nonfinite = 0

    def add(self, x: torch.Tensor) -> None:
        """Count the values of ``x``: fp32, any shape."""
        positions = landed(x)
        self.nonfinite += x.numel() - positions.numel()
        self.counts += torch.bincount(positions, minlength=POSITIONS).cpu().numpy()

    @property
    def values(self) -> int:
        """How many values were counted: the N of score and floor."""
        return int(self.counts.sum())

    def score(self) -> float:
        """Return the landing score; NaN of nothing."""
        return score_of(self.counts)

    def histogram(self, bins: int = BINS) -> list[int]:
        """Return how many values landed in each of ``bins`` equal parts of [0, 1); ``bins`` divides 65536."""
        return self.counts.reshape(bins, POSITIONS // bins).sum(1).tolist()


def floor(n: int) -> float:
    """Return the root mean square score of ``n`` independent, uniform positions: 1/sqrt(n)."""
    return 1 / math.sqrt(n) if n else math.nan


@dataclass(frozen=True)
class Quantity:
    """An fp32 value that gets rounded.

    Args:
        kind: what the paper calls it.
        formula: how it is recomputed from the bf16 tensors of the running model; factors are bf16 unless said otherwise.
        point: the rounding points that store it; ALWAYS: every engine rounds it.
    """

    kind: str
    formula: str
    point: str


def _norms(prefix: str, normed: str, out: str) -> dict[str, Quantity]:
    return {
        f"{prefix}normed": Quantity("norm", "h * rsqrt(mean(h^2) + eps)", normed),
        f"{prefix}norm": Quantity("norm", "weight * normed, normed in fp32", out),
        f"{prefix}norm of stored normed": Quantity(
            "norm, twice rounded", "weight * normed, normed stored in bf16", out
        ),
    }


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTITIES = {
    **{name: Quantity("projection", "x @ weight^T (+ bias), accumulated in fp32", ALWAYS) for name in PROJECTIONS},
    "attention": Quantity("attention", "softmax(q k^T / sqrt(head_dim)) v, all in fp32", ALWAYS),
    **_norms("", "normed", ALWAYS),
    **_norms("Q/K ", "qk_normed", "qk_norm"),
    "SiLU": Quantity("SiLU", "silu(gate)", "act"),
    "SiLU, experts": Quantity("SiLU", "silu(gate) of the experts", "act"),
    "RoPE products": Quantity("RoPE product", "x * cos and rotate_half(x) * sin, x = q and k", "product"),
    "RoPE cos products": Quantity("RoPE product", "x * cos, x = q and k", "product"),
    "RoPE sin products": Quantity("RoPE product", "rotate_half(x) * sin, x = q and k", "product"),
    "RoPE sum": Quantity("RoPE sum", "the two products' sum, products in fp32", ALWAYS),
    "RoPE sum of stored products": Quantity(
        "RoPE sum, twice rounded", "the two products' sum, products in bf16", ALWAYS
    ),
    "sum after attention": Quantity("residual sum", "residual + attention's output", "sum, carry"),
    "sum after MLP": Quantity("residual sum", "residual + the MLP's output", "sum, carry"),
}


@dataclass(frozen=True)
class LandingRow:
    """One quantity.

    Args:
        quantity, kind, point: see ``QUANTITIES``.
        score: median over layers.
        floor: of independent, uniform positions, as many as ``values``.
        values: per layer (of the layer with fewest).
        nonfinite: left out, all layers.
        layers, scores: index and score of each layer that has it.
        pictured, histogram: the middle one of these layers; how many values landed in each 64th of [0, 1) there.
    """

    quantity: str
    kind: str
    point: str
    score: float
    floor: float
    values: int
    nonfinite: int
    layers: tuple[int, ...]
    scores: tuple[float, ...]
    pictured: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Landing:
    """What :func:`landing` found: rows in the order of ``QUANTITIES``, what could not be seen (in words), tokens read."""

    rows: tuple[LandingRow, ...]
    absent: tuple[str, ...]
    tokens: int


See = Callable[[str, int, torch.Tensor], None]


@contextmanager
def watch(model: nn.Module, see: See) -> Iterator[tuple[set[tuple[str, int]], list[str]]]:
    """Show ``see`` every quantity, before it is rounded, in each forward pass inside the context.

    Values are recomputed in fp32 from the bf16 tensors that the running model's modules get and return; the pass itself
    is not changed. Hooks sit on module instances and are removed at the end. Sequences without padding only.

    Args:
        model: a Transformers model of a supported family, bf16, unpatched.
        see: called with a name of ``QUANTITIES``, the layer's index and an fp32 tensor.

    Yields:
        (the (quantity, layer) pairs that will be seen, what will not be in words).

    Raises:
        ValueError: unsupported family, another dtype, another activation, or a module whose forward is patched.
    """
    ((fqn, stack, family),) = find_base_models(model)
    _check(stack, f"{fqn}." if fqn else "")
    handles, expected, absent = [], set(), []
    experts = sum(hasattr(layer.mlp, "experts") for layer in stack.layers)
    if experts:
        absent.append(f"router and projections of the experts in {experts} layers (grouped matmuls, not modules)")
    try:
        for i, layer in enumerate(stack.layers):
            _watch_layer(layer, i, family, see, handles, expected)
        yield expected, absent
    finally:
        for handle in handles:
            handle.remove()


def _check(stack: nn.Module, prefix: str) -> None:
    for name, parameter in stack.named_parameters():
        if parameter.dtype != torch.bfloat16:
            raise ValueError(
                f"landing: {prefix}{name} is {parameter.dtype}; positions are between bf16 numbers, load the model with "
                "dtype=torch.bfloat16"
            )
    for name, module in stack.named_modules():
        if "forward" in module.__dict__:
            raise ValueError(
                f"landing: {prefix}{name} ({type(module).__name__}) has its forward patched; undo() that first"
            )
    if stack.config.hidden_act != "silu":
        raise ValueError(f"landing: hidden_act={stack.config.hidden_act!r}: expected 'silu'")


def _watch_layer(layer: nn.Module, index: int, family: Family, see: See, handles: list, expected: set) -> None:
    """Hook one decoder layer; see :func:`watch`."""
    now: dict[str, object] = {}  # tensors of this layer that a later hook of the same forward pass needs

    def hook(module: nn.Module, function: Callable, *quantities: str, register="register_forward_hook") -> None:
        handles.append(getattr(module, register)(function, with_kwargs=True))
        expected.update((quantity, index) for quantity in quantities)

    def show(quantity: str, value: torch.Tensor) -> None:
        see(quantity, index, value)

    def enter(module, args, kwargs):
        now["residual"] = args[0] if args else kwargs["hidden_states"]

    def projection(name: str, keep: bool):
        def function(module, args, kwargs, output):
            bias = None if module.bias is None else up(module.bias)
            show(name, F.linear(up(args[0]), up(module.weight), bias))
            if keep:
                now[name] = output

        return function

    def norm(prefix: str, keep: str | None = None):
        def function(module, args, kwargs, output):
            h, weight = up(args[0]), up(module.weight)
            normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            show(f"{prefix}normed", normed)
            show(f"{prefix}norm", weight * normed)
            show(f"{prefix}norm of stored normed", weight * up(normed.to(output.dtype)))
            if keep == "residual":
                now[keep] = args[0]
            elif keep is not None:
                now[keep] = output

        return function

    def attention(module, args, kwargs, output):
        cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
        q, k, v = (now.pop(name) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (x.view(*x.shape[:2], -1, module.head_dim).transpose(1, 2) for x in (q, k, v))
        rotated = []
        for x in (q, k):
            direct, crossed = up(x) * up(cos.unsqueeze(1)), rotate_half(up(x)) * up(sin.unsqueeze(1))
            stored = up(direct.to(x.dtype)) + up(crossed.to(x.dtype))
            for name, product in (("cos", direct), ("sin", crossed)):
                show("RoPE products", product)
                show(f"RoPE {name} products", product)
            show("RoPE sum", direct + crossed)
            show("RoPE sum of stored products", stored)
            rotated.append(stored.to(x.dtype))  # as attention reads them
        show("attention", _attention(module, *rotated, v))
        show("sum after attention", up(now["residual"]) + up(output[0]))

    def silu(name: str):
        return lambda module, args, kwargs, output: show(name, F.silu(up(args[0])))

    def mlp(module, args, kwargs, output):
        delta = output[0] if isinstance(output, tuple) else output
        show("sum after MLP", up(now.pop("residual")) + up(delta))

    hook(layer, enter, register="register_forward_pre_hook")
    norms = ("normed", "norm", "norm of stored normed")
    hook(layer.input_layernorm, norm(""), *norms)
    for name in PROJECTIONS[:4]:
        normed = family.qk_norm and name in ("q_proj", "k_proj")
        hook(getattr(layer.self_attn, name), projection(name, keep=not normed and name != "o_proj"), name)
        if normed:
            module = getattr(layer.self_attn, name.replace("proj", "norm"))
            hook(module, norm("Q/K ", keep=name), *(f"Q/K {q}" for q in norms))
    rope = [name for name in QUANTITIES if name.startswith("RoPE")]
    hook(layer.self_attn, attention, *rope, "attention", "sum after attention")
    hook(layer.post_attention_layernorm, norm("", keep="residual"), *norms)
    if hasattr(layer.mlp, "experts"):
        hook(layer.mlp.experts.act_fn, silu("SiLU, experts"), "SiLU, experts")
    else:
        for name in PROJECTIONS[4:]:
            hook(getattr(layer.mlp, name), projection(name, keep=False), name)
        hook(layer.mlp.act_fn, silu("SiLU"), "SiLU")
    hook(layer.mlp, mlp, "sum after MLP")


def _attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention in fp32, with the module's sliding window if it has one; q, k, v (batch, heads, tokens, head_dim)."""
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (up(x).repeat_interleave(groups, dim=1) for x in (k, v))
    # Mistral's attention takes it from the config; those that set it per layer have an attribute
    window, mask = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)), None
    if window is not None and window < tokens:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(up(q), k, v, attn_mask=mask, is_causal=mask is None, scale=module.scaling)


def landing(
    model: nn.Module, batches: Iterable[torch.Tensor], progress: Callable[[int], None] = lambda n: None
) -> Landing:
    """Return the landing score of every quantity in ``model`` on these tokens; see the module's docstring.

    Args:
        model: a Transformers model of a supported family, bf16, unpatched; runs in eval mode, comes back as it was.
        batches: token ids, int64 (batch, tokens), without padding; read one by one, none is kept.
        progress: called with the number of tokens done.

    Raises:
        ValueError: see :func:`watch`; or no tokens.
    """
    counts: dict[tuple[str, int], Counts] = defaultdict(Counts)
    tokens, training = 0, model.training
    ((_, stack, _),) = find_base_models(model)
    device = next(stack.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), watch(stack, lambda q, i, x: counts[q, i].add(x)) as (expected, absent):
            for ids in batches:
                stack(input_ids=ids.to(device), use_cache=False)
                tokens += ids.numel()
                progress(ids.numel())
    finally:
        model.train(training)
    if not tokens:
        raise ValueError("landing: no tokens to measure on")
    unseen = defaultdict(list)
    for quantity, i in sorted(expected - counts.keys()):
        unseen[quantity].append(str(i))
    absent += [f"{quantity}: its module did not run in layers {', '.join(ls)}" for quantity, ls in unseen.items()]
    rows = (_row(q, {i: c for (name, i), c in sorted(counts.items()) if name == q}) for q in QUANTITIES)
    return Landing(tuple(row for row in rows if row is not None), tuple(absent), tokens)


def _row(quantity: str, layers: dict[int, Counts]) -> LandingRow | None:
    if not layers:
        return None
    scores = {i: counts.score() for i, counts in layers.items()}
    pictured = sorted(layers)[len(layers) // 2]
    values = min(counts.values for counts in layers.values())
    return LandingRow(
        quantity=quantity,
        kind=QUANTITIES[quantity].kind,
        point=QUANTITIES[quantity].point,
        score=median(scores.values()),
        floor=floor(values),
        values=values,
        nonfinite=sum(counts.nonfinite for counts in layers.values()),
        layers=tuple(scores),
        scores=tuple(scores.values()),
        pictured=pictured,
        histogram=tuple(layers[pictured].histogram()),
    )


# ---- text


def windows(blocks: Iterable[str], tokenizer, tokens: int, length: int = WINDOW) -> Iterator[torch.Tensor]:
    """Yield at most ``tokens`` token ids of a text, int64 (1, up to ``length``) at a time; the text is read as needed.

    Every window begins with the tokenizer's beginning-of-sequence token, if it sets one by itself.

    Args:
        blocks: the text in pieces; a piece is tokenized on its own.
        tokenizer: of Transformers.
    """
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []
    kept = list(start)
    for block in blocks:
        kept += tokenizer(block, add_special_tokens=False, verbose=False).input_ids
        while len(kept) >= length and tokens >= length:
            yield torch.tensor([kept[:length]])
            kept, tokens = start + kept[length:], tokens - length
        if len(kept) >= tokens:
            break
    if kept[:tokens] != start[:tokens]:
        yield torch.tensor([kept[:tokens]])


def read_blocks(path: Path, size: int = 1 << 14) -> Iterator[str]:
    """Yield whole lines of a UTF-8 text file, about ``size`` bytes at a time.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            while lines := file.readlines(size):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ValueError(f"text={str(path)!r}: cannot be read: {reason}") from error


# ---- the command


def run_landing(model: str, text: Path | None, tokens: int, window: int, json: str | None) -> Landing:
    """Measure, print and write; see the command's help for the arguments.

    Raises:
        ValueError: an argument that is not legal, a model that is not there, a text without tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..engines.spec import ModelSpec

    if tokens < 1:
        raise ValueError(f"tokens={tokens}: expected at least 1")
    ModelSpec.from_model(model)
    longest = AutoConfig.from_pretrained(model).max_position_embeddings
    if not 2 <= window <= longest:
        raise ValueError(f"window={window}: expected 2 to {longest}, the positions that the model has")
    with resources.as_file(resources.files(__package__) / "opticks.txt") as default:
        path = default if text is None else text
        if not any(block.strip() for block in read_blocks(path)):
            raise ValueError(f"text={str(path)!r}: no text in it")
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        except OSError as error:
            raise ValueError(f"model={model!r}: cannot be loaded: {str(error).splitlines()[0]}") from error
        loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
        with report.progress() as progress:
            task = progress.add_task("tokens", total=tokens)
            found = landing(
                loaded, windows(read_blocks(path), tokenizer, tokens, window), lambda n: progress.advance(task, n)
            )
            progress.update(task, total=found.tokens)
    name = Path(path).name
    report.show(
        render(found, f"{Path(model).name}, {found.tokens:,} tokens of {name} in windows of {window}"),
        *map("not seen: {}".format, found.absent),
    )
    if json:
        report.write_json(json, {"model": Path(model).name, "text": name, "window": window, **as_json(found)})
    return found


COLUMNS = (
    "quantity",
    "stored by",
    "score, median layer",
    "lowest to highest layer",
    "floor",
    "score / floor",
    "values per layer",
    "layers",
)


def cells(row: LandingRow) -> list[str]:
    """Return a row of the table; columns are ``COLUMNS``."""
    return [
        row.quantity,
        row.point,
        f"{row.score:.2g}",
        f"{min(row.scores):.2g} to {max(row.scores):.2g}",
        f"{row.floor:.2g}",
        f"{row.score / row.floor:.1f}",
        f"{row.values:,}" + (f" ({row.nonfinite:,} not finite left out)" if row.nonfinite else ""),
        str(len(row.layers)),
    ]


def render(found: Landing, title: str):
    """Return a rich table."""
    return report.table(f"Landing score: {title}", COLUMNS, [cells(row) for row in found.rows])


def as_json(found: Landing) -> dict:
    """Return the rows as plain data, with how each quantity is defined."""
    rows = [{**asdict(row), "formula": QUANTITIES[row.quantity].formula} for row in found.rows]
    head = {"schema": "verl-rounding-align/landing", "schema_version": VERSION}
    return {**head, "tokens": found.tokens, "absent": list(found.absent), "rows": rows}
