"""Pictures of runs: reward and mismatch against the step, all arms in one panel or a column each; SVG as text."""

from __future__ import annotations

from statistics import mean, multimode

from outcomes import LONG, ORDER, SHORT, grouped, windows

from verl_rounding_align.report.pictures import _axes, _svg

COLOURS = dict(zip(ORDER, ("#d95f02", "#7570b3", "#66a61e", "#1b9e77", "#4c4c4c", "#a6761d", "#e7298a"), strict=True))
SHADES = {3: "#7f2704", 4: "#d95f02", 5: "#fd8d3c", 6: "#9ecae1", 7: "#4292c6", 8: "#08306b"}  # of bits
BANDS = ("none", "all")


def over_runs(runs: list[dict], name: str, size: int) -> tuple[list, list[int], list[tuple]]:
    """Return (a curve of (step, mean) per run, steps, values of all runs at each), as far as all runs go: none that diverged
    is missing from a mean."""
    curves = [windows(r["rows"], name, size) for r in runs]
    steps = [step for step, _ in max(curves, key=len)]
    values = list(zip(*([v for _, v in curve] for curve in curves), strict=False))
    return curves, steps[: len(values)], values


def picture(series: dict[str, tuple[str, list[dict]]], bands: tuple[str, ...], title: str) -> str:
    """Return SVG: reward and k3 against the step, mean over seeds, the range over seeds of those in ``bands``.

    Args:
        series: label: (colour, runs); a label is followed by the number of seeds in the legend.
    """
    figure, panels = _axes(10, 4, columns=2)
    for panel, name in zip(panels, ("reward", "k3"), strict=True):
        for label, (colour, runs) in series.items():
            if not any(row[name] for r in runs for row in r["rows"]):  # exactly zero: not on a logarithmic axis
                continue
            _, steps, values = over_runs(runs, name, SHORT)
            panel.plot(steps, [mean(v) for v in values], color=colour, label=f"{label} ({len(runs)})")
            if label in bands:  # seven bands on top of each other hide all of them
                panel.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12)
        panel.set_xlabel("step")
    panels[0].set_ylabel("reward: share of right digits")
    panels[1].set_ylabel("k3 per token, sampler against trainer")
    panels[1].set_yscale("log")
    panels[1].set_ylim(bottom=1e-5)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=7
    )
    panels[0].set_title(title, loc="left", fontsize=10)
    return _svg(figure)


def small_multiples(series: dict[str, tuple[str, list[dict]]], title: str) -> str:
    """Return SVG: a column per label, reward above k3; thin lines are runs, the band their range, the thick line their mean.

    The first label's mean is dashed in every other column. Windows are of ``LONG`` steps.
    """
    series = {label: found for label, found in series.items() if found[1]}
    figure, panels = _axes(2.1 * len(series), 5, columns=len(series), rows=2, sharex=True, sharey="row", squeeze=False)
    reference = None
    for (label, (colour, runs)), column in zip(series.items(), zip(*panels, strict=True), strict=True):
        means = []
        for panel, name in zip(column, ("reward", "k3"), strict=True):
            curves, steps, values = over_runs(runs, name, LONG)
            means.append((steps, [mean(v) for v in values]))
            if name == "k3" and not any(map(any, values)):  # exactly zero: not on a logarithmic axis
                panel.text(0.5, 0.5, "0", transform=panel.transAxes, color=colour, ha="center")
                continue
            panel.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
            for curve in curves:
                panel.plot(*zip(*curve, strict=True), color=colour, linewidth=0.5, alpha=0.6)
            panel.plot(*means[-1], color=colour, linewidth=2)
        for panel, line in zip(column, reference or (), strict=False):
            panel.plot(*line, color=next(iter(series.values()))[0], linewidth=1, linestyle="--")
        reference = reference or means
        column[0].set_title(f"{label} ({len(runs)})", color=colour, fontsize=10)
        column[1].set_xlabel("step")
    panels[0][0].set_ylabel("reward: share of right digits")
    panels[1][0].set_ylabel("k3 per token")
    panels[1][0].set_yscale("log")
    panels[1][0].set_ylim(bottom=1e-5)
    dashed = f"; dashed: {next(iter(series))}" if len(series) > 1 else ""
    figure.suptitle(f"{title}{dashed}", x=0.01, ha="left", fontsize=10)
    return _svg(figure)


def arm_pictures(runs: list[dict]) -> dict[str, str]:
    """Return {name: SVG}: every arm, at the settings that most arms have; a column each, and all in one panel."""
    cells = grouped(runs)
    bits, lr = max(cells, key=lambda cell: len(cells[cell]))
    here = [r for r in runs if (r["bits"], r["lr"]) == (bits, lr)]
    arms = {arm: (COLOURS[arm], [r for r in here if r["arm"] == arm]) for arm in ORDER}
    said = f"{bits} significant bits, lr {lr:g}: mean over seeds (number)"
    return {
        "reward": picture(arms, BANDS, f"{said}, range of {' and '.join(BANDS)}"),
        "reward_seeds": small_multiples(arms, f"{said}, range, and each run"),
    }


def width_pictures(runs: list[dict]) -> dict[str, str]:
    """Return {name: SVG}: arm ``none`` against bits, at the learning rate of most runs; nothing of runs of one width."""
    lr = multimode(r["lr"] for r in runs)[0]
    none = [r for r in runs if r["arm"] == "none" and r["lr"] == lr]
    widths = {f"p{b}": (colour, [r for r in none if r["bits"] == b]) for b, colour in SHADES.items()}
    if sum(bool(of) for _, of in widths.values()) < 2:
        return {}
    return {
        "widths_seeds": small_multiples(
            widths, f"arm none, lr {lr:g}, by significant bits: mean over seeds (number), range, and each run"
        )
    }
