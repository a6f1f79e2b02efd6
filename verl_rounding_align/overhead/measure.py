"""What alignment costs: time and memory of an aligned model against the same model unaligned (eager Hugging Face).

One measurement is a pair of *arms* (ways to run one model on one input) in one *phase* (``forward`` without gradients,
``forward_backward``, ``step`` with AdamW) and one *scope* (``layers``: the decoder stack from embeddings to final norm;
``model``: the causal LM with its loss). Samples are interleaved in pairs, the order within a pair alternating, each
pair on another input set. The estimate is the median of the paired ratios with a bootstrap interval; where the effect
is no larger than the spread there is no ratio, and the verdict says so.

Memory has no noise: bytes that autograd keeps for backward (each storage once, parameters excluded), and the peak of
allocated bytes above what was allocated before (the allocator's own events on CPU, ``max_memory_allocated`` on CUDA).

Mirrors: verl 0.9 FSDP actor: bf16 model, AdamW; ``forward`` is its log-prob pass, ``forward_backward`` its micro-batch.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

from .. import backend as backends
from .. import families
from ..plan import parse_plan
from ..trainers.huggingface import align

PHASES = ("forward", "forward_backward", "step")
SCOPES = ("layers", "model")
PLANS = ("rope", "swiglu", "add_rms_norm", "carry", "paper", "all")
MINIMUM_PAIRS = 5  # fewer pairs have no interval worth the name


def _shape(model_type, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, theta, eps, tied, positions):
    return dict(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rope_parameters=dict(rope_type="default", rope_theta=theta),
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
    )


# the sizes in the public configs; a new shape is one row
SHAPES = {
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 1e5, 1e-5, True, 8192),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-1.7b": _shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 1e6, 1e-6, True, 40960),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, 1e-6, False, 40960),
    "deepseek-r1-distill-qwen-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 1e4, 1e-6, False, 131072),
}


def _choose(name: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: unknown {name} {value!r}; choose from {', '.join(choices)}")
    return value


def shape_config(shape: str, family: str | None = None, layers: int | None = None):
    """Return the Transformers config of a row of ``SHAPES``.

    Args:
        shape: a key of ``SHAPES``.
        family: compute these sizes as another supported dense family; None for the shape's own.
        layers: number of decoder layers; None for the shape's own.

    Raises:
        ValueError: unknown shape or family, or a family with experts, whose sizes no shape has.
    """
    from transformers import AutoConfig

    sizes = dict(SHAPES[_choose("shape", shape, SHAPES)])
    model_type = sizes.pop("model_type")
    row = families.get(family or model_type, key="family")
    if row.experts:
        raise ValueError(f"family={row.model_type!r}: shapes are dense; measure a mixture of experts with --model")
    return AutoConfig.for_model(row.model_type, **{**sizes, **({"num_hidden_layers": layers} if layers else {})})


def build(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    layers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
):
    """Return ``(label, causal LM in bf16, train mode)``: the weights in folder ``model``, or random ones of ``shape``.

    Raises:
        ValueError: neither or both of ``model`` and ``shape``, or an unknown one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if (model is None) == (shape is None):
        raise ValueError("give either a model (folder or hub name) or a shape (with or without a family)")
    if model is not None:
        config = AutoConfig.from_pretrained(model)
        families.get(config.model_type)
        if layers:
            config.num_hidden_layers = layers
        lm = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.bfloat16).to(device)
        return str(model), lm.train()
    config = shape_config(shape, family, layers)
    own = config.model_type == SHAPES[shape]["model_type"]
    return shape if own else f"{shape} as {config.model_type}", from_config(config, device, seed)


