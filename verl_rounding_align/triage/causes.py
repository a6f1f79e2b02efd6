"""The causes that triage knows, in the order in which their detectors are asked. A new cause is one detector in
:mod:`.detectors` and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .detectors import function, identities, place, settings, shape
from .facts import Facts
from .rows import NOTE, Sign
from .sample import Sample

OTHER = "weights-rope-or-context"


@dataclass(frozen=True)
class Cause:
    """One row of ``CAUSES``.

    Args:
        name: what a finding is called; two rows may share a name.
        detect: the detector, see :mod:`.detectors`.
        next_step: what the user should do about it.
        explains: names of later causes that this one explains away: they are not looked for once it is found.
        note: whether it causes no mismatch. A note comes after everything that does, ``rounding-sized`` included.
        beside: whether it harms training whatever the mismatch is. It comes before ``rounding-sized`` and does not stand in
            its place.
    """

    name: str
    detect: Callable[[Sample | None, Facts], Sign | None]
    next_step: str
    explains: tuple[str, ...] = ()
    note: bool = False
    beside: bool = False


MASK = (
    "print response_mask beside both log-probs for one sequence that ends early: padding, tool output and what follows the end "
    "must be masked, the end token must not"
)
ROUTING = (
    "replay the rollout's routing in the trainer (verl: rollout.enable_rollout_routing_replay); alignment of rounding does "
    "not fix a flipped expert"
)
SHAPES = (
    "padding-or-mask",
    "growth-with-position",
    "growth-with-length",
    "moe-routing",
    "changes-with-step",
    OTHER,
)
CAUSES = (
    Cause(
        "missing-log-probs",
        identities.missing,
        "set rollout.calculate_log_probs=True and rollout_correction.bypass_mode=False, so that both sides are computed",
        SHAPES,
    ),
    Cause(
        "one-token-shift",
        identities.shift,
        "log-prob t must be of response token t given those before it: take logits[prompt - 1 : -1] of the trainer, and the "
        "rollout's log-probs without an offset",
    ),
    Cause(
        "padding-or-mask",
        identities.padding,
        MASK,
    ),
    Cause(
        "low-precision-log-probs",
        identities.coarse,
        "cast logits to fp32 before log-softmax on that side, and keep log-probs in fp32 when they are stored or sent",
    ),
    Cause(
        "kept-mass",
        shape.kept_mass,
        "sample with top_p=1 and top_k=-1 in training, or correct the rollout's log-probs by the mass that was kept",
        ("padding-or-mask", "moe-routing", OTHER),
    ),
    Cause(
        "temperature",
        shape.temperature,
        "divide the trainer's logits by the temperature that the rollout's log-probs are of (verl: rollout.temperature)",
        SHAPES,
    ),
    Cause(
        "processed-against-raw",
        shape.raw,
        "set rollout.logprobs_mode=processed_logprobs (vLLM: logprobs_mode), or sample at temperature 1 with all tokens",
        SHAPES,
    ),
    Cause("padding-or-mask", place.edges, MASK, (OTHER,)),
    Cause(
        "growth-with-position",
        place.growth,
        "compare the RoPE parameters of both sides (`triage --model A --trainer-model B`), then the KV cache's dtype, sliding "
        "windows and chunked prefill",
        ("growth-with-length", "moe-routing", OTHER),
    ),
    Cause(
        "growth-with-length",
        place.length,
        "look at what happens to long sequences alone: truncation of prompts, max_model_len, packing, dynamic batch size, "
        "sequence parallelism",
        (OTHER,),
    ),
    Cause(
        "moe-routing",
        shape.routing,
        ROUTING,
        (OTHER,),
    ),
    Cause(
        "changes-with-step",
        place.steps,
        "look at what happened before that step (resume, reload, weight synchronisation) and run a few steps at lr=0: a "
        "mismatch of rounding stays as it is",
        (OTHER,),
    ),
    Cause(
        OTHER,
        function.other_model,
        "compare both sides' weights and RoPE parameters (`triage --model A --trainer-model B`; in the engine, "
        "collective_rpc('rounding_align_digest')), first after loading, then after a weight synchronisation; if they are equal, "
        "score one sequence alone, without padding: attention masks, truncated prompts, the chat template",
        ("moe-routing",),
    ),
    Cause("moe-routing", shape.perhaps_routing, ROUTING),
    Cause(
        "sequence-level-ratio",
        settings.sequence_ratio,
        "use rollout_is=token, a geometric mean, or rejection by seq_mean_k3, and align rounding to shrink the spread",
        beside=True,
    ),
    Cause(
        "unsupported-backend",
        settings.backend,
        "use actor.strategy=fsdp or fsdp2, or look for the cause in that backend's own kernels",
        beside=True,
    ),
    Cause(
        NOTE,
        settings.sampled_elsewhere,
        "nothing, to measure rounding; in training set rollout.logprobs_mode=processed_logprobs and divide the trainer's logits "
        "by the same temperature",
        note=True,
    ),
)
NAMES = tuple(dict.fromkeys(cause.name for cause in CAUSES))
