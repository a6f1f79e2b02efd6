"""What the installed package costs at `import verl` when the key is absent: `python import_time.py [REPEATS]`.

verl loads the entry point at the end of its own import, so that import is what is timed, after verl without plugins, in
a fresh process each time, with bytecode cached as pip leaves it. Ends with status 1 if the median is 5 ms or more, or if it loads a module that is neither of
this package nor of the standard library.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

LIMIT = 5e-3  # seconds
ONCE = """
import json, sys, time
start = time.perf_counter()
import verl
middle = time.perf_counter()
before = set(sys.modules)
import verl_rounding_align.integrations.verl.plugin
end = time.perf_counter()
print(json.dumps([middle - start, end - middle, sorted(set(sys.modules) - before)]))
"""


def measure(repeats: int) -> list[tuple[float, float, list[str]]]:
    """Return per process: seconds of `import verl`, seconds of the plugin, modules that the plugin loaded."""
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": ""}
    for name in ("VERL_PLATFORM", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    with tempfile.TemporaryDirectory() as cache:
        env["PYTHONPYCACHEPREFIX"] = cache
        command = [sys.executable, "-c", ONCE]
        runs = [
            subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(repeats + 1)
        ]
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs[1:]]  # the first one filled the cache


def main(repeats: int = 9) -> int:
    rows = measure(repeats)
    verl, plugin = ([row[i] for row in rows] for i in (0, 1))
    loaded = rows[0][2]
    foreign = [name for name in loaded if name.split(".")[0] not in {"verl_rounding_align", *sys.stdlib_module_names}]
    print(f"import verl, no plugins: median {statistics.median(verl):.2f} s over {repeats} processes")
    print(
        f"this package's plugin:   median {1e3 * statistics.median(plugin):.2f} ms, "
        f"{1e3 * min(plugin):.2f} to {1e3 * max(plugin):.2f} ms"
    )
    print(f"modules it loads: {', '.join(loaded)}")
    return int(statistics.median(plugin) >= LIMIT or bool(foreign))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
