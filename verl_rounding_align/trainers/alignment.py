"""Bind functions to modules, count their calls, undo: what an alignment is, whatever the model.

The only file that assigns an attribute of a module. It binds to *instances*: parameters, state_dict keys, module names and
every other model in the process stay as they are.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import backend as backends
from ..plan import Plan
from ..rounding import Rounding


@dataclass(frozen=True)
class Site:
    """One place in the model that is patched.

    Args:
        fqn: fully qualified name of the module.
        region, kind: region and site kind (``regions.KINDS``).
        before, after: points stored by the unpatched trainer, and stored now.
    """

    fqn: str
    region: str
    kind: str
    before: frozenset[str]
    after: frozenset[str]


@dataclass(frozen=True)
class Claim:
    """A function that will be bound to ``module`` as attribute ``attr``.

    Args:
        fqn: fully qualified name of the module.
        module: the instance.
        part: what the module is checked as (``checks.PARTS``).
        attr: the attribute's name.
        function: what is bound; takes the module as ``self``.
        site: the Site that the function makes; None for a helper (a layer that carries the stream, a norm that passes through).
        counted: whether the function counts its calls.
    """

    fqn: str
    module: nn.Module
    part: str
    attr: str
    function: Callable
    site: Site | None = None
    counted: bool = True


class Alignment:
    """A plan applied to a model. As a context manager it undoes itself at the end of the block.

    Args:
        plan: the Plan.
        label: what the model is called in messages: ``qwen3, 28 layers``.
        backend: ``auto``, ``compile`` or ``eager``, as asked for.

    Attributes:
        sites: every patched Site, in the order in which a forward pass meets them.
        patched: names of the modules whose calls are counted: the sites', and the layers that carry the stream.
        calls: name -> number of forward calls so far; proof that what was patched is what runs.
        ran: what the backend came to when regions ran: {"compile"}, {"eager"}, empty before the first forward.
        notes: what else was changed, in words (rotary frequencies restored to fp32).
    """

    def __init__(self, plan: Plan, label: str, backend: str):
        self.plan, self.label, self.backend = plan, label, backend
        self.sites: list[Site] = []
        self.patched: list[str] = []
        self.calls: Counter[str] = Counter()
        self.notes: list[str] = []
        self.ran: set[str] = set()
        self._undo: list[Callable[[], str | None]] = []

    def bind(self, claims: Sequence[Claim]) -> None:
        """Bind every claim's function; the claims were checked before."""
        for claim in claims:
            method = types.MethodType(claim.function, claim.module)
            setattr(claim.module, claim.attr, method)
            self.on_undo(lambda c=claim, mine=method: _unbind(c, mine))
            if claim.counted:
                self.patched.append(claim.fqn)
            if claim.site is not None:
                self.sites.append(claim.site)

    def on_undo(self, restore: Callable[[], str | None]) -> None:
        """Remember how to take one change back; ``restore`` returns what it had to leave as it is, or None."""
        self._undo.append(restore)

    def undo(self) -> list[str]:
        """Give the model its own forwards back; remove only what is still this alignment's.

        Returns:
            What was left as it is, because somebody bound another function over it since; empty in the usual case. A
            warning says the same: that function may still call this alignment's.
        """
        left = []
        while self._undo:
            found = self._undo.pop()()
            left += [found] if found else []
        self.sites, self.patched, self.notes = [], [], []
        self.calls.clear()
        self.ran.clear()
        if left:
            warnings.warn(
                f"rounding_align: undo left {', '.join(left)} as it is: something else was bound there after the alignment",
                RuntimeWarning,
                stacklevel=2,
            )
        return left

    def __enter__(self) -> Alignment:
        return self

    def __exit__(self, *error) -> None:
        self.undo()

    def idle(self) -> list[str]:
        """Return the names of patched modules that no forward has reached yet."""
        return [fqn for fqn in self.patched if not self.calls[fqn]]

    def __str__(self) -> str:
        if not self.sites:
            return f"rounding_align: {self.label}, none"
        counts = Counter(site.region for site in self.sites)
        where = ", ".join(f"{region} {n} sites" for region, n in counts.items())
        line = f"{self.label}, {where}, {self.plan.trainer} -> {self.plan.engine}"
        return "; ".join([f"rounding_align: {line}", *self.notes])


def _unbind(claim: Claim, mine: types.MethodType) -> str | None:
    """Remove ``mine`` from the module if it is still there; return the name of what is there instead."""
    if claim.module.__dict__.get(claim.attr) is mine:
        delattr(claim.module, claim.attr)
        return None
    return f"{claim.fqn}.{claim.attr}" if claim.attr in claim.module.__dict__ else None


class Context:
    """What a bound forward shares with its Alignment: the count of its calls, and the backend of its regions."""

    def __init__(self, alignment: Alignment, fqn: str):
        self.alignment, self.fqn = alignment, fqn

    @torch.compiler.disable
    def count(self) -> None:
        """Count one call of the bound forward."""
        self.alignment.calls[self.fqn] += 1

    @torch.compiler.disable
    def backend(self, x: torch.Tensor) -> str:
        """Return ``compile`` or ``eager``: settled where the model runs, not where it is built."""
        backend = backends.resolve(self.alignment.backend, x.device.type)
        self.alignment.ran.add(backend)
        return backend

    def run(self, function: Callable, rows: dict[str, torch.Tensor], rnd: Rounding, **kwargs):
        """Run a region function on rows of shape (..., features)."""
        first = next(iter(rows.values()))
        backend = self.backend(first)
        if backend == "eager":
            return backends.run(function, rows, rnd, backend, **kwargs)
        rows = {name: backends.plain(x, x.shape[:-1].numel(), x.shape[-1]) for name, x in rows.items()}
        out = backends.run(function, rows, rnd, backend, **kwargs)
        shaped = tuple(x.view(*first.shape[:-1], x.shape[-1]) for x in (out if isinstance(out, tuple) else (out,)))
        return shaped if isinstance(out, tuple) else shaped[0]
