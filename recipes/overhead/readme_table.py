"""Print the README's overhead tables from results/*.json: ratios only; what no file holds is "not measured"."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl_rounding_align.report import rows as report

RESULTS = Path(__file__).parent / "results"
MISSING = "not measured"


def load(name: str, results: Path = RESULTS) -> dict | None:
    """Return the payload of ``results/<name>.json``, or None."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _time(row: dict | None) -> str:
    """Return a ratio with its interval; without an effect beyond the spread, the interval alone."""
    if row is None:
        return MISSING
    t = row["timing"]
    interval = f"{t['low']:.3f}-{t['high']:.3f}"
    return f"no difference seen ({interval})" if t["ratio"] is None else f"{t['ratio']:.3f}x ({interval})"


def costs(results: Path = RESULTS) -> list[str]:
    """Return the table of forward and backward of whole models on CPU, and of layers on a GPU where it was measured."""
    found = {name: load(f"targets-{name}", results) for name in ("smollm2-135m", "qwen3-0.6b")}
    gpu = load("gpu", results)
    plans = ("rope", "paper", "all")
    columns = ["model, device", "memory: kept for backward, peak (all)", *plans]
    rows = []
    for name, payload in found.items():
        by_arm = {r["arm"]: r for r in payload["rows"]} if payload else {}
        one = by_arm.get("all")
        label = f"{one['model']}, {one['layers']} layers, {one['device']}" if one else f"{name}, cpu"
        memory = f"{_ratio(one['saved_ratio'])}, {_ratio(one['peak_ratio'])}" if one else MISSING
        rows.append([label, memory, *(_time(by_arm.get(plan)) for plan in plans)])
    measured = [r for r in gpu["overhead"] if r["phase"] == "forward_backward"] if gpu and not gpu["small"] else []
    if not measured:
        rows.append(["Qwen3-1.7B, 4B, 8B layers, GPU", *[MISSING] * 4])
    for name, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in measured):
        by_arm = {r["arm"]: r for r in measured if (r["model"], r["tokens"]) == (name, tokens)}
        one = by_arm.get("all")
        memory = f"{_ratio(one['saved_ratio'])}, {_ratio(one['peak_ratio'])}" if one else MISSING
        label = f"{name} layers, {tokens} tokens, {gpu['device']}"
        rows.append([label, memory, *(_time(by_arm.get(plan)) for plan in plans)])
    return report.markdown(columns, rows).splitlines()


def shares(results: Path = RESULTS) -> list[str]:
    """Return the table of where a pass spends its time, unaligned and with every group."""
    found = [load(f"shares-{name}", results) for name in ("smollm2-135m", "qwen3-0.6b")]
    found = [payload for payload in found if payload]
    columns = ["time in"]
    for payload in found:
        columns += [f"{payload['model']}, {payload['layers']} layers: {arm}, %" for arm in ("none", "all")]
    none = found[0]["shares"]["none"] if found else {}
    kinds = [*sorted(none, key=none.get, reverse=True), "sum"] if found else []
    rows = []
    for kind in kinds:
        cells = [payload["shares"][arm] for payload in found for arm in ("none", "all")]
        rows.append([kind, *(f"{sum(x.values()) if kind == 'sum' else x[kind]:.1f}" for x in cells)])
    if found and all("floor" in payload for payload in found):
        floors = [cell for payload in found for cell in ("", f"{payload['floor']['all']:.1f}")]
        rows.append(["compiled regions' least traffic, at the speed of memory", *floors])
    return report.markdown(columns, rows or [[MISSING]]).splitlines()


def alternatives(shape: str, results: Path = RESULTS) -> list[str]:
    """Return the table of what a user would pick instead, for one shape."""
    payload, gap = (
        load(f"alternatives-{shape}", results),
        load("alternatives_gap", results) or {"ratio": {}, "unpaired": []},
    )
    columns = [
        "trainer",
        "gap left (k3, ratio)",
        "first call, in steps",
        "new graphs over lengths",
        "forward and backward",
    ]
    left = {arm: "{:.2f}x ({:.2f}-{:.2f})".format(*ratio) for arm, ratio in gap["ratio"].items()}
    rows = []
    for r in payload["rows"] if payload else ():
        if r["measured"] != "yes":
            rows.append([r["arm"], r["measured"], "", "", ""])
            continue
        phases = {x["phase"]: x for x in r["rows"]}
        first = MISSING if r["first_call_steps"] is None else f"{r['first_call_steps']:.0f}"
        graphs = MISSING if r["lengths"] is None else f"{r['graphs_lengths']} over {r['lengths']}"
        label = r["arm"] if r["plan"] == "none" else f"aligned: {r['arm']}"
        rows.append([label, left.get(r["arm"], MISSING), first, graphs, _time(phases["forward_backward"])])
    seen = {r["arm"] for r in payload["rows"]} | {"none", "paper"} if payload else set()
    rows += [[arm, left[arm], *[MISSING] * 3] for arm in left if arm not in seen and arm not in gap["unpaired"]]
    cost = load("engine_cost", results)
    for arm in gap["unpaired"]:  # on the engine's side: not a trainer's cost
        sampling = MISSING if cost is None else _time(cost)
        rows.append([arm, left.get(arm, MISSING), "", "", f"of sampling: {sampling}"])
    return report.markdown(columns, rows or [[MISSING] * 5]).splitlines()


if __name__ == "__main__":
    print("\n".join([*costs(), "", *alternatives("smollm2-135m")]))
    sys.exit(0)
