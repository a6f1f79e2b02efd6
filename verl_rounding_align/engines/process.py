"""The one place that starts a process for an engine or a probe: its path, its time limit, its log, its end.

Such a process is never this one: an engine sets hooks, threads and devices for its whole process. :func:`run` starts a
module as the main program of another one and waits for it. Three things hold whatever happens:

- A file in the user's current folder (``json.py``, ``torch.py``) cannot stand in for a module. Python's own switch for that
  (``PYTHONSAFEPATH``) came with 3.11, so the first lines of the process take the current folder off ``sys.path``; the
  switch is set as well, for processes that the engine starts in its turn. The package is the one that runs here, also from
  a checkout that is not installed.
- The process ends with this one, and with it all that it has started. A supervisor (this file, run as a script) stands between
  the two: it looks twice a second whether its parent is still there. It is a process, not a thread of the engine's, so that
  an engine that is busy in a kernel cannot hold it up. An exception here, Ctrl-C included, ends the whole group at once.
- It has a time limit. Reaching it is an :class:`EngineFailed` like every other bad end.

Standard library only: the supervisor starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

BEAT = 0.5  # seconds between two looks of the supervisor at its parent
# `(EngineCore pid=12) ERROR 11-30 07:00:00 [core.py:1] `, or a part of it: a process's name, then vLLM's log format
PREFIX = re.compile(r"^(\([^()]* pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
POINTER = re.compile("root cause", re.IGNORECASE)  # "... failed. See root cause above.": not the cause itself

# what a process runs first: a safe path, then this very package, then the module
_BOOT = """
import sys
sys.path[:] = [folder for folder in sys.path if folder not in ("", ".")]
import importlib.util, os, runpy
folder, module = sys.argv[1:3]
del sys.argv[1:3]
name = os.path.basename(folder)
spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
sys.path.append(os.path.dirname(folder))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class EngineFailed(RuntimeError):
    """An engine's process failed; the message is for the user."""

    @classmethod
    def of(cls, status: int | None, log: Path, name: str = "vLLM") -> EngineFailed:
        """Return the error of a process that wrote ``log``: the signal that ended it, or else what :func:`reason` finds."""
        if status is not None and status < 0:
            signalled = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
            often = ", often: out of memory" if signalled == "SIGKILL" else ""
            return cls(f"{name} ended with status {status} ({signalled}{often}); see {log}")
        found = reason(log.read_text(errors="replace")) if log.exists() else None
        return cls(f"{name} ended with status {status}{f': {found}' if found else ''}; see {log}")


class TimeLimit(EngineFailed):
    """An engine's process was ended because it took too long."""


def run(
    module: str,
    arguments: Sequence[str] = (),
    *,
    limit: float,
    log: Path | None = None,
    out: Path | None = None,
    environment: Mapping[str, str | None] | None = None,
    silence: bool = False,
    every: float = 1.0,
    tell: Callable[[float], None] = lambda seconds: None,
    name: str = "vLLM",
) -> int:
    """Run a module as the main program of another process, and return its status when it has ended.

    Args:
        module: what ``python -m`` would be given.
        arguments: of the command line.
        limit: seconds that it may take; with ``silence``, seconds that may pass without a new line in ``log``.
        log: file for what it writes to both streams; None for the streams of this process.
        out: file for its standard output alone.
        environment: variables to set beside those of this process; None removes one.
        every: seconds between two calls of ``tell``.
        tell: called while it runs, with the seconds since it was started.
        name: what it is called in the error.

    Returns:
        The exit status; of a process that a signal has ended, minus the signal's number.

    Raises:
        TimeLimit: it was ended at the limit.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), sys.executable, "-c", _BOOT]
    command += [str(Path(__file__).parents[1]), module, *arguments]
    with contextlib.ExitStack() as stack:
        both = stack.enter_context(log.open("wb")) if log else None
        table = stack.enter_context(out.open("wb")) if out else both
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=table, stderr=both, env=_environment(environment or {}),
            start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, process)
        started = heard = time.monotonic()
        written = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(every)
            now = time.monotonic()
            if silence and log and log.stat().st_size != written:
                heard, written = now, log.stat().st_size
            if now - heard >= limit:
                what = "wrote nothing" if silence else "did not end"
                raise TimeLimit(f"{name} {what} in {limit:g} s and was stopped{f'; see {log}' if log else ''}")
            tell(now - started)


def _environment(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a process: an empty entry of PYTHONPATH, easily made by ``$PYTHONPATH:/more``, is the
    current folder, and goes before Python's own modules."""
    found = {**os.environ, **values, "PYTHONSAFEPATH": "1"}
    folders = (found.get("PYTHONPATH") or "").split(os.pathsep)
    found["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder not in ("", "."))
    return {name: value for name, value in found.items() if value is not None}


def _end(process: subprocess.Popen) -> None:
    """End a process and all that it has started, and wait for the process itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(text: str) -> str | None:
    """Return the exception that the last traceback in a log ends with; without a traceback, the last that stands anywhere.

    One that only points at another ("See root cause above") is returned where there is no other. Tracebacks of several
    processes may be interleaved.
    """
    found, within = [], set()  # exceptions that end a traceback; processes whose traceback has not ended
    for line in text.splitlines():
        prefix = PREFIX.match(line)
        process, said = prefix[1], line[prefix.end() :]
        if said.startswith("Traceback (most recent call last)"):
            within.add(process)
        elif process in within and said.strip() and not said[0].isspace():
            within.discard(process)
            if re.match(r"[\w.]+(: |:?\s*$)", said):
                found.append(said.strip())
    found = re.findall(r"\b(\w*(?:Error|Exception): \S.*)", text) + found
    return next((x for x in reversed(found) if not POINTER.search(x)), found[-1] if found else None)


def _supervise(parent: int, command: Sequence[str]) -> int:
    """Run a command; end it, and all that it has started, when ``parent`` is no longer this process's parent.

    Returns:
        Its exit status. If a signal ended it, the same signal ends this process.
    """
    child = subprocess.Popen(command)
    while True:
        try:
            status = child.wait(BEAT)
            break
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)  # this process is in the group
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child may have left a core; one is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
