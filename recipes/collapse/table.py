"""Write the tables of README.md and WHY.md and the pictures from results/; --check: fail if the pages differ."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import why_tables  # noqa: E402
from outcomes import (  # noqa: E402
    DROP,
    ORDER,
    binomial,
    center,
    fisher,
    garwood,
    grouped,
    load,
    outcome,
    paired,
    rate_model,
    said,
    until,
)
from pictures import BANDS, arm_pictures, width_pictures  # noqa: E402

from verl_rounding_align.report import rows as report  # noqa: E402

SMALL = 4  # bits from which on errors are taken to be small
FITTED = 5  # bits up to which first falls are fitted: the widths with ten seeds
REWARDS = (
    "bits", "lr", "steps", "arm", "seeds", "start", "peak", "final (lowest to highest)", "drop",
    "final less `none`, 95 %", "drop less `none`, 95 %",
)  # fmt: skip
FALLS = (
    "bits", "lr", "steps", "arm", "collapsed, 95 %", "p", "at step", "fell at some time, 95 %", "p", "at step",
    "k3, first 50 steps", "k3, last 100", "grew in", "k3 before the collapse, by run",
)  # fmt: skip


def share(k: int, n: int) -> str:
    """Return ``k`` of ``n`` with the exact 95 % interval of the share, as text."""
    low, high = binomial(k, n)
    return f"{k} of {n} [{low:.2f}, {high:.2f}]"


def against(arm: dict[int, dict], none: dict[int, dict], name: str) -> str:
    """Return the paired difference of an outcome over common seeds with its interval, as text."""
    d = paired(*({seed: o[name] for seed, o in of.items()} for of in (arm, none)))
    return "" if d is None else said(*d)


def reward_rows(runs: list[dict]) -> list[list[str]]:
    """Return the rows of ``REWARDS``: means over seeds."""
    lines = []
    for (bits, lr), arms in grouped(runs).items():
        for arm, seeds in arms.items():
            of, none = list(seeds.values()), arms.get("none") if arm != "none" else None
            average = {n: f"{mean(o[n] for o in of):.2f}" for n in ("start", "peak", "final", "drop")}
            last = [o["final"] for o in of]
            lines.append([
                str(bits), f"{lr:g}", str(max(o["steps"] for o in of)), arm, str(len(of)), average["start"], average["peak"],
                f"{average['final']} ({min(last):.2f} to {max(last):.2f})", average["drop"],
                *("" if none is None else against(seeds, none, name) for name in ("final", "drop")),
            ])  # fmt: skip
    return lines


def fall_rows(runs: list[dict]) -> list[list[str]]:
    """Return the rows of ``FALLS``; p: Fisher's exact test of the share against that of ``none``, two-sided."""
    lines = []
    for (bits, lr), arms in grouped(runs).items():
        for arm, seeds in arms.items():
            of, none = list(seeds.values()), arms.get("none") if arm != "none" else None
            ends = []
            for name in ("collapse", "fall"):
                steps = sorted(o[name] for o in of if o[name] is not None)
                p = "" if none is None else f"{fisher(of, list(none.values()), name):.2g}"
                ends += [share(len(steps), len(of)), p, ", ".join(map(str, steps))]
            before = sorted((o["collapse"], o["k3"]) for o in of if o["collapse"] is not None)
            first, last = (mean(o[n] for o in of) for n in ("k3_start", "k3_end"))
            grew = f"{sum(o['k3_end'] > o['k3_start'] for o in of)} of {len(of)}"
            lines.append([
                str(bits), f"{lr:g}", str(max(o["steps"] for o in of)), arm, *ends, f"{first:.2g}", f"{last:.2g}", grew,
                ", ".join(f"{k3:.2g}" for _, k3 in before),
            ])  # fmt: skip
    return lines


