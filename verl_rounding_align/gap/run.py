"""``verl-rounding-align gap``: rollouts, scores and the report, with progress, in one folder.

DIR/compiled, DIR/eager   rollouts, the trainer's scores, and what else the engine said (:mod:`.rollouts`, :mod:`.measure`)
DIR/gap.json              rows, as ``gap.schema.json`` describes them
DIR/report.md, .html      everything in DIR rendered, attribution.json, landing.json and triage.json included
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import numpy as np

from ..engines.auto import Rollout
from ..engines.presets import Preset
from ..engines.rollouts import read_json
from ..logprobs.intervals import per_sequence
from ..logprobs.tally import BATCHED, VERSION, Tally, k3_terms
from ..plan import find_preset
from ..regions import GROUPS
from ..report import pages as gap_report
from ..report import progress as bars
from ..report import rows as report
from ..trainers.preview import engine_preset, installed_vllm
from ..triage import detect as triage
from ..triage import facts
from ..triage.rows import as_json
from . import arms, attribute
from . import measure as gap
from . import rollouts as rollout
from .arms import NONE, expand, plan
from .score import check_layout

MODES = {"compiled": [False], "eager": [True], "both": [False, True]}
PRESET = "preset.json"  # in a mode's folder: which preset and layout its last scores are of
NOISE_PROMPTS = 16  # an engine's variant is compared with the engine on the first responses


def check(mode: str, regions: Sequence[str]) -> list[str]:
    """Return the arms of a measurement.

    Raises:
        ValueError: an option that is not legal.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    found = expand(regions)
    for arm in found:
        arms.check(arm)
    return found


def aligned_to(folder: Path) -> tuple[str, dict, str]:
    """Return (device, fields of the preset, layout) of the last scores in a mode's folder.

    Raises:
        ValueError: the file that says it is damaged, or not there.
    """
    file = folder / PRESET
    try:
        found = read_json(file)
        device, preset, layout = found["device"], found["preset"], found.get("layout", BATCHED)
        return device, {**preset, "name": preset["name"]}, layout
    except FileNotFoundError:
        raise ValueError(f"{file}: not there, and it says what the scores are aligned to; run `gap` again") from None
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: not written by this command ({type(error).__name__}: {error}); run `gap` again"
        ) from error


def remember(folder: Path, device: str, preset: Preset, layout: str) -> None:
    """Write what :func:`aligned_to` reads."""
    text = json.dumps({"device": device, "preset": preset.as_dict(), "layout": layout}, indent=2)
    (folder / PRESET).write_text(text + "\n")


def run_gap(
    model: str,
    out: Path,
    regions: Sequence[str],
    mode: str,
    tokens: int,
    prompts: Path | None,
    device: str | None,
    backend: str,
    engine: str | None = None,
    full_vocab: int = 0,
    noise: bool = True,
    temperature: float = 1.0,
    length: int = rollout.LENGTH,
    layout: str = BATCHED,
) -> dict:
    """Measure, print and write ``gap.json`` and the report; see the command's help for the arguments.

    Returns:
        What ``gap.json`` holds.

    Raises:
        ValueError: an option that is not legal, or that the folder's rollouts were not made with.
    """
    chosen = check(mode, regions)
    check_layout(layout)
    device = here(device)
    if length < 1:
        raise ValueError(f"length={length}: a response has at least 1 token")
    text = prompts.read_text() if prompts else (resources.files(__package__) / "prompts.txt").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"prompts={str(prompts)!r}: not one prompt in it")
    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"model={model!r}: expected a folder of a Transformers checkpoint, with config.json")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: expected 1 or more")
    presets = {}
    for eager in MODES[mode]:
        name = "eager" if eager else "compiled"
        presets[name] = engine_preset(model, engine, Rollout(installed_vllm(), device, eager, "bfloat16"))
        for arm in chosen:  # before minutes of generation
            plan(arm, presets[name])
    extras = {rollout.PREFILL: int(noise), rollout.NEXT_TOKENS: full_vocab}
    options = {"temperature": temperature, "length": length}
    for name, preset in presets.items():
        folder, eager = out / name, name == "eager"
        with bars.progress() as display:
            title = f"vLLM ({name}) generates {tokens} tokens"
            asks = [what for what, n in (("prefill", noise), ("whole distributions", full_vocab)) if n]
            then = f"vLLM ({name}) is asked for {' and '.join(asks)}" if asks else None
            with bars.follow(display, title, then) as tell:
                made = rollout.make(folder, model, lines, tokens, eager, extras, tell, display.print, **options)
            for variant, (title, how) in gap.VARIANTS.items() if noise else ():
                few = lines[:NOISE_PROMPTS]
                with bars.follow(display, title) as tell:
                    varied = rollout.make(folder / variant, model, few, 1, eager, progress=tell, **options, **how)
                if varied.meta.get("cached_prompt_tokens") == 0:
                    display.print(f"no row for {title}: the prompts are shorter than one of its blocks")
        if made.meta["device"] != device:
            raise ValueError(
                f"device={device!r}: vLLM ran on {made.meta['device']}; the preset would be another engine's"
            )
        remember(folder, device, preset, layout)
    return _measure(model, out, presets, chosen, backend, device, tuple(gap.FLOORS) if noise else (), layout)


