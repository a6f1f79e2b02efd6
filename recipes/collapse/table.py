"""Write the tables of README.md and WHY.md and the pictures from results/; --check: fail if the pages differ."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from outcomes import ORDER, SHORT, T975, binomial, garwood, grouped, load, outcome, paired, rate_model, until, windows  # noqa: E402

from verl_rounding_align import report  # noqa: E402

COLOURS = dict(zip(ORDER, ("#d95f02", "#7570b3", "#66a61e", "#1b9e77", "#4c4c4c", "#a6761d", "#e7298a"), strict=True))
SCHEMA = {
    "type": "object",
    "required": [
        "arm",
        "bits",
        "lr",
        "seed",
        "steps",
        "pretrain",
        "prompts",
        "gradients",
        "seconds",
        "rows",
        "versions",
    ],
    "additionalProperties": False,
    "properties": {
        "arm": {"enum": list(ORDER)},
        "bits": {"type": "integer", "minimum": 2, "maximum": 22},
        "lr": {"type": "number", "exclusiveMinimum": 0},
        **{name: {"type": "integer", "minimum": 0} for name in ("seed", "steps", "pretrain", "prompts", "gradients")},
        "seconds": {"type": "number"},
        "versions": {"type": "object"},
        "rows": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["step", "reward", "k1", "k3", "differ", "norm"],
                "additionalProperties": False,
                "properties": {n: {"type": "number"} for n in ("step", "reward", "k1", "k3", "differ", "norm")},
            },
        },
    },
}


COLUMNS = (
    "bits", "lr", "arm", "seeds", "steps", "start", "peak", "final (lowest to highest)", "drop", "final less `none`, 95 %",
    "collapsed, 95 %", "steps to collapse", "fell at some time, 95 %", "steps to the first fall", "k3, first 50 steps",
    "k3, 100 steps before the collapse, or last",
)  # fmt: skip


def share(k: int, n: int) -> str:
    """Return ``k`` of ``n`` with the exact 95 % interval of the share, as text."""
    low, high = binomial(k, n)
    return f"{k} of {n} [{low:.2f}, {high:.2f}]"


def table_rows(runs: list[dict]) -> list[list[str]]:
    """Return the rows of the table of outcomes, in ``COLUMNS``."""
    lines = []
    for (bits, lr), arms in grouped(runs).items():
        finals = {arm: {s: o["final"] for s, o in seeds.items()} for arm, seeds in arms.items()}
        for arm, seeds in arms.items():
            of = list(seeds.values())
            d = None if arm == "none" or "none" not in finals else paired(finals[arm], finals["none"])
            average = {n: mean(o[n] for o in of) for n in ("start", "peak", "final", "drop", "k3_start", "k3")}
            last = [o["final"] for o in of]
            ends = []
            for name in ("collapse", "fall"):
                steps = sorted(o[name] for o in of if o[name] is not None)
                ends += [share(len(steps), len(of)), ", ".join(map(str, steps))]
            lines.append(
                [
                    str(bits + (arm == "bit")),
                    f"{lr:g}",
                    arm,
                    str(len(of)),
                    str(max(o["steps"] for o in of)),
                    f"{average['start']:.2f}",
                    f"{average['peak']:.2f}",
                    f"{average['final']:.2f} ({min(last):.2f} to {max(last):.2f})",
                    f"{average['drop']:.2f}",
                    "" if d is None else f"{d[0]:+.2f} [{d[1]:+.2f}, {d[2]:+.2f}]",
                    *ends,
                    f"{average['k3_start']:.2g}",
                    f"{average['k3']:.2g}",
                ]
            )
    return lines


def table(runs: list[dict]) -> str:
    """Return the table of outcomes."""
    return report.markdown(COLUMNS, table_rows(runs))


def show(runs: list[dict], stored: list[dict]) -> None:
    """Print the table of a grid, and how many of its runs are those that the repository keeps, in every reward and norm."""

    def numbers(run):
        return tuple((row["step"], row["reward"], row["norm"]) for row in run["rows"])

    kept = set(map(numbers, stored))
    same = sum(numbers(run) in kept for run in runs)
    title = f"{len(runs)} runs; {same} of them repeat one that is kept in results/, in every reward and gradient norm"
    narrow = [i for i, name in enumerate(COLUMNS) if name not in ("steps", "start", "drop")]
    rows = [[row[i] for i in narrow] for row in table_rows(runs)]
    report.show(report.table(title, [COLUMNS[i] for i in narrow], rows))


# ---- falls against bits


def said(values: tuple, form: str = ".2g") -> str:
    """Return a figure with its interval; what is not determined is a question mark.

    >>> said((0.5, None, 2.0)), said((None, None, 0.01))
    ('0.5 [?, 2]', '? [?, 0.01]')
    """
    value, low, high = ("?" if v is None else format(v, form) for v in values)
    return f"{value} [{low}, {high}]"


def events(outcomes: list[dict]) -> tuple[int, float]:
    """Return (first falls, thousands of steps before them or the end)."""
    return sum(o["fall"] is not None for o in outcomes), sum(o["fall"] or o["steps"] for o in outcomes) / 1000


def rate(k: int, exposure: float) -> str:
    """Return events per unit of exposure with the exact 95 % interval, as text."""
    low, high = garwood(k, exposure)
    return f"{k / exposure:.2f} [{low:.2f}, {high:.2f}]"


def falls(runs: list[dict]) -> str:
    """Return the table of first falls of arm ``none`` against bits; below it the factor that a bit makes, and controls."""
    cells = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda r: r["bits"]):
        cells[run["arm"]][run["bits"]].append(outcome(run))
    none = cells.pop("none")
    counts = {bits: events(of) for bits, of in none.items()}
    slope, rates = rate_model(counts, at=counts)
    lines = []
    for b, (k, exposure) in counts.items():
        growth = mean(o["k3_end"] / o["k3_start"] for o in none[b])
        lines.append([
            f"p{b}", str(len(none[b])), f"{k} in {exposure:.1f}", rate(k, exposure), said(rates[b]),
            f"{mean(o['k3_start'] for o in none[b]):.2g}", f"{mean(o['k3_end'] for o in none[b]):.2g}", f"{growth:.1f}",
            f"{mean(o['final'] for o in none[b]):.2f}",
        ])  # fmt: skip
    text = report.markdown(
        ("bits", "seeds", "first falls in thousands of steps before them", "falls per 1,000 steps, 95 %",
         "by the fit, 95 %", "k3, first 50 steps", "k3, last 100", "growth, mean of ratios", "final"), lines
    )  # fmt: skip
    factor = said(tuple(None if x is None else math.exp(x) for x in slope))
    controls = []
    for arm, widths in cells.items():
        k, exposure = events([o for of in widths.values() for o in of])
        controls.append(
            f"`{arm}` at {' and '.join(f'p{b}' for b in widths)}: {k} in {exposure:.1f}, {rate(k, exposure)}"
        )
    return f"{text}\n\nOne bit more changes the rate of first falls by a factor of {factor}. Beside it {'; '.join(controls)}."


# ---- pictures

BANDS = ("none", "all")
SHADES = {3: "#7f2704", 4: "#d95f02", 5: "#fd8d3c", 6: "#9ecae1", 7: "#4292c6", 8: "#08306b"}  # of bits


def picture(series: dict[str, tuple[str, list[dict]]], bands: tuple[str, ...], title: str) -> str:
    """Return SVG: reward and k3 against the step, mean over seeds, the range over seeds of those in ``bands``.

    Args:
        series: label: (colour, runs); a label is followed by the number of seeds in the legend.
    """
    from verl_rounding_align.measure.pictures import _axes, _svg

    figure, panels = _axes(10, 4, columns=2)
    for panel, name in zip(panels, ("reward", "k3"), strict=True):
        for label, (colour, runs) in series.items():
            curves = [windows(r["rows"], name, SHORT) for r in runs]
            if not curves or not any(v for c in curves for _, v in c):  # exactly zero: not on a logarithmic axis
                continue
            steps = [s for s, _ in max(curves, key=len)]
            values = [[c[i][1] for c in curves if i < len(c)] for i in range(len(steps))]  # of runs still there
            panel.plot(steps, [mean(v) for v in values], color=colour, label=f"{label} ({len(curves)})")
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


def interval(values: list[float], digits: int = 2) -> str:
    """Return mean and 95 % t interval as text, of a single value that alone."""
    if len(values) < 2:
        return f"{values[0]:+.{digits}f}"
    m, low, high = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    return f"{m:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def jackknife(rows: list[dict], top: str, bottom: str) -> str:
    """Return the ratio of two means over seeds, with the jackknife's 95 % t interval, as text."""

    def ratio(chosen):
        return mean(r[top] for r in chosen) / mean(r[bottom] for r in chosen)

    n, value = len(rows), ratio(rows)
    if n < 2:
        return f"{value:+.2f}"
    pseudo = [n * value - (n - 1) * ratio(rows[:i] + rows[i + 1 :]) for i in range(n)]
    half = T975[min(n - 1, len(T975) - 1)] * stdev(pseudo) / math.sqrt(n)
    return f"{value:+.2f} [{value - half:+.2f}, {value + half:+.2f}]"