def shortened(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """Return a Markdown table without the columns ``bits``, ``lr`` and ``steps`` that are the same in all rows, which are
    said above it."""
    same = [i for i in range(3) if len({row[i] for row in rows}) == 1]
    above = ", ".join(f"{columns[i]} {rows[0][i]}" for i in same)
    keep = [i for i in range(len(columns)) if i not in same]
    text = report.markdown([columns[i] for i in keep], [[row[i] for i in keep] for row in rows])
    return f"*{above}*\n\n{text}" if above else text


def table(runs: list[dict]) -> str:
    """Return the two tables of outcomes: rewards, then falls and mismatch."""
    return f"{shortened(REWARDS, reward_rows(runs))}\n\n{shortened(FALLS, fall_rows(runs))}"


def thresholds(runs: list[dict]) -> str:
    """Return the shares of runs that collapsed and that fell, by the fall in reward that counts as one."""
    drops, lines = (0.05, DROP, 0.15), []
    for arm in dict.fromkeys(sorted((r["arm"] for r in runs), key=ORDER.index)):
        found = {d: [outcome(r, d) for r in runs if r["arm"] == arm] for d in drops}
        cells = [f"{sum(o[name] is not None for o in found[d])}" for name in ("collapse", "fall") for d in drops]
        lines.append([arm, str(len(found[DROP])), *cells])
    columns = [f"{name}, {d:g}" for name in ("collapsed", "fell") for d in drops]
    return report.markdown(("arm", "runs", *columns), lines)


def show(runs: list[dict], stored: list[dict]) -> None:
    """Print the table of a grid, and how many of its runs are those that the repository keeps, in every reward and norm."""

    def numbers(run):
        return tuple((row["step"], row["reward"], row["norm"]) for row in run["rows"])

    kept = set(map(numbers, stored))
    same = sum(numbers(run) in kept for run in runs)
    title = f"{len(runs)} runs; {same} of them repeat one that is kept in results/, in every reward and gradient norm"
    report.show(report.table(title, REWARDS, reward_rows(runs)))
    report.show(report.table("p: Fisher's exact test against `none`", FALLS, fall_rows(runs)))


# ---- falls against bits


def steps_per(rate: float | None, low: float | None, high: float | None) -> str:
    """Return a rate per 1,000 steps with its interval as steps per event; what is not determined has no bound.

    >>> steps_per(0.5, 0.1, 2.0), steps_per(0.0, 0.0, 0.37), steps_per(None, None, None)
    ('2,000 [500, 10,000]', 'at least 2,700', '?')
    """
    value, most, least = (f"{float(f'{1000 / x:.2g}'):,.0f}" if x else None for x in (rate, low, high))
    if least is None:
        return "?"
    if most is None:
        return f"at least {least}"
    return f"{value} [{least}, {most}]"


def events(outcomes: list[dict]) -> tuple[int, float]:
    """Return (first falls, thousands of steps before them or the end)."""
    return sum(o["fall"] is not None for o in outcomes), sum(o["fall"] or o["steps"] for o in outcomes) / 1000


def falls(runs: list[dict]) -> str:
    """Return the table of first falls of arm ``none`` against bits; below it the factor that a bit makes, and controls."""
    cells = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda r: r["bits"]):
        cells[run["arm"]][run["bits"]].append(outcome(run))
    none = cells.pop("none")
    counts = {bits: events(of) for bits, of in none.items()}
    longer, rates = rate_model({bits: of for bits, of in counts.items() if bits <= FITTED}, at=counts)
    lines = []
    for b, (k, exposure) in counts.items():
        growth = [o["k3_end"] / o["k3_start"] for o in none[b]]
        lines.append([
            f"p{b}", str(len(none[b])), f"{k} in {1000 * exposure:,.0f}", steps_per(k / exposure, *garwood(k, exposure)),
            steps_per(*rates[b]),
            f"{mean(o['k3_start'] for o in none[b]):.2g}", f"{mean(o['k3_end'] for o in none[b]):.2g}",
            f"{median(growth):.1f}", f"{sum(g > 1 for g in growth)} of {len(growth)}",
            f"{mean(o['final'] for o in none[b]):.2f}",
        ])  # fmt: skip
    text = report.markdown(
        ("bits", "runs", "first falls in steps run until then", "steps per first fall, 95 %",
         f"the same by the fit to p3 to p{FITTED}", "k3, first 50 steps", "k3, last 100", "growth, median", "grew in", "final"),
        lines
    )  # fmt: skip
    factor = ["?" if x is None else f"{math.exp(-x):.1f}" for x in longer]
    controls = []
    for arm, widths in cells.items():
        k, exposure = events([o for of in widths.values() for o in of])
        where = " and ".join(f"p{b}" for b in widths)
        controls.append(
            f"`{arm}` at {where}: {k} in {1000 * exposure:,.0f}, {steps_per(k / exposure, *garwood(k, exposure))}"
        )
    return (
        f"{text}\n\nBy the fit one bit more makes steps per first fall longer by a factor of {factor[0]} [{factor[2]}, {factor[1]}]. "
        f"Other arms, first falls in steps run until then and steps per fall: {'; '.join(controls)}."
    )


def slopes(found: dict, kernel: str) -> dict[str, list[float]]:
    """Return {arm: least-squares slope of log2 k3 against bits, from ``SMALL`` on, for each seed}, of arms whose k3 are all
    positive."""
    cells = defaultdict(dict)
    for row in found["rows"]:
        if row["kernel"] == kernel:
            cells[row["arm"], row["seed"]][row["bits"]] = row["k3"]
    out = defaultdict(list)
    for (arm, _), by_bits in cells.items():
        by_bits = {b: k3 for b, k3 in by_bits.items() if b >= SMALL}
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
            lines.append([kernel, arm, *values, said(*(center(fits[arm]) or fits[arm])) if fits.get(arm) else ""])
    return report.markdown(
        ("sampler's attention", "arm", *(f"p{b}" for b in every), f"log2 k3 per bit from p{SMALL} on, 95 %"), lines
    )


