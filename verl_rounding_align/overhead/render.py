"""Rows of the overhead tool as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import rows as report
from .rows import Alternative, Row
from .shares import KINDS


def render(rows: Sequence[Row]):
    """Return the rich table of rows: ratios only; times stay in the JSON."""

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


def render_alternatives(rows: Sequence[Alternative]):
    """Return the rich table of alternatives: first call, graphs, steady ratios."""

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


def render_shares(found: dict):
    """Return the rich table of what :func:`.shares.shares` returns."""
    arms = list(found["shares"])
    body = [(kind, *(f"{found['shares'][arm][kind]:.1f}" for arm in arms)) for kind in KINDS]
    body.append(("(compiled regions at the speed of memory)", "", *(f"{found['floor'][arm]:.1f}" for arm in arms[1:])))
    body.append(("sum", *(f"{sum(found['shares'][arm].values()):.1f}" for arm in arms)))
    title = f"{found['model']}, {found['layers']} layers, {found['tokens']} tokens, forward and backward: % of the unaligned pass"
    return report.table(title, ("time in", *arms), body)