def from_config(config, device: str = "cpu", seed: int = 0):
    """Return a causal LM of ``config`` with random weights, bf16, in train mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


# ---------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Comparison:
    """Paired samples of a baseline A and a variant B, and what they support.

    Args:
        baseline_s, variant_s: medians, seconds.
        baseline_iqr, variant_iqr: interquartile range over median.
        ratio: median of B_i / A_i; None where the effect |ratio - 1| is no larger than the spread.
        low, high: 95 % percentile-bootstrap interval of that median, pairs resampled.
        spread: the longer arm of the interval.
        verdict: the ratio with its interval, or why there is none.
        baseline_samples, variant_samples: seconds, pair by pair.
    """

    baseline_s: float
    variant_s: float
    baseline_iqr: float
    variant_iqr: float
    ratio: float | None
    low: float
    high: float
    spread: float
    verdict: str
    baseline_samples: tuple[float, ...]
    variant_samples: tuple[float, ...]


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    return torch.quantile(values, q, dim=-1)


def compare(baseline: Sequence[float], variant: Sequence[float], resamples: int = 2000, seed: int = 0) -> Comparison:
    """Return the Comparison of paired samples.

    Args:
        baseline, variant: seconds; ``baseline[i]`` and ``variant[i]`` were measured next to each other.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: fewer than ``MINIMUM_PAIRS`` pairs, or unequal numbers.

    >>> compare([1.0] * 5, [0.9] * 5).verdict
    '0.900x (95 %: 0.900-0.900)'
    >>> compare([1.0, 1.2, 1.0, 1.2, 1.0], [1.1, 1.1, 1.1, 1.1, 1.1]).verdict
    'no ratio: effect 10.0 % is within the spread 18.3 % (95 %: 0.917-1.100)'
    """
    if len(baseline) != len(variant) or len(baseline) < MINIMUM_PAIRS:
        raise ValueError(
            f"pairs={min(len(baseline), len(variant))}: at least {MINIMUM_PAIRS} complete pairs are needed for an interval"
        )
    a, b = (torch.tensor(list(x), dtype=torch.float64) for x in (baseline, variant))
    ratios = b / a
    point = _quantile(ratios, 0.5).item()
    draws = torch.randint(len(ratios), (resamples, len(ratios)), generator=torch.Generator().manual_seed(seed))
    medians = _quantile(ratios[draws], 0.5)
    low, high = _quantile(medians, 0.025).item(), _quantile(medians, 0.975).item()
    effect, spread = abs(point - 1), max(point - low, high - point)
    interval = f"(95 %: {low:.3f}-{high:.3f})"
    seen = effect > spread
    verdict = (
        f"{point:.3f}x {interval}"
        if seen
        else f"no ratio: effect {100 * effect:.1f} % is within the spread {100 * spread:.1f} % {interval}"
    )
    medians_s = [_quantile(x, 0.5).item() for x in (a, b)]
    iqrs = [(_quantile(x, 0.75) - _quantile(x, 0.25)).item() / m for x, m in zip((a, b), medians_s, strict=True)]
    return Comparison(
        *medians_s, *iqrs, point if seen else None, low, high, spread, verdict, tuple(baseline), tuple(variant)
    )


# -------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(run: Callable[[], object], exclude: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that autograd keeps for backward while ``run()`` computes: each storage once.

    Args:
        run: a forward pass that was run before (no compilation may happen here); its result is kept until the count is made.
        exclude: tensors whose storages do not count (the parameters).
    """
    skip = {x.untyped_storage().data_ptr() for x in exclude}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storage keeps its address from being used again

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage
        return x.detach()  # x itself may be the node's own output: a reference cycle that is never collected

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return total


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Return the peak of allocated bytes during ``run()`` above what was allocated before it.

    CPU: the running sum of the allocator's events in torch's profiler (scratch memory inside oneDNN is not seen).
    CUDA: ``torch.cuda.max_memory_allocated``.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


# ---------------------------------------------------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    Args:
        name: what the row is called.
        plan: ``str`` of the plan, ``none`` for an unaligned model.
        backend: of the regions; ``-`` where there are none.
        enter: (model, scope) -> context manager that yields the callable to measure.
    """

    name: str
    plan: str
    backend: str
    enter: Callable[[torch.nn.Module, str], contextlib.AbstractContextManager[Callable]]


def _call(model, scope: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return inputs -> output: embeddings -> hidden states (``layers``), token ids -> logits (``model``)."""
    if scope == "layers":
        stack = model.get_decoder()
        return lambda x: stack(inputs_embeds=x, use_cache=False).last_hidden_state
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def unaligned() -> Arm:
    """Return the baseline: the model as Hugging Face runs it, op by op."""
    return Arm("none", "none", "-", lambda model, scope: contextlib.nullcontext(_call(model, scope)))


