"""Contract of a failed engine's sentence: a signal is named and nothing is blamed for it; else the exception that the last
traceback ends with, without vLLM's prefixes; one that points at the root cause is not it."""

from __future__ import annotations

import pytest

from verl_rounding_align.engines.process import EngineFailed

OPTIONAL = "INFO 11-30 07:00:00 [importing.py:1] ImportError: no module named flash_attn, which is optional\n"
CORE, WORKER = "(EngineCore pid=12) ", "(Worker_TP0 pid=3) "
LOGGED = "ERROR 11-30 07:00:00 [core.py:1] "


def trace(last: str, prefix: str = "", header: str = "Traceback (most recent call last):") -> str:
    """Return a traceback's text, ``prefix`` before each line."""
    lines = [header, '  File "a.py", line 1, in f', "    f()", "    ^^^", *last.split("\n")]
    return "".join(f"{prefix}{line}\n" for line in lines)


CAUSE = trace("ValueError: no kernel for head_size 7")
POINTER = trace("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
INTERLEAVED = "".join(
    line
    for pair in zip(
        trace("ValueError: a", CORE + LOGGED).splitlines(True),
        trace("KeyError: 'b'", WORKER).splitlines(True),
        strict=True,
    )
    for line in pair
)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (CAUSE, "ValueError: no kernel for head_size 7"),
        (OPTIONAL + CAUSE + "nanobind: leaked 3\n", "ValueError: no kernel for head_size 7"),
        (CAUSE + OPTIONAL, "ValueError: no kernel for head_size 7"),  # a line is less than a traceback
        (CAUSE + POINTER, "ValueError: no kernel for head_size 7"),
        (trace("ValueError: no kernel", CORE + LOGGED) + POINTER, "ValueError: no kernel"),
        (trace("MemoryError"), "MemoryError"),
        (trace("torch.OutOfMemoryError: CUDA out of memory."), "torch.OutOfMemoryError: CUDA out of memory."),
        (trace("KeyError: 'a'") + "\nDuring handling of it:\n\n" + trace("ValueError: b"), "ValueError: b"),
        (trace("ValueError: first\nTypeError: of the message"), "ValueError: first"),
        (INTERLEAVED, "KeyError: 'b'"),
        (POINTER, POINTER.splitlines()[-1]),  # better than nothing
        ("ValueError: no kernel\n" + POINTER, "ValueError: no kernel"),
        (OPTIONAL, "ImportError: no module named flash_attn, which is optional"),
        ("all is well\n", None),
        ("", None),
    ],
)
def test_the_last_tracebacks_exception_is_the_reason(tmp_path, log, said):
    file = tmp_path / "vllm.log"
    file.write_text(log)
    assert str(EngineFailed.of(1, file)) == f"vLLM ended with status 1{f': {said}' if said else ''}; see {file}"


@pytest.mark.parametrize(
    ("status", "name"),
    [(-9, "SIGKILL, often: out of memory"), (-11, "SIGSEGV"), (-63, "signal 63")],
)
def test_a_signal_is_named_and_no_exception_is_blamed(tmp_path, status, name):
    file = tmp_path / "vllm.log"
    file.write_text(OPTIONAL + CAUSE)
    assert str(EngineFailed.of(status, file)) == f"vLLM ended with status {status} ({name}); see {file}"


def test_a_process_without_a_log_has_no_reason(tmp_path):
    assert str(EngineFailed.of(3, tmp_path / "no")) == f"vLLM ended with status 3; see {tmp_path / 'no'}"
