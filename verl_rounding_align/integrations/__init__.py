"""Bridges to frameworks: only the modules in this package may import verl, vLLM or OpenRLHF.

Entry points load some of them in every process of a run, so importing a module here imports nothing heavy.
"""