def differences(found: dict) -> str:
    """Return the table of what each group's rounding does to log-probs; means over seeds, t intervals."""
    lines = []
    for (steps, region), rows in by_case(found):
        landing = [r["landing"] for r in rows if r["landing"] is not None]
        lines.append(
            [
                str(steps),
                region,
                f"{mean(landing):.2f}" if landing else "",
                f"{mean(r['k3'] for r in rows):.2g}",
                f"{mean(r['size'] for r in rows):.3f}",
                interval([r["mean"] / r["size"] for r in rows]),
                interval([r["given"] for r in rows]),
                f"{100 * mean(r['by_token'] for r in rows):.1f} %",
                interval([r["corr_own"] for r in rows]),
                interval([r["corr_advantage"] for r in rows]),
            ]
        )
    return report.markdown(DIFFERENCES, lines)


def gradients(found: dict) -> str:
    """Return the table of what each group's rounding does to the policy gradient; ratios of means over seeds."""
    lines = []
    for (steps, region), rows in by_case(found):
        pairs = [("bias2", "signal2"), ("cross", "signal2"), ("error2", "gradient2"), ("bias2", "error2")]
        pairs += [("is_bias2", "is_signal2")]
        of_seeds = ", ".join(f"{r['cross'] / r['signal2']:+.2f}" for r in rows if resolved(r, found["batches"]))
        cells = [jackknife(rows, *pair) for pair in pairs]
        lines.append([str(steps), region, *cells[:2], cosine(rows), of_seeds, *cells[2:]])
    return report.markdown(GRADIENTS, lines)


