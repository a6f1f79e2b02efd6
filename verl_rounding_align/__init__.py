"""verl-rounding-align: make the training side round where the inference engine rounds.

Rooms, from the ground up; each imports only from those above it in this list:

    rounding.py      a rounding point: stored in the model dtype, or kept in fp32
    formats.py       storage formats emulated in fp32, for coarser storage than any dtype has
    regions/         the fused regions: maths, points, groups and site kinds; one table from which all names follow
    families.py      Hugging Face model families as data
    backend.py       how a region function runs: op by op, or compiled with its points kept
    releases.py      one sentence for a release of another package that nothing here was tested with
    files.py         users' YAML and JSON files, with one sentence for what is wrong with one
    postimport.py    run a function right after a module has been imported
    engines/         what an inference engine stores: presets, fingerprint, probe, schedule, auto; one room per engine
    plan.py          config value + engine -> Plan (frozen, printable, one value for the workers); errors about the key's value
    trainers/        how a model is made to round: places, checks, forwards, Alignment
    monitor/         what every framework logs in a step: mismatch, phantom clipping, trend and alarm
    logprobs/        paired log-probs from anywhere, and intervals
    report/          rows to a terminal, Markdown, HTML, JSON, pictures
    gap/ triage/ overhead/ landing/    one tool, one room
    integrations/    training frameworks: one room each; only hooks and translation
    cli.py           subcommands, no logic

Where something new goes: a region is a file in regions/, an engine's preset a row in engines/presets.py, an engine a room in
engines/, a model family a row in families.py, a trainer that is no Hugging Face model a file in trainers/, a framework a room
in integrations/, a metric of a training step a function in monitor/ and a row of its METRICS, a tool a room. tests/test_rooms.py adds one of each.

Public names are loaded at first use, so that an entry point which imports this package costs next to nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

_PUBLIC = {
    "Rounding": "rounding",
    "Plan": "plan",
    "parse_plan": "plan",
    "Alignment": "trainers.alignment",
    "Site": "trainers.alignment",
    "align": "trainers.huggingface",
    "PRESETS": "engines.presets",
    "FAMILIES": "families",
    "REGIONS": "regions",
    "GROUPS": "regions",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
