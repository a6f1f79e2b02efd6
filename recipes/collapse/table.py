"""Write README.md's tables and reward.svg from results/; --check: fail if they differ."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from verl_rounding_align import report  # noqa: E402

ORDER = ("none", "rope", "paper", "all", "same", "tis", "bit")
COLOURS = dict(zip(ORDER, ("#d95f02", "#7570b3", "#66a61e", "#1b9e77", "#4c4c4c", "#a6761d", "#e7298a"), strict=True))
DROP, SHORT, LONG = 0.10, 50, 100  # of reward; steps of a window and of the final mean
# two-sided 95 % quantiles of Student's t by degrees of freedom
T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

SCHEMA = {
    "type": "object",
    "required": ["arm", "bits", "lr", "seed", "steps", "pretrain", "prompts", "gradients", "seconds", "rows", "versions"],
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


def load(path: Path) -> list[dict]:
    """Return the runs of a grid's file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def windows(rows: list[dict], name: str, size: int) -> list[tuple[int, float]]:
    """Return (last step, mean) of consecutive windows of ``size`` steps."""
    per = size // (rows[0]["step"] or 1)
    chunks = [rows[i : i + per] for i in range(0, len(rows) - per + 1, per)] if per else [[r] for r in rows]
    return [(chunk[-1]["step"], mean(r[name] for r in chunk)) for chunk in chunks or [rows]]


def outcome(run: dict) -> dict:
    """Return what README.md defines: start, peak, final, drop, the step of collapse or None, the mismatch before it.

    >>> rows = [dict(step=25 * i, reward=r, k3=0.1) for i, r in enumerate([0.5, 0.5, 0.8, 0.8, 0.6, 0.6, 0.6, 0.6], 1)]
    >>> found = outcome({"rows": rows})
    >>> found["peak"], round(found["drop"], 2), found["collapse"]
    (0.8, 0.2, 150)
    """
    rows = run["rows"]
    rewards = windows(rows, "reward", SHORT)
    peak = max(r for _, r in rewards)
    last = [r for r in rows if r["step"] > rows[-1]["step"] - LONG]
    final, collapse = mean(r["reward"] for r in last), None
    if final <= peak - DROP:
        above = [i for i, (_, r) in enumerate(rewards) if r > peak - DROP]
        collapse = rewards[min(above[-1] + 1, len(rewards) - 1)][0]
    end = rows[-1]["step"] if collapse is None else collapse
    before = [r["k3"] for r in rows if end - LONG < r["step"] <= end]
    found = dict(start=rewards[0][1], peak=peak, final=final, drop=peak - final, collapse=collapse, k3=mean(before))
    return {**found, "k3_start": windows(rows, "k3", SHORT)[0][1], "k3_end": mean(r["k3"] for r in last)}