def cosine(rows: list[dict]) -> str:
    """Return the cosine between bias and gradient, of means over seeds, where the bias is clear of zero in ``rows``.

    >>> exact = dict(bias2=0.25, signal2=1.0, cross=-0.5)
    >>> cosine([exact, exact]), cosine([exact, {**exact, "bias2": -0.25}])
    ('-1.00', '')
    """
    clear = not jackknife(rows, "bias2", "signal2").partition("[")[2].startswith("-")
    bias, signal, cross = (mean(r[name] for r in rows) for name in ("bias2", "signal2", "cross"))
    return f"{cross / math.sqrt(bias * signal):+.2f}" if clear and bias > 0 < signal else ""


def resolved(row: dict, batches: int) -> bool:
    """Return whether a seed's mean gradient is larger than its noise: twice |G_b|^2 / batches, about two standard errors
    of the estimate of its square, if the noise had one direction (else fewer)."""
    return row["signal2"] > 2 * row["gradient2"] / batches


def by_case(found: dict) -> list[tuple[tuple[int, str], list[dict]]]:
    cases = defaultdict(list)
    for row in found["rows"]:
        cases[row["steps"], row["region"]].append(row)
    return sorted(cases.items(), key=lambda item: item[0][0])


DIFFERENCES = (
    "steps", "rounding of", "landing score", "k3", "mean abs d", "mean d / mean abs d", "the same on given right answers",
    "var of d between tokens", "corr(d, log T)", "corr(d, A)",
)  # fmt: skip
GRADIENTS = (
    "steps", "rounding of", "bias^2 / gradient^2", "projection of the bias on the gradient", "cosine", "by seed, where the gradient is resolved",
    "squared error / squared gradient, one batch", "bias^2, share of the squared error",
    "bias^2 / gradient^2, against importance weights",
)  # fmt: skip