def here(device: str | None) -> str:
    """Return the device that is asked for, or the one that is here.

    Raises:
        ValueError: unknown, or not here.
    """
    import torch

    devices = ("cpu", "cuda")
    if device is not None and device not in devices:
        raise ValueError(f"device={device!r}: unknown device {device!r}; choose from {', '.join(devices)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def rescore(
    source: Path,
    model: str | None,
    regions: Sequence[str],
    backend: str,
    engine: str | None,
    noise: bool = True,
    layout: str = BATCHED,
) -> dict:
    """Score the rollouts that ``gap`` has kept, without an engine; see :func:`run_gap` for the rest.

    Args:
        source: the folder given to ``gap`` as ``--out``.
        model: the checkpoint, if it is not where it was.
        engine: a preset's name or a probe's file; None for the preset that ``gap`` aligned to.

    Raises:
        ValueError: an option that is not legal; rollouts of unlike devices; a checkpoint that is not there, or that is
            not the one that made the rollouts.
    """
    chosen, presets, devices = check("both", regions), {}, set()
    check_layout(layout)
    for mode in ("compiled", "eager"):
        folder = source / mode
        if (folder / "rollouts.safetensors").exists():
            meta, (device, preset, _) = rollout.Rollouts.load(folder).meta, aligned_to(folder)
            model = model or meta.get("model")
            if model is None or not Path(model).is_dir():
                raise ValueError(
                    f"model={model!r}: no such folder; give the checkpoint that made the rollouts as --model"
                )
            rollout.check_checkpoint(folder, meta, model)
            devices.add(device)
            presets[mode] = find_preset(engine or Preset.from_dict(preset, str(folder / PRESET)))
            for arm in chosen:
                plan(arm, presets[mode])
    if len(devices) != 1:
        raise ValueError(f"{source}: rollouts of unlike devices, {', '.join(sorted(devices))}")
    device = here(devices.pop())
    payload = _measure(model, source, presets, chosen, backend, device, tuple(gap.FLOORS) if noise else (), layout)
    for mode, preset in presets.items():
        remember(source / mode, device, preset, layout)
    return payload


