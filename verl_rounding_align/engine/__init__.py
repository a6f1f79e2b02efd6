"""What an inference engine really does: its own layer code, in its own mode, asked where it rounds.

spec.py          the sizes and constants of a model that rounding can depend on, from its Hugging Face config
probe.py         pure: engine outputs against every subset of rounding points, bitwise; rows, verdicts, rendering
vllm_layers.py   vLLM's own layers as callables, compiled or eager; the only file that touches vLLM's internals
vllm_fingerprint.py  a fingerprint read off vLLM's config, or off a worker
probe_vllm.py    the two put together: ``run_probe``
inductor.py      what torch stores: Inductor's schedule, or every operator of an eager run; the only internal torch hooks
follow.py        pure: one decoder layer in such graphs, its rounding points followed from reader to value
sites.py         pure: the site map, engine beside trainer and preset; rendering, JSON
sites_vllm.py    vLLM's real model in a process of its own: ``run_sites``
result.py        what a probe found: JSON, and the preset that follows
failed.py        the error of an engine whose process ended badly
auto.py          ``rounding_align=auto``: probe the engine at hand once, and keep the result
"""