def aligned(regions: str, engine: str, backend: str) -> Arm:
    """Return the arm of a model aligned with a value of the key; aligned when entered, undone when left."""
    plan = parse_plan(regions, engine=engine, key="plan")

    @contextlib.contextmanager
    def enter(model, scope):
        alignment = align(model, plan, backend=backend, key="plan")
        try:
            yield _call(model, scope)
            assert not alignment.idle(), f"sites that were patched and never ran: {alignment.idle()}"
        finally:
            alignment.undo()

    return Arm(regions, str(plan), backend, enter)


def whole_model_compile(emulate: bool = False) -> Arm:
    """Return the arm that most users try first: ``torch.compile`` of the whole model, dynamic shapes found by Dynamo.

    Args:
        emulate: with ``emulate_precision_casts``, so that the compiled model rounds where eager does.
    """
    compiled: dict[tuple[int, str], Callable] = {}

    @contextlib.contextmanager
    def enter(model, scope):
        key = (id(model), scope)
        if key not in compiled:
            compiled[key] = torch.compile(_call(model, scope), options=dict(backends.OPTIONS) if emulate else None)
        yield compiled[key]

    return Arm("torch.compile" + (", emulate_precision_casts" if emulate else ""), "none", "-", enter)


def fp32_head(under: Arm | None = None) -> Arm:
    """Return the arm whose LM head multiplies in fp32 (scope ``model`` only).

    Args:
        under: the arm that runs the layers; None for an unaligned model.
    """
    layers = under or unaligned()

    @contextlib.contextmanager
    def enter(model, scope):
        _choose("scope", scope, ("model",))
        stack, head = model.get_decoder(), model.get_output_embeddings()

        def call(ids):
            hidden = stack(input_ids=ids, use_cache=False).last_hidden_state
            return F.linear(hidden.float(), head.weight.float())

        with layers.enter(model, scope):
            yield call

    return Arm(f"{under.name}, and an fp32 LM head" if under else "fp32 LM head", layers.plan, layers.backend, enter)


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Memory:
    """Bytes of one forward and backward pass: kept for backward, and the peak above what was allocated before."""

    saved: int
    peak: int


@dataclass(frozen=True)
class Row:
    """One line of the overhead table: an arm against the unaligned model.

    Args:
        arm, plan, backend: see :class:`Arm`; ``baseline`` names the arm it is compared with.
        scope, phase: see the module's docstring.
        model, layers, tokens: label of the model, its decoder layers, tokens per sample (one sequence).
        checkpointing: whether decoder layers were checkpointed (non-reentrant).
        device, threads: name of the device; CPU threads of torch.
        clock: what ``timing`` counts: ``process`` (CPU time; one CPU thread), ``wall`` or ``cuda`` (events).
        timing, wall: the Comparison by ``clock`` and by wall clock.
        memory, baseline_memory: for phase ``forward_backward`` where asked for, else None.
    """

    arm: str
    plan: str
    backend: str
    baseline: str
    scope: str
    phase: str
    model: str
    layers: int
    tokens: int
    checkpointing: bool
    device: str
    threads: int
    clock: str
    timing: Comparison
    wall: Comparison
    memory: Memory | None
    baseline_memory: Memory | None

    @property
    def verdict(self) -> str:
        """The ratio with its interval, or why there is none."""
        return self.timing.verdict

    @property
    def saved_ratio(self) -> float | None:
        """Bytes kept for backward over the baseline's; exact."""
        return self.memory and self.memory.saved / self.baseline_memory.saved

    @property
    def peak_ratio(self) -> float | None:
        """Peak bytes over the baseline's."""
        return self.memory and self.memory.peak / self.baseline_memory.peak

    def as_dict(self) -> dict:
        """Return the row for JSON."""
        return {**asdict(self), "verdict": self.verdict, "saved_ratio": self.saved_ratio, "peak_ratio": self.peak_ratio}


