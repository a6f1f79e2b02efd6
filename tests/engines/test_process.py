"""Contract of an engine's process: it runs this package's own module with a safe path, whatever lies in the current folder;
it ends with its parent, at its time limit and at an exception, and nothing that it has started is left behind.

Contract of a failed engine's sentence: a signal is named and nothing is blamed for it; else the exception that the last
traceback ends with, without vLLM's prefixes; one that points at the root cause is not it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import verl_rounding_align
from verl_rounding_align.engines import process
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


# ---- starting and ending one

PACKAGE = Path(verl_rounding_align.__file__).parent


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a folder on PYTHONPATH, and write modules into it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))

    def write(name: str, *lines: str) -> str:
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n")
        return name

    return write


@pytest.fixture
def family(programs, tmp_path):
    """Return (a module whose process starts another one and never ends, a file that is at its end when both have ended)."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    forever = "import signal; signal.pause()"
    module = programs(
        "endless", "import os, subprocess, sys, signal",
        f"held = os.open({str(fifo)!r}, os.O_WRONLY)",
        f"subprocess.Popen([sys.executable, '-c', {forever!r}], pass_fds=[held])",
        "os.write(held, b'both')", "signal.pause()",
    )  # fmt: skip
    yield module, reader
    os.close(reader)


def wait_for(reader: int, expected: bytes) -> None:
    """Read what both processes have written; b"" is the end of the file, when neither has it open any more."""
    ready, _, _ = select.select([reader], [], [], 600)
    assert ready, f"waited 600 s for {expected!r}"
    assert os.read(reader, 100) == expected


def ended(reader: int) -> None:
    wait_for(reader, b"")


def test_arguments_and_status_are_handed_on_and_both_streams_are_logged(programs, tmp_path):
    module = programs("echo", "import sys", "print(sys.argv[1:])", "print('error', file=sys.stderr)", "sys.exit(3)")
    assert process.run(module, ["a", "--b"], limit=600, log=tmp_path / "log") == 3
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["['a', '--b']", "error"]


def test_standard_output_can_go_to_a_file_of_its_own(programs, tmp_path):
    module = programs("echo", "import sys", "print('table')", "print('said', file=sys.stderr)")
    assert process.run(module, limit=600, log=tmp_path / "log", out=tmp_path / "table") == 0
    assert ((tmp_path / "table").read_text(), (tmp_path / "log").read_text()) == ("table\n", "said\n")


def test_variables_are_set_and_removed_for_the_process_alone(programs, tmp_path, monkeypatch):
    name, other = "VERL_ROUNDING_ALIGN_TEST", "VERL_ROUNDING_ALIGN_OTHER"
    monkeypatch.setenv(other, "8")
    module = programs("variable", "import os", f"print(os.environ['{name}'], os.environ.get('{other}'))")
    process.run(module, limit=600, log=tmp_path / "log", environment={name: "7", other: None})
    assert (tmp_path / "log").read_text() == "7 None\n"
    assert name not in os.environ and os.environ[other] == "8"


