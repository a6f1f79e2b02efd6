"""Presets and plans as rows: what each engine stores, and what a plan patches. Columns follow the table of site kinds."""

from __future__ import annotations

from ..engines.presets import PRESETS, Preset
from ..regions import KINDS
from .rows import Section, points

NOT_SAID = "not said"  # of a site kind that a preset is silent about


def presets() -> Section:
    """Return every preset: the points that it stores at each site kind, the releases it covers, and what that rests on."""
    rows = []
    for preset in PRESETS.values():
        stored = [points(preset.at(kind)) if preset.knows(kind) else NOT_SAID for kind in KINDS]
        releases = "-".join(version or "" for version in preset.versions) if preset.engine else ""
        rows.append((preset.name, *stored, releases, evidence(preset)))
    columns = ("preset", *KINDS, "releases", "evidence")
    return Section("Rounding points stored in the model dtype, by site kind", columns, rows)


def evidence(preset: Preset) -> str:
    """Return what a preset's claims rest on: the usual word, and then the groups for which it is another.

    >>> evidence(PRESETS["vllm_cpu"]), evidence(PRESETS["vllm_compiled_split"])
    ('bitwise', 'source, carry unproven')
    """
    words = list(preset.evidence.values())
    usual = max(dict.fromkeys(words), key=words.count, default="")
    return ", ".join([usual, *(f"{group} {word}" for group, word in preset.evidence.items() if word != usual)])


def sources() -> Section:
    """Return where each preset's row is from."""
    rows = [(preset.name, f"{preset.source}. {preset.note}".rstrip()) for preset in PRESETS.values()]
    return Section("Where each row is from", ("preset", "source"), rows)


def sites(alignment) -> Section:
    """Return the modules that an Alignment has patched, with the points that each stored before and stores now."""
    rows = [(site.fqn, site.kind, points(site.before), points(site.after)) for site in alignment.sites]
    return Section(str(alignment), ("module", "site kind", "stored before", "stored after"), rows)