def slopes(found: dict, kernel: str) -> dict[str, list[float]]:
    """Return {arm: least-squares slope of log2 k3 against bits for each seed}, of arms whose k3 are all positive."""
    cells = defaultdict(dict)
    for row in found["rows"]:
        if row["kernel"] == kernel:
            cells[row["arm"], row["seed"]][row["bits"]] = row["k3"]
    out = defaultdict(list)
    for (arm, _), by_bits in cells.items():
        if min(by_bits.values()) > 0:
            x, y = list(by_bits), [math.log2(v) for v in by_bits.values()]
            mx, my = mean(x), mean(y)
            out[arm].append(sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x))
    return out


def bits(found: dict) -> str:
    """Return the table of k3 against bits: means over seeds, slope of log2 with its interval."""
    cells = defaultdict(list)
    for row in found["rows"]:
        cells[row["kernel"], row["arm"], row["bits"]].append(row["k3"])
    every = sorted({key[2] for key in cells})
    lines = []
    for kernel in dict.fromkeys(key[0] for key in cells):
        fits = slopes(found, kernel)
        for arm in dict.fromkeys(key[1] for key in cells):
            values = [f"{mean(cells[kernel, arm, b]):.2g}" for b in every]
            lines.append([kernel, arm, *values, interval(fits[arm]) if fits.get(arm) else ""])
    return report.markdown(("sampler's attention", "arm", *(f"p{b}" for b in every), "log2 k3 per bit, 95 %"), lines)


def real(found: dict) -> str:
    """Return the table of the arms with a real engine."""
    lines = []
    for arm, rows in found["arms"].items():
        o = outcome({"rows": rows})
        numbers = [f"{o[name]:.2f}" for name in ("start", "peak", "final", "drop")]
        end = "no" if o["collapse"] is None else f"at step {o['collapse']}"
        lines.append([arm, rows[-1]["step"], *numbers, end, f"{o['k3_start']:.1e}", f"{o['k3_end']:.1e}"])
    columns = (
        "arm",
        "steps",
        "start",
        "peak",
        "final",
        "drop",
        "collapsed",
        "k3, first 50 steps",
        "k3, last 100 steps",
    )
    made = ", ".join(f"{name} {found['versions'][name]}" for name in ("verl", "vllm", "torch", "transformers"))
    return report.markdown(columns, lines) + f"\n\nlr {found['lr']:g}, one seed; CPU, {made}."


