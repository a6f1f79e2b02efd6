"""Entry point of verl's plugin group `verl.plugins`: `import verl` runs this module in every process of a run.

It costs less than 5 ms (recipes/import_time) and changes nothing in verl that a run without the key executes: the work
is done by hooks that wait for verl's modules, see `hooks.py`. Where entry points are not wanted
(`VERL_USE_EXTERNAL_PLUGINS=none`) or not there, `VERL_USE_EXTERNAL_MODULES=verl_rounding_align.integrations.verl.plugin`
does the same. `model.external_lib` is not enough by itself: verl imports it in the workers, after the driver has read
the config.

Standard library only.
"""

import os

from ... import postimport as _postimport
from .hooks import HOOKS as _HOOKS

_postimport.install(_HOOKS)

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from . import cpu as verl_cpu

    verl_cpu.activate()