def device_name(device: str) -> str:
    """Return the name of a device: the GPU's, or the CPU's from the kernel where it tells."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return f"cpu ({names[0]})"
    return "cpu"


@dataclass(frozen=True)
class Bench:
    """A model with its input sets and optimizer, ready to be timed."""

    model: torch.nn.Module
    scope: str
    inputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]  # scope layers
    device: str

    @classmethod
    def make(cls, model, scope: str, tokens: int, device: str, sets: int = 3, seed: int = 0) -> Bench:
        generator = torch.Generator(device).manual_seed(seed)
        config = model.config
        if scope == "model":
            shape = (1, tokens)
            ids = [torch.randint(config.vocab_size, shape, generator=generator, device=device) for _ in range(sets)]
            return cls(model, scope, tuple(ids), (), device)

        def normal():
            x = torch.randn(1, tokens, config.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)
            return x.requires_grad_()

        cotangents = tuple(normal().detach() for _ in range(sets))
        return cls(model, scope, tuple(normal() for _ in range(sets)), cotangents, device)

    def forward(self, call: Callable, i: int) -> torch.Tensor:
        """Return what backward starts from, for input set ``i``: hidden states, or the loss of the causal LM."""
        x = self.inputs[i % len(self.inputs)]
        out = call(x)
        return out if self.scope == "layers" else F.cross_entropy(out[0, :-1].float(), x[0, 1:])

    def run(self, call: Callable, phase: str, i: int, optimizer=None) -> None:
        """Run one sample of a phase."""
        if phase == "forward":
            with torch.no_grad():
                self.forward(call, i)
            return
        self.forward(call, i).backward(self.cotangents[i % len(self.inputs)] if self.scope == "layers" else None)
        if phase == "step":
            optimizer.step()
            optimizer.zero_grad()

    def clear(self) -> None:
        """Drop gradients, so that every sample starts alike."""
        self.model.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None

    def memory(self, arm: Arm) -> Memory:
        """Count one forward and backward pass of ``arm``, which must have run before."""
        with arm.enter(self.model, self.scope) as call:
            self.clear()
            saved = saved_bytes(lambda: self.forward(call, 0), self.model.parameters())
            peak = peak_bytes(lambda: self.run(call, "forward_backward", 0), self.device)
            self.clear()
        return Memory(saved, peak)


def _seconds(run: Callable[[], None], device: str) -> dict[str, float]:
    """Return what each clock says one call takes: ``process`` and ``wall``, and ``cuda`` on a GPU."""
    cuda = torch.device(device).type == "cuda"
    if cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
    wall, process = time.perf_counter(), time.process_time()
    run()
    if cuda:
        end.record()
        torch.cuda.synchronize()
    clocks = {"process": time.process_time() - process, "wall": time.perf_counter() - wall}
    return {**clocks, "cuda": start.elapsed_time(end) / 1e3} if cuda else clocks


def time_pairs(
    bench: Bench, baseline: Arm, variant: Arm, phase: str, pairs: int, warmup: int, repeats: int, optimizer, tick
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the samples of baseline and variant by clock: A B, B A, A B, ..., pair i on input set i.

    Args:
        warmup: untimed runs of each arm first; compilation happens there.
        repeats: runs per sample, back to back; a sample is their mean.
        tick: called before each sample with a line for the progress display.
    """
    samples = {arm: {} for arm in (baseline, variant)}

    def sample(arm: Arm, i: int, timed: bool) -> None:
        tick(f"{variant.name} {variant.backend} {bench.scope} {phase}")
        with arm.enter(bench.model, bench.scope) as call:

            def run():
                for _ in range(repeats if timed else 1):
                    bench.run(call, phase, i, optimizer)

            bench.clear()
            clocks = _seconds(run, bench.device)
            bench.clear()
        if timed:
            for clock, seconds in clocks.items():
                samples[arm].setdefault(clock, []).append(seconds / repeats)

    for i in range(-warmup, pairs):
        for arm in (baseline, variant) if i % 2 == 0 else (variant, baseline):
            sample(arm, i, timed=i >= 0)
    return samples[baseline], samples[variant]


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield ``tick(line)``, a bar on standard error."""
    if not shown:
        yield lambda line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)

        def tick(line: str) -> None:
            progress.update(task, advance=1, description=line)

        yield tick


@contextlib.contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run torch with ``number`` CPU threads; None leaves its setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    model,
    label: str,
    arms: Sequence[Arm],
    scopes: Sequence[str] = SCOPES,
    phases: Sequence[str] = PHASES,
    tokens: int = 1024,
    pairs: int = 7,
    warmup: int = 2,
    repeats: int = 1,
    memory: bool = True,
    progress: bool = True,
    baseline: Arm | None = None,
    seed: int = 0,
) -> list[Row]:
    """Return one Row per arm, scope and phase; the arguments are those of :func:`run_overhead`."""
    baseline = baseline or unaligned()
    device = str(next(model.parameters()).device)
    cuda = torch.device(device).type == "cuda"
    clock = "cuda" if cuda else "process" if torch.get_num_threads() == 1 else "wall"
    # lr=0: the same arithmetic, and weights that stay what they are
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0) if "step" in phases else None
    rows = []
    with _progress(len(scopes) * len(phases) * len(arms) * 2 * (pairs + warmup), progress) as tick:
        for scope in scopes:
            bench = Bench.make(model, scope, tokens, device, seed=seed)
            baseline_memory = None
            for phase in phases:
                for arm in arms:
                    a, b = time_pairs(bench, baseline, arm, phase, pairs, warmup, repeats, optimizer, tick)
                    used = None
                    if memory and phase == "forward_backward":
                        baseline_memory = baseline_memory or bench.memory(baseline)
                        used = bench.memory(arm)
                    rows.append(
                        Row(
                            arm=arm.name,
                            plan=arm.plan,
                            backend=arm.backend,
                            baseline=baseline.name,
                            scope=scope,
                            phase=phase,
                            model=label,
                            layers=model.config.num_hidden_layers,
                            tokens=tokens,
                            checkpointing=model.is_gradient_checkpointing,
                            device=device_name(device),
                            threads=torch.get_num_threads(),
                            clock=clock,
                            timing=compare(a[clock], b[clock]),
                            wall=compare(a["wall"], b["wall"]),
                            memory=used,
                            baseline_memory=used and baseline_memory,
                        )
                    )
    return rows


def run_overhead(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    plans: Sequence[str] = PLANS,
    engine: str = "vllm_compiled",
    region_backends: Sequence[str] = ("compile", "eager"),
    scopes: Sequence[str] = SCOPES,
    phases: Sequence[str] = PHASES,
    layers: int | None = None,
    tokens: int = 1024,
    device: str | None = None,
    threads: int | None = None,
    pairs: int = 7,
    warmup: int = 2,
    repeats: int | None = None,
    checkpointing: bool = False,
    memory: bool = True,
    progress: bool = True,
    seed: int = 0,
) -> list[Row]:
    """Measure every plan and backend against the unaligned model; return the rows.

    Args:
        model: folder or hub name of a model with weights; or
        shape, family: random weights in the sizes of a row of ``SHAPES``, as its own or another dense family.
        plans, engine: values of the key, and the engine's preset.
        region_backends: ``compile``, ``eager``.
        scopes, phases: of ``SCOPES`` and ``PHASES``.
        layers: decoder layers; None for all.
        tokens: tokens per sample, one sequence.
        device: ``cpu`` or ``cuda``; None for CUDA where there is one.
        threads: CPU threads; None for torch's setting. With one thread the CPU clock is process CPU time, which other
            processes disturb less than wall time.
        pairs, warmup: timed pairs, and untimed runs of each arm before them.
        repeats: runs per sample; None for 1 on CPU and 3 on CUDA (so that launch queues fill).
        checkpointing: checkpoint decoder layers (non-reentrant).
        memory: count bytes in phase ``forward_backward``.
        progress: show a bar on standard error.

    Raises:
        ValueError: an unknown name, or too few pairs; the message holds the choices.
    """
    for name, values, choices in (
        ("scope", scopes, SCOPES),
        ("phase", phases, PHASES),
        ("backend", region_backends, ("compile", "eager")),
    ):
        for value in values:
            _choose(name, value, choices)
    if pairs < MINIMUM_PAIRS:
        raise ValueError(f"pairs={pairs}: at least {MINIMUM_PAIRS} complete pairs are needed for an interval")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch sees no CUDA device here")
    arms = [aligned(regions, engine, how) for regions in plans for how in region_backends]
    with cpu_threads(threads):
        label, lm = build(model, shape, family, layers, device, seed)
        if checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        repeats = repeats or (3 if torch.device(device).type == "cuda" else 1)
        return measure(
            lm, label, arms, scopes, phases, tokens, pairs, warmup, repeats, memory, progress, seed=seed
        )  # fmt: skip


def render(rows: Sequence[Row]):
    """Return the rich table of rows: ratios only; times stay in the JSON."""
    from ..report import rows as report

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}x"

    first = rows[0]
    checkpointing = ", checkpointing" if first.checkpointing else ""
    title = (
        f"{first.model}, {first.layers} layers, {first.tokens} tokens{checkpointing}; {first.device}, "
        f"{first.threads} threads, {first.clock} time over that of {first.baseline} (eager Hugging Face where none)"
    )
    columns = ("plan", "backend", "scope", "phase", "time", "kept for backward", "peak memory")
    body = [(r.arm, r.backend, r.scope, r.phase, r.verdict, ratio(r.saved_ratio), ratio(r.peak_ratio)) for r in rows]
    return report.table(title, columns, body)


# -------------------------------------------------------------------------------------------------------- alternatives


@dataclass(frozen=True)
class Alternative:
    """What a user would pick instead, in the same run: its first call, its recompilations, its steady cost.

    Args:
        arm, plan: see :class:`Arm`.
        measured: ``yes``, or why not.
        first_call_steps: wall time of the first forward and backward pass with cold compilation caches, in units of the
            unaligned model's (median); one sample.
        graphs_first, graphs_lengths: graphs that Dynamo made in that call, and in the following pass over ``lengths``.
        lengths: number of different sequence lengths in that pass.
        lengths_ratio: wall time of that pass over the unaligned model's, recompilation included; one sample.
        rows: the steady state, a Row for ``forward`` and one for ``forward_backward``.
    """

    arm: str
    plan: str
    measured: str
    first_call_steps: float | None = None
    graphs_first: int | None = None
    graphs_lengths: int | None = None
    lengths: int | None = None
    lengths_ratio: float | None = None
    rows: tuple[Row, ...] = ()

    def as_dict(self) -> dict:
        """Return the row for JSON."""
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}


def liger_missing(device: str) -> str | None:
    """Return why Liger's kernels cannot be measured here, or None."""
    import importlib.util

    if torch.device(device).type != "cuda":
        return "not measured: Liger's kernels are Triton kernels for a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return "not measured: liger_kernel is not installed"
    return None


