"""What alignment costs: time and memory of an aligned model against the same model unaligned (eager Hugging Face).

One measurement is a pair of *arms* (:mod:`.arms`) in one *phase* (``forward`` without gradients, ``forward_backward``, or
``step`` with AdamW) and one *scope* (``layers``: the decoder stack from embeddings to final norm; ``model``: the causal LM
with its loss). Samples are interleaved in pairs. The order within a pair alternates, and each pair runs on another input set.
The estimate is the median of the paired ratios with a bootstrap interval (:mod:`.compare`). Where the effect is no larger
than the spread there is no ratio, and the verdict says so.

Memory has no noise (:mod:`.memory`): the bytes that autograd keeps for backward (each storage once, without parameters), and
the peak of allocated bytes above what was allocated before.

Mirrors: verl 0.9's FSDP actor: bf16 model, AdamW; ``forward`` is its log-prob pass, ``forward_backward`` its micro-batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..report import progress as bars
from .arms import Arm, unaligned
from .compare import compare
from .memory import peak_bytes, saved_bytes
from .rows import Memory, Row

PHASES = ("forward", "forward_backward", "step")
SCOPES = ("layers", "model")
DEVICES = ("cpu", "cuda")


def here(device: str | None) -> str:
    """Return the device that is asked for, or CUDA where there is one, or the CPU.

    Raises:
        ValueError: an unknown device, or one that torch does not see.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in DEVICES:
        raise ValueError(f"device={device!r}: unknown device {device!r}; choose from {', '.join(DEVICES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch sees no CUDA device here")
    return device


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
    """A model with its input sets, ready to be timed.

    Args:
        model, scope, device: what is run, which part of it, and where it is.
        inputs: one tensor per input set: token ids (1, tokens) int64 in scope ``model``, embeddings (1, tokens, hidden) bf16
            in scope ``layers``.
        cotangents: what backward starts from in scope ``layers``, (1, tokens, hidden) bf16 each; empty in scope ``model``.
    """

    model: torch.nn.Module
    scope: str
    inputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    device: str

    @classmethod
    def make(cls, model, scope: str, tokens: int, device: str, sets: int = 3, seed: int = 0) -> Bench:
        """Return a bench with ``sets`` random input sets of ``tokens`` tokens."""
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
        """Drop gradients, so that every sample starts from the same state."""
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


def seconds_of(run: Callable[[], None], device: str) -> dict[str, float]:
    """Return the seconds of one call by each clock: ``process`` and ``wall``, and ``cuda`` on a GPU."""
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
        warmup: untimed runs of each arm before the first sample; compilation happens there.
        repeats: runs per sample, one right after the other; a sample is their mean.
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
            clocks = seconds_of(run, bench.device)
            bench.clear()
        if timed:
            for clock, seconds in clocks.items():
                samples[arm].setdefault(clock, []).append(seconds / repeats)

    for i in range(-warmup, pairs):
        for arm in (baseline, variant) if i % 2 == 0 else (variant, baseline):
            sample(arm, i, timed=i >= 0)
    return samples[baseline], samples[variant]


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
    """Return one Row per arm, scope and phase; the arguments are those of :func:`.run.run_overhead`."""
    baseline = baseline or unaligned()
    device = str(next(model.parameters()).device)
    cuda = torch.device(device).type == "cuda"
    clock = "cuda" if cuda else "process" if torch.get_num_threads() == 1 else "wall"
    # lr=0: the same arithmetic, and weights that stay what they are
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0) if "step" in phases else None
    rows = []
    with bars.progress(progress) as display:
        advance = bars.bar(display, label, len(scopes) * len(phases) * len(arms) * 2 * (pairs + warmup))

        def tick(line: str) -> None:
            advance(title=line)

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
