"""vLLM: the only room that imports it, in functions of processes that are its own.

settings.py     a rollout's settings, read before it starts: which engine it will be
layers.py       its layers as callables, for the probe
sites.py        the site map of its real model
generate.py     sampled responses and their log-probs
weights.py, rope.py   digests of what a worker holds
fingerprint.py  the settings of a running engine that can move its rounding
plugin.py       what a worker can be asked through ``collective_rpc``
"""

from __future__ import annotations

import os


def environment(kv_cache: int = 1) -> dict[str, str]:
    """Return the environment variables of a process that runs vLLM for a measurement.

    Args:
        kv_cache: GiB for the KV cache on a CPU. It and the binding of threads are the user's own if set.
    """
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    # pinned threads crawl on a machine that is shared
    defaults = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**found, **{name: os.environ.get(name, value) for name, value in defaults.items()}}
