"""Both sides compared directly: digests of weights, RoPE frequencies, a running engine.

Log-probs cannot tell rounding from weights that differ by less than rounding moves logits. A comparison of digests can.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..engines import rope
from ..engines import weights as digests
from .rows import CERTAIN, NOT_COMPARED, POSSIBLE, Finding


def compare_weights(trainer: Mapping, engine: Mapping) -> Finding | None:
    """Return what comparing two sets of digests found: tensors that differ, or that only one side has (a tied head aside).

    None means that all tensors of both sides were compared and that they are equal, in every bit or after the cast that the
    engine needs (``Coverage.equal``).

    Args:
        trainer, engine: name -> :class:`..engines.weights.Digest`.

    Raises:
        ValueError: the two sides have no tensor in common.
    """
    differ, covered = digests.compare(trainer, engine), digests.coverage(trainer, engine)
    if not differ:
        if covered.whole:
            return None
        return Finding(
            NOT_COMPARED,
            POSSIBLE,
            f"{covered}; those are {covered.equal}, the others may differ",
            "compare two checkpoints (`triage --model A --trainer-model B`), or start vLLM on a CPU with VERL_PLATFORM=cpu, "
            "which keeps the unpacked weights of its linear layers",
        )
    worst = ", ".join(f"{x.name} by {x.relative:.2g}" for x in differ[:3])
    return Finding(
        "weights",
        CERTAIN,
        f"{covered}; {len(differ)} of them differ, relative to their size {worst}",
        "look at how weights reach the engine: the checkpoint it loaded, the last weight synchronisation, a resume; casts from "
        "fp32 masters must round to nearest once",
    )


def compare_rope(trainer: rope.Rope, engine: rope.Rope) -> Finding | None:
    """Return what comparing two sets of RoPE frequencies found, None if they are the same."""
    says = rope.difference(trainer, engine)
    if not says:
        return None
    return Finding(
        "rope-parameters",
        CERTAIN,
        says,
        "give both sides the same rope_parameters (engine: hf_overrides, max_model_len; trainer: the checkpoint's config)",
    )


def compare_engine(model, answer: Mapping, rank: int = 0, size: int = 1) -> list[Finding]:
    """Return what comparing a trainer with a running vLLM found; an empty list means that everything is equal.

    Weights are compared in the worker's dtype, and RoPE before it is rounded. Tensors that only one side
    has are a finding.

    Args:
        model: a Transformers model, or a checkpoint's folder.
        answer: what one worker answered to ``collective_rpc("rounding_align_digest")``.
        rank, size: that worker's place in tensor parallelism; what the worker itself says goes before it.

    Raises:
        ValueError: the worker gave a reason in place of digests.
    """
    if "missing" in answer:
        raise ValueError(f"the engine gave no digest: {answer['missing']}")
    engine = {name: digests.Digest.from_dict(fields) for name, fields in answer["weights"].items()}
    shard = digests.Shard.from_dict(answer["shard"]) if "shard" in answer else digests.Shard(rank, size)
    running = rope.Rope(np.asarray(answer["rope"]["frequencies"]), answer["rope"]["factor"])
    found = [
        compare_weights(digests.digest_hf(model, shard=shard, engine=engine), engine),
        compare_rope(rope.of_config(getattr(model, "config", model)), running),
    ]
    return [finding for finding in found if finding]
