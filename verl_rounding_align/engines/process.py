"""An engine's process that ended badly, in one sentence: its status, why its log says so, and where the log is."""

from __future__ import annotations

import re
import signal
from pathlib import Path

# `(EngineCore pid=12) ERROR 11-30 07:00:00 [core.py:1] `, or a part of it: a process's name, then vLLM's log format
PREFIX = re.compile(r"^(\([^()]* pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
POINTER = re.compile("root cause", re.IGNORECASE)  # "... failed. See root cause above.": not the cause itself


class EngineFailed(RuntimeError):
    """vLLM's process failed; the message is for the user."""

    @classmethod
    def of(cls, status: int | None, log: Path) -> EngineFailed:
        """Return the error of a process that wrote ``log``: the signal that ended it, or else what :func:`reason` finds."""
        if status is not None and status < 0:
            name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
            often = ", often: out of memory" if name == "SIGKILL" else ""
            return cls(f"vLLM ended with status {status} ({name}{often}); see {log}")
        found = reason(log.read_text(errors="replace")) if log.exists() else None
        return cls(f"vLLM ended with status {status}{f': {found}' if found else ''}; see {log}")


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