def liger() -> Arm:
    """Return the arm of Liger's RoPE, RMSNorm and SwiGLU kernels, on a copy of the model (its patch has no undo)."""
    copies: dict[int, torch.nn.Module] = {}

    def enter(model, scope):
        import copy

        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        if id(model) not in copies:
            copies[id(model)] = copy.deepcopy(model)
            _apply_liger_kernel_to_instance(model=copies[id(model)])
        return contextlib.nullcontext(_call(copies[id(model)], scope))

    return Arm("Liger", "none", "-", enter)


def _graphs() -> int:
    from torch._dynamo.utils import counters  # Dynamo's own count; the name is stable since torch 2.1

    return counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def _cold() -> Iterator[None]:
    """No compiled graph in this process, and an empty Inductor cache directory."""
    from torch._inductor import utils

    torch._dynamo.reset()
    backends.compiled.cache_clear()
    fresh_cache = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache  # its name before torch 2.8
    with fresh_cache():
        yield
    torch._dynamo.reset()
    backends.compiled.cache_clear()


def run_alternatives(
    model: str | None = None,
    shape: str | None = None,
    family: str | None = None,
    plans: Sequence[str] = ("rope", "all"),
    engine: str = "vllm_compiled",
    layers: int | None = None,
    tokens: int = 1024,
    lengths: int = 10,
    device: str | None = None,
    threads: int | None = None,
    pairs: int = 7,
    progress: bool = True,
    seed: int = 0,
) -> list[Alternative]:
    """Measure aligned models and what a user would pick instead, each from cold caches; return the rows.

    Args: see :func:`run_overhead`; ``lengths`` is the number of different sequence lengths, tokens / 4 to tokens.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    arms = [aligned(regions, engine, "compile") for regions in plans]
    arms += [whole_model_compile(), whole_model_compile(emulate=True), fp32_head(), fp32_head(arms[-1])]
    out = []
    with cpu_threads(threads):
        label, lm = build(model, shape, family, layers, device, seed)
        bench = Bench.make(lm, "model", tokens, device, seed=seed)
        draw = random.Random(seed)
        varied = [bench.inputs[0][:, : draw.randrange(tokens // 4, tokens)] for _ in range(lengths)]
        runs = Bench(lm, "model", tuple(varied), (), device)

        def over_lengths(call):
            for i in range(lengths):
                runs.run(call, "forward_backward", i)
                runs.clear()

        def wall(run):
            return _seconds(run, device)["wall"]

        with unaligned().enter(lm, "model") as call:
            bench.run(call, "forward_backward", 0)
            steps = [wall(lambda: bench.run(call, "forward_backward", 0)) for _ in range(3)]
            bench.clear()
            base_lengths = wall(lambda: over_lengths(call))
        for arm in arms:
            with _cold():
                start = _graphs()
                with arm.enter(lm, "model") as call:
                    first = wall(lambda call=call: bench.run(call, "forward_backward", 0))
                    bench.clear()
                    after_first = _graphs()
                    varied_s = wall(lambda call=call: over_lengths(call))
                    after_lengths = _graphs()
                phases = ("forward", "forward_backward")
                rows = measure(lm, label, [arm], ("model",), phases, tokens, pairs, progress=progress, seed=seed)
            out.append(
                Alternative(
                    arm=arm.name,
                    plan=arm.plan,
                    measured="yes",
                    first_call_steps=first / sorted(steps)[1],
                    graphs_first=after_first - start,
                    graphs_lengths=after_lengths - after_first,
                    lengths=lengths,
                    lengths_ratio=varied_s / base_lengths,
                    rows=tuple(rows),
                )
            )
        missing = liger_missing(device)
        if missing:
            out.append(Alternative("Liger", "none", missing))
        else:
            rows = measure(lm, label, [liger()], ("model",), ("forward", "forward_backward"), tokens, pairs, seed=seed)
            out.append(Alternative("Liger", "none", "yes", rows=tuple(rows)))
    return out


def render_alternatives(rows: Sequence[Alternative]):
    """Return the rich table of alternatives: first call, graphs, steady ratios."""
    from ..report import rows as report

    def steady(row: Alternative, phase: str) -> str:
        return next((r.verdict for r in row.rows if r.phase == phase), row.measured)

    columns = ("what", "first call, in eager steps", "graphs: first call", "graphs: lengths", "time over lengths")
    body = [
        (
            r.arm,
            *(
                "" if v is None else f"{v:.1f}" if isinstance(v, float) else v
                for v in (r.first_call_steps, r.graphs_first)
            ),
            "" if r.lengths is None else f"{r.graphs_lengths} over {r.lengths}",
            "" if r.lengths_ratio is None else f"{r.lengths_ratio:.2f}x",
            steady(r, "forward"),
            steady(r, "forward_backward"),
        )
        for r in rows
    ]
    return report.table(
        "Alternatives, cold caches; steady ratios over eager Hugging Face",
        (*columns, "forward", "forward and backward"),
        body,
    )
