"""The fused regions: each region's maths is written once, with its rounding points by name.

A new region is one file here (the function and its row ``REGION``) and its name in ``REGIONS``. Everything else that is
said of regions, groups and site kinds anywhere in the package is derived from these rows. Three rooms then ask for one
row each: ``engines/presets.py`` (what an engine stores), ``engines/probe/questions.py`` (how to ask an engine) and
``trainers/sites.py`` (where the region runs in a Hugging Face model).

>>> list(KINDS), GROUPS["carry"].region
(['attention', 'mlp', 'experts', 'attn_add', 'mlp_add', 'final'], 'add_rms_norm')
"""

from __future__ import annotations

from . import add_rms_norm, rope, swiglu
from .table import Derived, Group, Region

__all__ = ["GROUPS", "KINDS", "REGIONS", "Group", "Region"]

REGIONS: dict[str, Region] = {region.name: region for region in (rope.REGION, swiglu.REGION, add_rms_norm.REGION)}
KINDS = Derived(REGIONS, lambda region: ((kind, region.name) for kind in region.kinds))  # site kind -> region's name
GROUPS = Derived(REGIONS, lambda region: region.groups.items())  # group -> Group