def pictures(runs: list[dict]) -> dict[str, str]:
    """Return {name: SVG} of runs: every arm at the settings that most arms have; arm ``none`` against bits if they differ."""
    cells = grouped(runs)
    bits, lr = max(cells, key=lambda cell: len(cells[cell]))
    here = [r for r in runs if (r["bits"], r["lr"]) == (bits, lr)]
    arms = {arm: (COLOURS[arm], [r for r in here if r["arm"] == arm]) for arm in ORDER}
    none = [r for r in runs if r["arm"] == "none" and r["lr"] == lr]
    widths = {f"p{b}": (colour, [r for r in none if r["bits"] == b]) for b, colour in SHADES.items()}
    band = f"mean over seeds (number), range of {' and '.join(BANDS)}"
    drawn = {"reward": picture(arms, BANDS, f"{bits} significant bits, lr {lr:g}: {band}")}
    if len({r["bits"] for r in none}) > 1:
        drawn["widths"] = picture(widths, (), f"arm none, lr {lr:g}, by significant bits: mean over seeds (number)")
    return drawn


def stored() -> dict[str, list[dict]]:
    """Return the runs that the repository keeps: {grid: runs}, none of a grid that has no file."""
    return defaultdict(list, {path.stem: load(path) for path in sorted((HERE / "results").glob("*.jsonl"))})


def main_runs(runs: dict[str, list[dict]]) -> list[dict]:
    """Return the runs of every arm at the default's settings."""
    found = [r for name in ("default", "seeds", "arms") for r in runs[name]]
    # arm `bit` is arm `none` with one more bit (tests/test_collapse.py): not run twice
    base = found[0]
    cell = ("none", base["bits"] + 1, base["lr"])
    bit = [r for r in runs["widths"] if (r["arm"], r["bits"], r["lr"]) == cell]
    return found + [{**r, "arm": "bit", "bits": base["bits"]} for r in bit]


def summary() -> str:
    """Return the table of the project's README: every arm in a few words."""
    lines = []
    for arm, seeds in next(iter(grouped(main_runs(stored())).values())).items():
        of = list(seeds.values())
        fell = sum(o["fall"] is not None for o in of)
        k3 = [f"{mean(o[name] for o in of):.2g}" for name in ("k3_start", "k3_end")]
        lines.append([
            arm, str(len(of)), *(f"{mean(o[name] for o in of):.2f}" for name in ("start", "peak", "final")),
            share(fell, len(of)), *k3,
        ])  # fmt: skip
    columns = ("arm", "seeds", "reward: start", "peak", "end", "fell by 0.1 or more, 95 %", "k3: start", "end")
    return report.markdown(columns, lines)


def files() -> dict[Path, str]:
    """Return what this script writes: path to text."""
    runs = stored()
    read = {name: json.loads((HERE / f"results/{name}.json").read_text()) for name in ("why", "bits", "real_engine")}
    base = runs["default"][0]
    main = main_runs(runs)
    widths = [r for r in main if r["arm"] in (*BANDS, "same")] + runs["widths"]
    rates = [r for r in main if r["arm"] in BANDS] + runs["rates"]
    tables = {
        "default": table(main),
        "widths": table(widths),
        "falls": falls(widths),
        "rates": table(until(rates, min(r["steps"] for r in rates))),
        "coarse": table(runs["coarse_gradients"]),
        "bits": bits(read["bits"]),
        "real": real(read["real_engine"]),
    }
    page, reason = (HERE / "README.md").read_text(), (HERE / "WHY.md").read_text()
    for name, text in tables.items():
        page = report.filled(page, name, text)
    for name, text in {"differences": differences(read["why"]), "gradients": gradients(read["why"])}.items():
        reason = report.filled(reason, name, text)
    drawn = pictures(main + [r for r in widths if r["bits"] != base["bits"]])
    return {HERE / "README.md": page, HERE / "WHY.md": reason} | {HERE / f"{n}.svg": svg for n, svg in drawn.items()}


if __name__ == "__main__":
    made = files()
    if "--check" in sys.argv[1:]:
        # a picture's text differs with the release of matplotlib that draws it
        stale = [p.name for p, text in made.items() if not p.exists() or (p.suffix != ".svg" and p.read_text() != text)]
        sys.exit(f"{', '.join(stale)} differ from the results; run recipes/collapse/table.py" if stale else 0)
    for path, text in made.items():
        path.write_text(text)
