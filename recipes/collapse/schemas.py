"""JSON schemas of what results/ keeps: a run (a line of a grid's file), and the files of why.py, bits.py and real_engine.py."""

from __future__ import annotations

from outcomes import ORDER

POSITIVE, COUNT, SIGNED = (
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "integer", "minimum": 0},
    {"type": "number"},
)
SIZE, UNIT = {"type": "number", "minimum": 0}, {"type": "number", "minimum": -1, "maximum": 1}
VERSIONS = {"type": "object", "required": ["torch"], "additionalProperties": {"type": "string"}}


def exactly(**properties: dict) -> dict:
    """Return the schema of an object that has these properties, and no other."""
    return {"type": "object", "required": list(properties), "additionalProperties": False, "properties": properties}


def some(items: dict, least: int = 1) -> dict:
    """Return the schema of a list."""
    return {"type": "array", "minItems": least, "items": items}


FORMAT = dict(arm={"enum": list(ORDER)}, bits={"type": "integer", "minimum": 2, "maximum": 22}, lr=POSITIVE)
SETTINGS = dict(pretrain=COUNT, prompts=COUNT, gradients=COUNT)
SHARE = {"type": "number", "minimum": 0, "maximum": 1}

RUN = exactly(
    **FORMAT, seed=COUNT, steps=COUNT, **SETTINGS, seconds=SIZE, versions=VERSIONS,
    rows=some(exactly(step=COUNT, reward=SHARE, k1=SIGNED, k3=SIGNED, differ=SHARE, norm=SIZE)),
)  # fmt: skip

DIRECTIONS = {
    f"{prefix}{name}": SIZE if name in ("error2", "gradient2") or name.endswith("_se") else SIGNED
    for prefix in ("", "is_")
    for name in ("bias2", "bias2_se", "error2", "signal2", "gradient2", "cross", "signal2_se", "projection_se")
}
CASE = exactly(
    steps=COUNT, seed=COUNT, region={"type": "string"}, batches=COUNT, k3=SIZE, size=SIZE, mean=SIGNED, given=UNIT,
    of_token=some({"oneOf": [{"type": "null"}, some(SIGNED, 2)]}, 10), by_token=SHARE, corr_own=UNIT, corr_sampler=UNIT, corr_advantage=UNIT,
    **DIRECTIONS,
)  # fmt: skip
CASE["properties"]["landing"] = {"type": "object", "minProperties": 1, "additionalProperties": SHARE}
CASE |= {"if": {"properties": {"region": {"const": "all four"}}}, "then": {"required": ["landing"]}}
WHY = exactly(versions=VERSIONS, **FORMAT, **SETTINGS, sequences=COUNT, rows=some(CASE))

BITS = exactly(
    sequences=COUNT,
    versions=VERSIONS,
    rows=some(exactly(arm=FORMAT["arm"], bits=FORMAT["bits"], k3=SIZE, kernel={"type": "string"}, seed=COUNT)),
)

REAL = exactly(
    lr=POSITIVE, seed=COUNT, pretrain=COUNT, steps=COUNT, minutes=POSITIVE, versions=VERSIONS,
    arms=exactly(**{arm: some(exactly(step=COUNT, reward=SHARE, k1=SIGNED, k3=SIZE, norm=SIZE)) for arm in ("none", "all")}),
)  # fmt: skip

OF = {"why.json": WHY, "bits.json": BITS, "real_engine.json": REAL}  # every other file of results/ has a RUN per line
