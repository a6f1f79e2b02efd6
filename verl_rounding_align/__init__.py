"""verl-rounding-align: make the training side round where the inference engine rounds.

Layers, each importing only from those above it:

    formats.py       storage formats emulated in fp32, for coarser storage than any dtype has
    rounding.py      a rounding point: stored in the model dtype, or kept in fp32
    families.py      Hugging Face model families as data
    fingerprint.py   everything of an engine that moves its rounding, as one value
    metrics.py       mismatch estimators, phantom clipping: pure tensor functions
    trend.py         is a series over training steps growing, or has it jumped: an alarm with an error rate
    report.py        rows to a terminal, Markdown, HTML, JSON
    regions/         the fused regions' maths, once, with named rounding points
    backend.py       how a region function runs: op by op, or compiled with its points kept
    presets.py       engines as data: the points each one stores, source, versions, evidence, verified fingerprints
    engine/          what an inference engine really does: probe, site map, auto
    plan.py          config value + engine -> Plan (frozen, printable); errors about the key's value
    patch.py         claim -> check -> apply -> undo; the only file that assigns ``.forward``
    preview.py       what a plan would patch, from a model's config alone
    measure/         gap, attribution, landing score, triage, overhead: tools that return rows
    integrations/    verl, verl on CPU, vLLM: only these and engine/ import a framework
    cli.py           subcommands, no logic

A new engine is one row in presets.py, a new model family one row in families.py, a new region one file in regions/ and a
row in its table; their tests come by parametrisation.

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
    "FAMILIES": "trainers.families",
    "REGIONS": "regions",
    "GROUPS": "regions",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
