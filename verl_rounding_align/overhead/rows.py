"""What the overhead tool returns: one row per arm, scope and phase, and one per alternative."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .compare import Comparison


@dataclass(frozen=True)
class Memory:
    """Bytes of one forward and backward pass: kept for backward, and the peak above what was allocated before."""

    saved: int
    peak: int


@dataclass(frozen=True)
class Row:
    """One line of the overhead table: an arm against the unaligned model.

    Args:
        arm, plan, backend: see :class:`.arms.Arm`; ``baseline`` names the arm it is compared with.
        scope, phase: see :mod:`.measure`.
        model, layers, tokens: label of the model, its decoder layers, tokens per sample (one sequence).
        checkpointing: whether decoder layers were checkpointed (non-reentrant).
        device, threads: name of the device; CPU threads of torch.
        clock: what ``timing`` counts: ``process`` (CPU time, with one CPU thread), ``wall`` or ``cuda`` (events).
        timing, wall: the Comparison by ``clock``, and by the wall clock.
        memory, baseline_memory: in phase ``forward_backward``, where memory was asked for, else None.
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


@dataclass(frozen=True)
class Alternative:
    """What a user would pick instead of alignment, in the same run: its first call, its recompilations, its steady cost.

    Args:
        arm, plan: see :class:`.arms.Arm`.
        measured: ``yes``, or why not.
        first_call_steps: wall time of the first forward and backward pass with cold compilation caches, in units of the
            unaligned model's median; one sample.
        graphs_first, graphs_lengths: graphs that Dynamo made in that call, and in the pass over ``lengths`` after it.
        lengths: number of different sequence lengths in that pass.
        lengths_ratio: wall time of that pass over that of the unaligned model, recompilation included; one sample.
        rows: the steady state, one Row for ``forward`` and one for ``forward_backward``.
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
