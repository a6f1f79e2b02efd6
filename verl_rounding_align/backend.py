"""How a region function runs: op by op, or as one kernel of torch.compile, with the same maths and the same rounding points.

A compiled region contains no matmul, no sharding and no module state, so one graph serves every layer and every length. Rows
are flattened to (tokens, ...), and that dimension is marked dynamic. Inductor deletes a bf16 round trip inside a fused
kernel, and with it an interior rounding point. ``emulate_precision_casts`` keeps it, and is always on here.

Either way a region is opaque to an outer ``torch.compile`` of the model: the graph breaks around it. Otherwise the outer
compilation would delete interior rounding points without a message.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from packaging.version import Version
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .rounding import Rounding

BACKENDS = ("auto", "compile", "eager")
OPTIONS = {"emulate_precision_casts": True}
# graphs of one region: {stored, fp32} stream x {with, without} gradients x epsilons of the models in one process; Dynamo's
# default of 8 would be an error under fullgraph. Releases before 2.12 have one limit for everything: left alone.
LIMIT = {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}


@functools.cache
def compiler_found(device: str) -> bool:
    """Return whether torch.compile can build kernels for a device type: a C++ compiler on CPU, Triton elsewhere."""
    if device == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    return importlib.util.find_spec("triton") is not None


@functools.cache
def points_survive(device: str) -> bool:
    """Return whether this torch keeps an interior rounding point in a compiled region on a device type.

    True for CPU and torch 2.13, where the tests show it. Inductor's C++ code of torch 2.11 and 2.12 ignores
    ``emulate_precision_casts`` without a message, so anywhere else swiglu is compiled with and without its point, once:
    the outputs must differ.
    """
    if device == "cpu" and Version(torch.__version__).release[:2] == (2, 13):
        return True
    return outputs_differ(device)


def outputs_differ(device: str) -> bool:
    """Return whether compiled swiglu with ``act`` stored differs from the one without, on 16,384 bf16 values."""
    from .regions.swiglu import swiglu

    with torch.no_grad():
        gate = torch.linspace(-4, 4, 2**14, device=device).to(torch.bfloat16).view(256, 64)
        rows = dict(gate=gate, up_=gate.flip(0) + 1)
        return not torch.equal(*(run(swiglu, rows, Rounding(points), "compile") for points in ((), ("act",))))


def check(backend: str, key: str = "backend") -> str:
    """Return ``backend`` if it is one of ``BACKENDS``.

    Raises:
        ValueError: it is not; the message holds key, value and choices.

    >>> check("fast")
    Traceback (most recent call last):
    ...
    ValueError: backend='fast': unknown backend 'fast'; choose from auto, compile, eager
    """
    if backend not in BACKENDS:
        raise ValueError(f"{key}={backend!r}: unknown backend {backend!r}; choose from {', '.join(BACKENDS)}")
    return backend


def resolve(backend: str, device: str) -> str:
    """Return ``compile`` or ``eager`` for one of ``BACKENDS`` on a device type.

    Raises:
        ValueError: ``compile`` without a compiler, or with one that deletes interior rounding points.

    >>> resolve("eager", "cpu")
    'eager'
    """
    if backend == "eager":
        return backend
    if backend == "auto":
        return "compile" if compiler_found(device) and points_survive(device) else "eager"
    if not compiler_found(device):
        raise ValueError(f"backend='compile': no compiler for device {device!r} was found; choose auto or eager")
    if not points_survive(device):
        raise ValueError(
            f"backend='compile': torch {torch.__version__} deletes rounding points inside compiled regions on device "
            f"{device!r}; choose auto or eager"
        )
    return backend


@functools.cache
def compiled(function: Callable, rnd: Rounding) -> Callable:
    """Return ``function`` with ``rnd`` bound, under torch.compile, with interior rounding points kept.

    Dynamo keeps its graphs per code object, so each pair gets a code object of its own.
    """
    clone = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    clone.__kwdefaults__, clone.__defaults__ = function.__kwdefaults__, function.__defaults__

    def region(**kwargs):
        return clone(rnd=rnd, **kwargs)

    region.__code__ = region.__code__.replace(co_name=f"{function.__name__}_{'_'.join(sorted(rnd.points)) or 'none'}")
    return torch.compile(region, fullgraph=True, options=OPTIONS, **LIMIT)


_started: set[tuple] = set()  # kinds of calls that this process has compiled, or found in Inductor's disk cache


@contextlib.contextmanager
def first_in_line(key: str) -> Iterator[None]:
    """Let one process of a machine compile a kind of call; those that come meanwhile wait, then find it on disk.

    Workers start together and meet the same regions in the same order; without this each compiles every graph. A lock of
    the operating system: it ends with its process, so nobody waits for a worker that died. Where there is none (no
    flock, a file system that refuses it, Inductor's cache switched off) every process compiles for itself.

    Args:
        key: what is compiled, the same text in every process.
    """
    try:
        if torch._inductor.config.force_disable_caches or not torch._inductor.config.fx_graph_cache:
            raise OSError("there is no cache to find anything in")
        import fcntl

        folder = Path(cache_dir()) / "verl-rounding-align"
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(f"{torch.__version__} {key}".encode()).hexdigest()[:24]
        file = (folder / name).open("a+")
    except (ImportError, OSError):
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # somebody has compiled it: nobody needs to wait
                fcntl.flock(file, fcntl.LOCK_UN)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)  # all who waited go on at once
        except OSError:
            pass
        yield
        file.write("1")


def plain(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return ``x`` in ``shape``, differentiable, and not a view: a view would bring its base's shape into the guards."""
    return torch.ops.aten._unsafe_view(x.contiguous(), shape or x.shape)


@torch.compiler.disable
def run(
    function: Callable,
    rows: Mapping[str, torch.Tensor],
    rnd: Rounding,
    backend: str,
    params: Mapping[str, torch.Tensor] | None = None,
    **static,
):
    """Call a region function.

    Args:
        function: a function of ``regions/``.
        rows: arguments of shape (tokens, ...) with one common number of tokens; model dtype, or fp32 where not stored.
        rnd: its Rounding.
        backend: ``compile`` or ``eager``; a single row always runs eagerly, as Dynamo specialises sizes 0 and 1.
        params: weights, shape (features,), model dtype.
        static: python constants (eps, dtype): one graph each.

    Returns:
        What ``function`` returns: tensors (tokens, ...).
    """
    params = params or {}
    first = next(iter(rows.values()))
    with torch.autocast(device_type=first.device.type, enabled=False):
        if backend == "eager" or first.shape[0] < 2:
            return function(**rows, **params, rnd=rnd, **static)
        for x in rows.values():
            torch._dynamo.mark_dynamic(x, 0)
        params = {name: plain(p) for name, p in params.items()}
        call = functools.partial(compiled(function, rnd), **rows, **params, **static)
        kinds = tuple((name, x.dtype, x.shape[1:], x.requires_grad) for name, x in {**rows, **params}.items())
        key = (function.__name__, rnd, first.device.type, torch.is_grad_enabled(), kinds, *static.items())
        if key in _started:
            return call()
        _started.add(key)
        with first_in_line(str((*key[:1], str(rnd), *key[2:]))):
            return call()