def binomial(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a share of ``k`` in ``n``, by bisection.

    >>> [round(x, 3) for x in binomial(0, 5)], [round(x, 3) for x in binomial(3, 5)]
    ([0.0, 0.522], [0.147, 0.947])
    """
    tail = (1 - level) / 2

    def at_least(p: float, k: int) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))

    def solve(k: int, target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_least(middle, k) < target else (low, middle)
        return low

    return (0.0 if k == 0 else solve(k, tail), 1.0 if k == n else solve(k + 1, 1 - tail))


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float, float] | None:
    """Return mean and 95 % t interval of a - b over common seeds, None of fewer than two."""
    d = [a[s] - b[s] for s in sorted(a.keys() & b.keys())]
    if len(d) < 2:
        return None
    half = T975[min(len(d) - 1, len(T975) - 1)] * stdev(d) / math.sqrt(len(d))
    return mean(d), mean(d) - half, mean(d) + half


def grouped(runs: list[dict]) -> dict[tuple[int, float], dict[str, dict[int, dict]]]:
    """Return {(bits, lr): {arm: {seed: outcome}}} in the order of ``ORDER``."""
    found = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda r: (r["bits"], r["lr"], ORDER.index(r["arm"]), r["seed"])):
        found[run["bits"], run["lr"]][run["arm"]][run["seed"]] = outcome(run)
    return found


COLUMNS = (
    "bits", "lr", "arm", "seeds", "start", "peak", "final (lowest to highest)", "drop", "final less `none`, 95 %",
    "collapsed, 95 %", "steps to collapse", "k3, first 50 steps", "k3, 100 steps before collapse or end",
)  # fmt: skip


def table(runs: list[dict]) -> str:
    """Return the table of outcomes."""
    lines = []
    for (bits, lr), arms in grouped(runs).items():
        finals = {arm: {s: o["final"] for s, o in seeds.items()} for arm, seeds in arms.items()}
        for arm, seeds in arms.items():
            of = list(seeds.values())
            steps = sorted(o["collapse"] for o in of if o["collapse"] is not None)
            low, high = binomial(len(steps), len(of))
            d = None if arm == "none" or "none" not in finals else paired(finals[arm], finals["none"])
            average = {n: mean(o[n] for o in of) for n in ("start", "peak", "final", "drop", "k3_start", "k3")}
            last = [o["final"] for o in of]
            lines.append(
                [
                    str(bits + (arm == "bit")),
                    f"{lr:g}",
                    arm,
                    str(len(of)),
                    f"{average['start']:.2f}",
                    f"{average['peak']:.2f}",
                    f"{average['final']:.2f} ({min(last):.2f} to {max(last):.2f})",
                    f"{average['drop']:.2f}",
                    "" if d is None else f"{d[0]:+.2f} [{d[1]:+.2f}, {d[2]:+.2f}]",
                    f"{len(steps)} of {len(of)} [{low:.2f}, {high:.2f}]",
                    ", ".join(map(str, steps)),
                    f"{average['k3_start']:.2g}",
                    f"{average['k3']:.2g}",
                ]
            )
    return report.markdown(COLUMNS, lines)


BANDS = ("none", "all")


def picture(runs: list[dict]) -> str:
    """Return SVG: reward and k3 against the step, mean and range over seeds, of one (bits, lr)."""
    from verl_rounding_align.measure.pictures import _axes, _svg

    figure, panels = _axes(10, 4, columns=2)
    for panel, name in zip(panels, ("reward", "k3"), strict=True):
        for arm in ORDER:
            curves = [windows(r["rows"], name, SHORT) for r in runs if r["arm"] == arm]
            if not curves or (name == "k3" and arm == "same"):  # exactly zero: not on a logarithmic axis
                continue
            steps = [s for s, _ in min(curves, key=len)]
            values = [[c[i][1] for c in curves] for i in range(len(steps))]
            panel.plot(steps, [mean(v) for v in values], color=COLOURS[arm], label=f"{arm} ({len(curves)})")
            if arm not in BANDS:  # seven bands on top of each other hide all of them
                continue
            panel.fill_between(
                steps, [min(v) for v in values], [max(v) for v in values], color=COLOURS[arm], alpha=0.12
            )
        panel.set_xlabel("step")
    panels[0].set_ylabel("reward: share of right digits")
    panels[1].set_ylabel("k3 per token, sampler against trainer")
    panels[1].set_yscale("log")
    panels[1].set_ylim(bottom=2e-3)
    panels[0].legend(frameon=False, fontsize=8)
    bits, lr = runs[0]["bits"], runs[0]["lr"]
    panels[0].set_title(
        f"{bits} significant bits, lr {lr:g}: mean over seeds (number), range of {' and '.join(BANDS)}",
        loc="left",
        fontsize=10,
    )
    return _svg(figure)


def interval(values: list[float], digits: int = 2) -> str:
    """Return mean and 95 % t interval as text."""
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
        lines.append([str(steps), region, *(jackknife(rows, *pair) for pair in pairs)])
    return report.markdown(GRADIENTS, lines)


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
    "steps", "rounding of", "bias^2 / gradient^2", "projection of the bias on the gradient",
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


def files() -> dict[Path, str]:
    """Return what this script writes: path to text."""
    runs = [r for name in ("default", "corrected") for r in load(HERE / f"results/{name}.jsonl")]
    read = {name: json.loads((HERE / f"results/{name}.json").read_text()) for name in ("why", "bits", "real_engine")}
    page = report.filled((HERE / "README.md").read_text(), "default", table(runs))
    reason = report.filled((HERE / "WHY.md").read_text(), "differences", differences(read["why"]))
    reason = report.filled(reason, "gradients", gradients(read["why"]))
    return {
        HERE / "README.md": report.filled(
            report.filled(page, "bits", bits(read["bits"])), "real", real(read["real_engine"])
        ),
        HERE / "WHY.md": reason,
        HERE / "reward.svg": picture(runs),
    }


if __name__ == "__main__":
    made = files()
    if "--check" in sys.argv[1:]:
        # a picture's text differs with the release of matplotlib that draws it
        stale = [p.name for p, text in made.items() if not p.exists() or (p.suffix != ".svg" and p.read_text() != text)]
        sys.exit(f"{', '.join(stale)} differ from the results; run recipes/collapse/table.py" if stale else 0)
    for path, text in made.items():
        path.write_text(text)
