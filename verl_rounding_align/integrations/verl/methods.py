"""How a method of verl is wrapped, and what was not there to wrap.

A method that a hook does not find is remembered in ``ABSENT``: a run that asked for nothing goes on as it is, one that asked
for something stops.

Standard library only: every process of a run imports this file.
"""

import functools
import importlib

from . import TESTED, VERL, NotApplied

ABSENT: dict[str, list[str]] = {}  # verl's module -> names that its hook looked for and did not find


def wrap(owner, name: str, make) -> list[str]:
    """Replace ``owner.name`` by ``make(original)``, once.

    Returns:
        The name if ``owner`` has none of that name, else an empty list.
    """
    original = getattr(owner, name, None)
    if original is None:
        return [f"{owner.__name__}.{name}" if isinstance(owner, type) else name]
    if not hasattr(original, "_rounding_align"):
        wrapper = functools.wraps(original)(make(original))
        wrapper._rounding_align = True
        setattr(owner, name, wrapper)
    return []


def check(asked: str, absent: list[str] = (), modules: tuple[str, ...] = ()) -> None:
    """Stop a run that asked for something if a hook did not find what it extends.

    Args:
        asked: the config key that asks.
        absent: names that are known to be absent.
        modules: modules of verl to import first, so that their hooks have run. One that cannot be imported here is left to
            the process that needs it.

    Raises:
        NotApplied: names, and the releases of verl that have them.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
    every = [*absent, *(f"{module}.{name}" for module, names in ABSENT.items() for name in names)]
    if every:
        import verl

        raise NotApplied(
            f"{asked}: verl {verl.__version__} has no {', '.join(dict.fromkeys(every))}, which this package extends; it works "
            f"with verl {VERL} (tested with {TESTED})"
        )
