"""``verl-rounding-align triage``: the command. It reads files into pairs and facts, and prints what :func:`.detect.triage`
says of them."""

from __future__ import annotations

from pathlib import Path

from ..engines import rope, weights
from ..files import read_json
from ..logprobs import pairs
from ..logprobs.tally import VERSION
from ..report import rows as report
from . import detect, facts
from .compare import compare_rope, compare_weights
from .render import render
from .rows import Finding, as_json


def read_gap(folder: Path) -> tuple[pairs.Pairs, dict] | None:
    """Return (pairs with the unaligned trainer, meta) of a folder that ``gap`` left for one mode; None if it is no such folder.

    Raises:
        ValueError: the trainer's scores are of other rollouts, or of another checkpoint, or a file in the folder is broken.
    """
    from ..gap.measure import unaligned_scores
    from ..gap.rollouts import Rollouts
    from ..gap.run import PRESET
    from ..logprobs.tally import BATCHED

    if not (folder / "rollouts.safetensors").exists():
        return None
    rollouts = Rollouts.load(folder)
    aligned_to = read_json(folder / PRESET) if (folder / PRESET).exists() else {}
    scores = unaligned_scores(folder, rollouts, aligned_to.get("layout", BATCHED))
    return None if scores is None else (rollouts.pairs(scores), rollouts.meta)


def find(
    dump: Path | None, config: Path | None = None, model: str | None = None, trainer_model: str | None = None
) -> list[Finding]:
    """Return the findings; see the command's help for the arguments.

    Raises:
        ValueError: nothing to look at, or a file that cannot be read.
    """
    if dump is None and config is None and not (model and trainer_model):
        raise ValueError("nothing to look at: give a DUMP, --config, or --model with --trainer-model")
    if trainer_model and not model:
        raise ValueError(f"trainer-model={trainer_model!r}: give the engine's checkpoint as --model too")
    for name, folder in (("model", model), ("trainer-model", trainer_model)):
        if folder and not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{name}={folder!r}: expected a folder of a Transformers checkpoint, with config.json")
    known, sample, found, compared = facts.Facts(), None, [], ""
    if dump is not None:
        gap = read_gap(dump) if dump.is_dir() else None
        if gap:
            sample, known = gap[0], facts.of_rollouts(gap[1])
            made_by = Path(gap[1].get("model", ""))
            if (made_by / "config.json").exists():
                known |= facts.of_model(made_by)
        else:
            sample = pairs.load(dump)
    if config is not None:
        known |= facts.of_yaml(config)
    if model:
        known |= facts.of_model(model)
    if trainer_model:
        engine = weights.digest_hf(model)
        trainer = weights.digest_hf(trainer_model, engine=engine)
        covered = weights.coverage(trainer, engine)
        compared = f"{covered}, {covered.equal}"
        found = [
            compare_weights(trainer, engine),
            compare_rope(rope.of_config(trainer_model), rope.of_config(model)),
        ]
    return detect.triage(sample, known, [f for f in found if f], compared)


def run_triage(
    dump: Path | None,
    config: Path | None = None,
    model: str | None = None,
    trainer_model: str | None = None,
    json: str | None = None,
) -> list[Finding]:
    """Find, print and write; see the command's help for the arguments.

    Raises:
        ValueError: see :func:`find`.
    """
    findings = find(dump, config, model, trainer_model)
    report.show(render(findings, str(dump or config or model)))
    if json:
        head = {"schema": "verl-rounding-align/triage", "schema_version": VERSION}
        report.write_json(json, {**head, "findings": as_json(findings)})
    return findings
