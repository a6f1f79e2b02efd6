"""An engine's process that ended badly, in one sentence: its status, what its log says last, and where the log is."""

from __future__ import annotations

import re
from pathlib import Path


class EngineFailed(RuntimeError):
    """vLLM's process failed; the message is for the user."""

    @classmethod
    def of(cls, status: int | None, log: Path) -> EngineFailed:
        """Return the error of a process that wrote ``log``, with the last exception that stands there."""
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.findall(r"\b(\w*(?:Error|Exception): \S.*)", text)
        return cls(f"vLLM ended with status {status}{f': {found[-1]}' if found else ''}; see {log}")