def _measure(
    model: str,
    out: Path,
    presets: dict[str, Preset],
    chosen: Sequence[str],
    backend: str,
    device: str,
    floors: Sequence[str],
    layout: str,
) -> dict:
    """Score rollouts of one or two modes, write and show what was found."""
    modes = {}
    for name, preset in presets.items():
        rollouts = rollout.Rollouts.load(out / name)
        with bars.progress() as display:
            advance = bars.bar_by_name(display, "trainer scores them: {}", len(rollouts.log_probs))
            trainer = gap.Trainer(model, rollouts, out / name, backend, device, advance, layout)
            rows = gap.measure(trainer, chosen, preset, floors)
            crossed = []
            for other in presets.values():
                if other is not preset and "all" in chosen:
                    crossed += [r for r in gap.measure(trainer, ["all"], other, ()) if r.engine == other.name]
            exact = gap.exact(trainer, chosen, preset)
            shown = [NONE, *(arm for arm in chosen if arm in ("all", "paper"))]
            rolled, pictures = rollouts.log_probs.double().numpy(), {}
            base = trainer.scores(NONE, preset)["log_probs"]
            for arm in shown:
                d = rolled - trainer.scores(arm, preset)["log_probs"]
                tally = Tally().add(d, rollouts.response_offsets)
                pictures[arm] = dict(positions=tally.by_position(), sizes=tally.by_size())
            if "single" in floors and layout != "single":
                d = trainer.scores(NONE, preset, "single")["log_probs"] - base
                tally = Tally().add(d, rollouts.response_offsets)
                pictures[gap.FLOORS["single"]] = dict(positions=tally.by_position(), sizes=tally.by_size())
        modes[name] = dict(
            preset=preset.name,
            layout=layout,
            rollouts={k: v for k, v in rollouts.meta.items() if k != "model"},
            rows=[asdict(r) for r in rows],
            crossed=[asdict(r) for r in crossed],
            exact=[asdict(r) for r in exact],
            pictures=pictures,
            triage=as_json(triage.triage_rollouts(rollouts.pairs(base), rollouts.meta, facts.of_model(model))),
        )
    payload = {"schema": "verl-rounding-align/gap", "schema_version": VERSION, "model": Path(model).name}
    payload |= {"device": device, "modes": modes}
    report.write_json(out / "gap.json", payload)
    report.show(*(section.table() for section in gap_report.sections(out)))
    report.show(*(f"wrote {path}" for path in gap_report.write(out)))
    return payload


def run_attribute(out: Path, players: Sequence[str] | None = None, to: Path | None = None) -> dict[str, tuple]:
    """Attribute the reduction of k3 that ``gap --regions subsets`` has measured in ``out``; print and write it.

    Args:
        players: groups or points; None for the groups.
        to: another file for what ``attribution.json`` holds.

    Returns:
        mode -> (whole, one row per player, one per pair); see :func:`attribute.attribute`.

    Raises:
        ValueError: no gap in the folder, an unknown player, or a set of players that was not measured.
    """
    players = list(players or GROUPS)
    its_points = {player: arms.player(player) for player in players}
    found, details, failed = {}, {}, []
    for mode in (m for m in MODES if (out / m / "rollouts.safetensors").exists()):
        rollouts = rollout.Rollouts.load(out / mode)
        offsets, engine = rollouts.response_offsets, rollouts.log_probs.numpy().astype("float64")
        tokens = per_sequence(np.ones(len(engine)), offsets)
        # of the preset that gap aligned to: a folder may hold scores of others
        _, its_preset, layout = aligned_to(out / mode)
        preset = its_preset["name"]
        kept = gap.kept_scores(out / mode, layout).get(preset)
        which = preset if layout == BATCHED else f"{preset}, {layout}"
        if kept is None:
            failed.append((-1, f"{out / mode}: no scores for {which}", mode, layout))
            continue
        its = {player: points & kept.live for player, points in its_points.items()}
        sets = {s: frozenset().union(*(its[p] for p in s)) for s in attribute.coalitions(players)}
        k3 = {
            s: per_sequence(k3_terms(engine - kept.scores[points]), offsets)
            for s, points in sets.items()
            if points in kept.scores
        }
        try:
            found[mode] = attribute.attribute(k3, tokens, players)
            details[mode] = dict(preset=preset, layout=layout, tokens=len(engine), sequences=len(tokens))
        except ValueError as error:
            failed.append((len(k3), f"{out / mode}, {which}: {error}", mode, layout))
    if not found and failed:  # the nearest miss
        asked = "subsets" if players == list(GROUPS) else ":".join(("subsets", *players))
        _, why, _, layout = max(failed)
        asked += "" if layout == BATCHED else f" --layout {layout}"
        raise ValueError(f"{why}; run `verl-rounding-align gap --out {out} --regions {asked} ...`")
    if not found:
        raise ValueError(f"{out}: no rollouts of `verl-rounding-align gap` in it")
    payload = {"schema": "verl-rounding-align/attribution", "schema_version": VERSION}
    payload["modes"] = {mode: {**details[mode], **attribute.as_json(*rows)} for mode, rows in found.items()}
    for file in filter(None, (out / "attribution.json", to)):
        report.write_json(file, payload)
    report.show(*(section.table() for section in gap_report.attribution(payload)))
    report.show(*(f"not attributed: {why}" for _, why, mode, _ in failed if mode not in found))
    if (out / "gap.json").exists():
        report.show(*(f"wrote {path}" for path in gap_report.write(out)))
    return found
