"""``verl-rounding-align gap``: rollouts, scores and the report, with progress, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import report
from ..engine.auto import Rollout
from ..preview import engine_preset, installed_vllm
from . import gap, rollout

MODES = {"compiled": [False], "eager": [True], "both": [False, True]}


def run_gap(
    model: str,
    out: Path,
    regions: Sequence[str],
    mode: str,
    tokens: int,
    prompts: Path | None,
    device: str,
    backend: str,
    engine: str | None = None,
) -> dict[str, list[gap.GapRow]]:
    """Measure, print and write ``gap.json``; see the command's help for the arguments.

    Returns:
        mode -> rows.

    Raises:
        ValueError: an option that is not legal.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    text = prompts.read_text() if prompts else (resources.files(__package__) / "prompts.txt").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    arms = gap.every_subset() if list(regions) == ["subsets"] else list(regions)
    results = {}
    for eager in MODES[mode]:
        name = "eager" if eager else "compiled"
        preset = engine_preset(model, engine, Rollout(installed_vllm(), device, eager))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task(f"vLLM ({name}) generates {tokens} tokens", total=None)
            rollouts = rollout.make(out / name, model, lines, tokens, eager)
            total = int(rollouts.response_offsets[-1])
            progress.update(task, total=total, completed=total)
            tasks = {}

            def advance(arm: str, n: int, tasks=tasks, progress=progress, total=total) -> None:
                if arm not in tasks or progress.tasks[tasks[arm]].finished:
                    tasks[arm] = progress.add_task(f"trainer scores them: {arm}", total=total)
                progress.advance(tasks[arm], n)

            results[name] = gap.measure(model, rollouts, arms, preset, out / name, backend, advance)
        title = f"{Path(model).name}, vLLM {name}, aligned to {preset.name}"
        report.show(gap.render(results[name], title))
    report.write_json(
        out / "gap.json",
        {"model": Path(model).name, "device": device, "modes": {m: gap.as_json(rows) for m, rows in results.items()}},
    )
    return results