def real(found: dict) -> str:
    """Return the table of the arms with a real engine."""
    lines = []
    for arm, rows in found["arms"].items():
        o = outcome({"rows": rows})
        numbers = [f"{o[name]:.2f}" for name in ("start", "peak", "final", "drop")]
        end = "no" if o["collapse"] is None else f"at step {o['collapse']}"
        halves = [[r["k3"] for r in part] for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]
        k3 = [f"{mean(half):.2g} ± {stdev(half) / math.sqrt(len(half)):.1g}" for half in halves]
        lines.append([arm, rows[-1]["step"], *numbers, end, f"{o['k3_start']:.2g}", *k3, f"{o['k3_end']:.2g}"])
    columns = (
        "arm", "steps", "start", "peak", "final", "drop", "collapsed", "k3, first 50 steps", "first half", "second half",
        "last 100",
    )  # fmt: skip
    made = ", ".join(f"{name} {found['versions'][name]}" for name in ("verl", "vllm", "torch", "transformers"))
    return (
        f"{report.markdown(columns, lines)}\n\n{found['steps']} steps an arm (whole windows of 25 are shown) in {found['minutes']:g} "
        f"minutes, verl's starts included; lr {found['lr']:g}, seed {found['seed']}; ±: standard error over windows; CPU, {made}."
    )


def stored() -> dict[str, list[dict]]:
    """Return the runs that the repository keeps: {grid: runs}, none of a grid that has no file."""
    return defaultdict(list, {path.stem: load(path) for path in sorted((HERE / "results").glob("*.jsonl"))})


def as_bit(runs: list[dict], base: dict) -> list[dict]:
    """Return the runs of arm ``none`` with one more bit than ``base``, as the arm ``bit`` that they are
    (tests/test_collapse.py): not run twice."""
    cell = ("none", base["bits"] + 1, base["lr"])
    return [{**r, "arm": "bit", "bits": base["bits"]} for r in runs if (r["arm"], r["bits"], r["lr"]) == cell]


def main_runs(runs: dict[str, list[dict]]) -> list[dict]:
    """Return the runs of every arm at the default's settings, of the seeds that all arms have."""
    return runs["default"] + runs["arms"] + as_bit(runs["widths"], runs["default"][0])


def summary() -> str:
    """Return the table of the project's README: every arm in a few words, with all its seeds."""
    runs, lines = stored(), []
    base = runs["default"][0]
    more = [r for r in runs["seeds"] if r["bits"] == base["bits"]] + as_bit(runs["seeds"], base)
    for arm, seeds in next(iter(grouped(main_runs(runs) + more).values())).items():
        of = list(seeds.values())
        shares = [share(sum(o[name] is not None for o in of), len(of)) for name in ("collapse", "fall")]
        k3 = [f"{mean(o[name] for o in of):.2g}" for name in ("k3_start", "k3_end")]
        lines.append([
            arm, str(len(of)), *(f"{mean(o[name] for o in of):.2f}" for name in ("start", "peak", "final")),
            *shares, *k3,
        ])  # fmt: skip
    columns = (
        "arm",
        "seeds",
        "reward: start",
        "peak",
        "end",
        "collapsed, 95 %",
        "fell at some time, 95 %",
        "k3: start",
        "end",
    )
    return report.markdown(columns, lines)


def files() -> dict[Path, str]:
    """Return what this script writes: path to text."""
    runs = stored()
    read = {name: json.loads((HERE / f"results/{name}.json").read_text()) for name in ("why", "bits", "real_engine")}
    base = runs["default"][0]
    main = main_runs(runs)
    more = [r for r in runs["seeds"] if r["bits"] == base["bits"]]  # seeds 5 to 9
    ten = [r for r in main if r["arm"] in BANDS] + more
    widths = [r for r in main if r["arm"] == "same"] + ten + runs["widths"]
    widths += [r for r in runs["seeds"] if r["bits"] != base["bits"]]
    rates = [r for r in main if r["arm"] in BANDS] + runs["rates"]
    tables = {
        "default": table(main),
        "thresholds": thresholds(main),
        "confirmation": table(more),
        "ten": table(ten),
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
    for name in ("differences", "tokens", "landing", "gradients"):
        reason = report.filled(reason, name, getattr(why_tables, name)(read["why"]))
    drawn = arm_pictures(main) | width_pictures(widths)
    return {HERE / "README.md": page, HERE / "WHY.md": reason} | {HERE / f"{n}.svg": svg for n, svg in drawn.items()}


if __name__ == "__main__":
    made = files()
    if "--check" in sys.argv[1:]:
        # a picture's text differs with the release of matplotlib that draws it
        stale = [p.name for p, text in made.items() if not p.exists() or (p.suffix != ".svg" and p.read_text() != text)]
        sys.exit(f"{', '.join(stale)} differ from the results; run recipes/collapse/table.py" if stale else 0)
    for path, text in made.items():
        path.write_text(text)
