"""Which rounding points does an engine store? Its own layers against every subset of points, bit for bit.

bitwise.py   compare one site: every subset against the engine's outputs, one Row
inputs.py    inputs on which equality is decidable
questions.py how each site kind is asked: one row a kind; what an engine must offer
answers.py   rows to an exit code, a refuted preset, JSON, a table
result.py    what a probe found, in a file; the preset that follows
run.py       the command, for any engine of ``engines.ENGINES``
"""

from .answers import exit_code, refute, render, to_json
from .bitwise import AMBIGUOUS, CASES, EXACT, NO_MATCH, Case, Difference, Points, Row, Site, probe_site, subsets
from .inputs import generator, qkv_rows, random_rows, residual_rows
from .questions import ADDS, QUESTIONS, Engine, candidate, probe, sites

__all__ = [
    "ADDS",
    "AMBIGUOUS",
    "CASES",
    "EXACT",
    "NO_MATCH",
    "QUESTIONS",
    "Case",
    "Difference",
    "Engine",
    "Points",
    "Row",
    "Site",
    "exit_code",
    "generator",
    "probe",
    "probe_site",
    "qkv_rows",
    "random_rows",
    "refute",
    "render",
    "residual_rows",
    "candidate",
    "sites",
    "subsets",
    "to_json",
]
