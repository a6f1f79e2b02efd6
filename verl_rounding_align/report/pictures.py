"""Pictures of the report, drawn with matplotlib from rows as JSON has them. Each function returns a Figure with SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from .rows import Figure

COLOURS = ("#4c4c4c", "#d95f02", "#1b9e77", "#7570b3", "#a6761d", "#e7298a")  # told apart by colour-blind readers too
FLOOR_COLOUR = "#9a9a9a"
LANDING_TOP = 10.0  # density at which a histogram is cut; the picture says so


def _svg(figure) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "verl-rounding-align", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return out.getvalue()


def _axes(width: float, height: float, columns: int = 1, rows: int = 1, **options):
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(ax, names: Sequence[str], values: Sequence[Sequence[float]], colours: Sequence[str], scale: float) -> None:
    """Draw bars of values with their intervals, the first on top."""
    for y, ((value, low, high), colour) in enumerate(zip(values, colours, strict=True)):
        ax.barh(y, value * scale, color=colour, height=0.6)
        if low is not None and high is not None:
            ax.plot([low * scale, high * scale], [y, y], color="black", linewidth=1.5)
        ax.annotate(
            f" {value * scale:.2f}",
            (max(value, high or value, 0) * scale, y),
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)


def gap_by_arm(rows: Sequence[Mapping], title: str) -> Figure:
    """Return bars of every row's k3 with its interval; floors are grey."""
    figure, ax = _axes(8, 0.8 + 0.32 * len(rows))
    colours = [FLOOR_COLOUR if r["kind"] == "floor" else COLOURS[0 if r["arm"] == "none" else 2] for r in rows]
    _bars(ax, [r["arm"] for r in rows], [r["k3"] for r in rows], colours, 1e4)
    ax.set_xlabel("k3 against the engine, 1e-4 nats per token (line: 95 % interval; grey: one side against itself)")
    ax.set_title(title, loc="left", fontsize=11)
    return Figure("gap", f"{title}: k3 by arm with 95 % intervals", _svg(figure))


def shapley(found: Mapping, title: str) -> Figure:
    """Return bars of the Shapley values and of the whole reduction, with intervals."""
    rows = [*found["players"], {**found["whole"], "players": ["all of them"]}]
    figure, ax = _axes(8, 0.9 + 0.32 * len(rows))
    colours = [COLOURS[2]] * (len(rows) - 1) + [COLOURS[0]]
    _bars(ax, [r["players"][0] for r in rows], [r["value"] for r in rows], colours, 1e4)
    ax.set_xlabel("reduction of k3, 1e-4 nats per token (Shapley value; line: 95 % interval)")
    ax.set_title(title, loc="left", fontsize=11)
    return Figure("shapley", f"{title}: Shapley values with 95 % intervals", _svg(figure))


def by_position(curves: Mapping[str, Sequence[Mapping]], title: str) -> Figure:
    """Return curves of mean |d| against the position in the response, in bins, with bands of two standard errors."""
    figure, ax = _axes(8, 3.6)
    for (name, bins), colour in zip(curves.items(), COLOURS, strict=False):
        x = [b["position"] + 1 for b in bins]
        ax.plot(x, [b["abs_mean"] for b in bins], color=colour, label=name, marker="o", markersize=3)
        low, high = ([b["abs_mean"] + s * b["se"] for b in bins] for s in (-2, 2))
        ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("position in the response, tokens from 1 (first of each bin; band: 2 standard errors by sequence)")
    ax.set_ylabel("mean |d|, nats")
    ax.set_title(title, loc="left", fontsize=11)
    ax.legend(frameon=False)
    return Figure("position", f"{title}: mean difference against position", _svg(figure))


def by_size(counts: Mapping[str, Mapping], title: str) -> Figure:
    """Return the share of tokens in each quarter octave of |d|: on the left where the engine is below the trainer, on the right
    where it is above."""
    figure, (left, right) = _axes(8, 4, columns=2, sharey=True)
    smallest, largest = 0, -99
    for (name, found), colour in zip(counts.items(), COLOURS, strict=False):
        total = sum(found["negative"]) + sum(found["positive"]) + found["zeros"]
        edges = found["edges"]
        step = edges[1] - edges[0]
        centres = [edges[0] - step / 2, *(e + step / 2 for e in edges)]
        for ax, sign in ((left, "negative"), (right, "positive")):
            share = [100 * n / total for n in found[sign]]
            label = f"{name} (exactly 0: {100 * found['zeros'] / total:.1f} %)"
            ax.plot(centres, share, color=colour, label=label, drawstyle="steps-mid")
            seen = [c for c, s in zip(centres, share, strict=True) if s > 0.05]
            if seen:
                smallest, largest = min(smallest, seen[0]), max(largest, seen[-1])
    for ax, what in ((left, "below"), (right, "above")):
        ax.set_xlim(smallest - 1, largest + 1)
        ax.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:.0f}}}$")
        ax.set_xlabel(f"|d|, nats: engine {what} the trainer")
        ax.set_ylim(bottom=0)
    left.invert_xaxis()
    left.set_ylabel("% of tokens, per quarter octave")
    left.set_title(title, loc="left", fontsize=11)
    figure.legend(*right.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower left")
    return Figure("sizes", f"{title}: histogram of differences", _svg(figure))


def landing(histograms: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Return histograms of where values of one layer land between two neighbouring bf16 numbers; 1 is an even spread."""
    from matplotlib.figure import Figure as Canvas

    columns = min(5, len(histograms))
    rows = -(-len(histograms) // columns)
    figure = Canvas(figsize=(1.9 * columns, 0.9 + 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for ax in axes:
        ax.set_axis_off()
    for ax, (name, counts) in zip(figure.axes, histograms.items(), strict=False):
        mean = sum(counts) / len(counts)
        density = [c / mean for c in counts]
        ax.set_axis_on()
        ax.spines[["top", "right"]].set_visible(False)
        ax.stairs(density, [i / len(counts) for i in range(len(counts) + 1)], color=COLOURS[2], fill=True)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_title(name, fontsize=8)
        ax.set_ylim(0, max(2.0, min(LANDING_TOP, max(density) * 1.05)))
        ax.set_xticks([0, 0.5, 1])
        if max(density) > LANDING_TOP:
            ax.annotate(f"up to {max(density):.0f}", (0.97, 0.9), xycoords="axes fraction", ha="right", fontsize=7)
    figure.supylabel("density (1: even)", fontsize=9)
    figure.supxlabel("position between two neighbouring bf16 numbers", fontsize=9)
    figure.suptitle(title, fontsize=11)
    return Figure("landing", f"{title}: landing histograms", _svg(figure))