def test_a_signal_that_ended_the_process_is_its_status(programs, tmp_path):
    module = programs("signalled", "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    assert process.run(module, limit=600, log=tmp_path / "log") == -signal.SIGKILL


@pytest.mark.parametrize("pythonpath", ["{programs}", ":{programs}", "{programs}:.:"], ids=["plain", "empty", "dot"])
def test_a_file_in_the_current_folder_does_not_shadow_a_module(programs, tmp_path, monkeypatch, pythonpath):
    """With its control: the same module run by ``python -m`` from there takes the file. A process that it starts is safe too."""
    inner = "import json; print(json.__file__)"
    module = programs(
        "imports", "import json, subprocess, sys, verl_rounding_align", "print(json.__file__)",
        "print(verl_rounding_align.__file__)",
        f"print(subprocess.run([sys.executable, '-c', {inner!r}], capture_output=True, text=True).stdout, end='')",
    )  # fmt: skip
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "torch", "runpy", "subprocess"):
        (here / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", pythonpath.format(programs=tmp_path / "programs"))
    assert process.run(module, limit=600, log=tmp_path / "log") == 0
    found = (tmp_path / "log").read_text().splitlines()
    switch = sys.version_info >= (3, 11)  # Python's own; without it, what the process starts itself is as ever
    assert found == [json.__file__, verl_rounding_align.__file__, *([json.__file__] if switch else [])]
    control = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    assert (control.returncode, control.stderr.strip()) == (1, "shadowed")


def test_the_package_is_the_one_that_runs_here_from_a_checkout_too(programs, tmp_path, monkeypatch):
    """Another one of the same name that the path would find first is not taken."""
    (tmp_path / "programs" / PACKAGE.name).mkdir()
    (tmp_path / "programs" / PACKAGE.name / "__init__.py").write_text("raise SystemExit('another package')\n")
    module = programs("which", f"import {PACKAGE.name} as package", "print(package.__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    assert process.run(module, limit=600, log=tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().strip() == verl_rounding_align.__file__
    control = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, cwd=tmp_path)
    assert (control.returncode, control.stderr.strip()) == (1, "another package")


def test_a_process_at_its_time_limit_is_ended_in_one_sentence(family, tmp_path):
    module, reader = family
    log = tmp_path / "log"
    with pytest.raises(EngineFailed) as error:
        process.run(module, limit=0, log=log, tell=pytest.fail, every=0.01)
    assert str(error.value) == f"vLLM did not end in 0 s and was stopped; see {log}"


@pytest.mark.parametrize(("silence", "looks"), [(True, 4), (False, 1)])
def test_a_process_that_writes_is_not_silent(programs, tmp_path, monkeypatch, silence, looks):
    """The clock goes 40 s a look and the limit is 60 s. The process writes a line at each of the first two looks."""
    for name in ("asks", "answers"):
        os.mkfifo(tmp_path / name)
    answers = os.open(tmp_path / "answers", os.O_RDONLY | os.O_NONBLOCK)
    asks = os.open(tmp_path / "asks", os.O_RDWR)
    module = programs(
        "writes", f"answers = open({str(tmp_path / 'answers')!r}, 'w')", f"for line in open({str(tmp_path / 'asks')!r}):",
        "    print(line, flush=True)", "    print('written', file=answers, flush=True)",
    )  # fmt: skip
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = []

    def tell(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) < 3:
            os.write(asks, b"line\n")
            wait_for(answers, b"written\n")

    with pytest.raises(process.TimeLimit) as error:
        process.run(module, limit=60, log=tmp_path / "log", tell=tell, silence=silence, every=0.01)
    what = "wrote nothing" if silence else "did not end"
    assert str(error.value) == f"vLLM {what} in 60 s and was stopped; see {tmp_path / 'log'}"
    assert seen == [40 * (i + 1) for i in range(looks)]
    os.close(asks)
    os.close(answers)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_here_ends_the_process_and_all_that_it_has_started(family, error):
    module, reader = family

    def tell(seconds: float) -> None:
        wait_for(reader, b"both")
        raise error

    with pytest.raises(error):
        process.run(module, limit=600, tell=tell, every=0.01)
    ended(reader)


def test_a_parent_that_is_killed_takes_the_process_and_all_that_it_has_started_with_it(family):
    module, reader = family
    code = f"from verl_rounding_align.engines import process; process.run({module!r}, limit=600)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(reader, b"both")
    parent.kill()
    parent.wait()
    ended(reader)


def test_what_a_process_has_started_does_not_outlive_it(programs, tmp_path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    module = programs(
        "leaves", "import os, subprocess, sys", f"held = os.open({str(fifo)!r}, os.O_WRONLY)",
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], pass_fds=[held])", "os.write(held, b'one')",
    )  # fmt: skip
    assert process.run(module, limit=600) == 0
    wait_for(reader, b"one")
    ended(reader)
    os.close(reader)
