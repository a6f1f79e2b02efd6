"""``verl-rounding-align triage``: files to pairs and facts, then :func:`.triage.triage`."""

from __future__ import annotations

import json
from pathlib import Path

from ..engines import rope, weights
from ..logprobs import pairs
from . import detect as triage
from . import facts


def read_gap(folder: Path) -> tuple[pairs.Pairs, dict] | None:
    """Return (pairs with the unaligned trainer, meta) of a folder that ``gap`` left for one mode; None if it is none.

    Raises:
        ValueError: the trainer's scores are of other rollouts, or of another checkpoint.
    """
    from ..gap.measure import unaligned_scores
    from ..gap.rollouts import Rollouts
    from ..gap.run import PRESET
    from ..logprobs.tally import BATCHED

    if not (folder / "rollouts.safetensors").exists():
        return None
    rollouts = Rollouts.load(folder)
    aligned_to = json.loads((folder / PRESET).read_text()) if (folder / PRESET).exists() else {}
    scores = unaligned_scores(folder, rollouts, aligned_to.get("layout", BATCHED))
    return None if scores is None else (rollouts.pairs(scores), rollouts.meta)


def run_triage(
    dump: Path | None, config: Path | None = None, model: str | None = None, trainer_model: str | None = None
) -> list[triage.Finding]:
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
        trainer, engine = weights.digest_hf(trainer_model), weights.digest_hf(model)
        compared = f"{weights.coverage(trainer, engine)}, equal in every bit"
        found = [
            triage.compare_weights(trainer, engine),
            triage.compare_rope(rope.of_config(trainer_model), rope.of_config(model)),
        ]
    return triage.triage(sample, known, [f for f in found if f], compared)
