"""How a training model is made to round where an engine rounds, on instances, and given back.

sites.py        where each site kind runs in a decoder stack: one row adds a place for a region
forwards.py     what is bound there: forwards that call the regions
checks.py       what a module must be for these forwards to be right; every refusal of a module is here
alignment.py    Site, Claim, Alignment: bind, count calls, undo; a context manager; knows no model
stream.py       the unrounded residual stream between two decoder layers
huggingface.py  ``align``: a plan and a Transformers model
preview.py      the same on a copy of the model without weights, from its config alone

A trainer that is no Hugging Face model (Megatron-Core) is a file beside huggingface.py: it makes claims of its own for the
same site kinds, and hands them to the same Alignment.
"""
