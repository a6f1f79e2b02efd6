"""Progress bars on standard error: the one display of every tool in the package.

A display that is shown is a ``rich.progress.Progress``, so its own methods (``add_task``, ``advance``, ``update``, ``print``)
work too. One that is not shown needs no library, so that scripts can run where rich is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Silent:
    """A display that shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error) -> None:
        pass

    def add_task(self, *args, **kwargs) -> int:
        return 0

    def update(self, *args, **kwargs) -> None:
        pass

    advance = print = update


def progress(shown: bool = True):
    """Return a display to be used as a context manager: one line per bar with share done, time passed and time left.

    Args:
        shown: False for a display that shows nothing.
    """
    if not shown:
        return Silent()
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text, elapsed, left = TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(text, BarColumn(), TaskProgressColumn(), elapsed, left, console=Console(stderr=True))


def bar(display, title: str, total: float) -> Callable[..., None]:
    """Return ``advance(n=1, title=None)`` of a new bar; ``title`` is what the bar says from then on."""
    task = display.add_task(title, total=total)

    def advance(n: float = 1, title: str | None = None) -> None:
        display.update(task, advance=n, description=title)

    return advance


def bar_by_name(display, title: str, total: float) -> Callable[[str, float], None]:
    """Return ``advance(name, n)``, which keeps one bar per name; a name whose bar is full gets a new one.

    Args:
        title: what a bar says, with ``{}`` for the name.
        total: of each bar.
    """
    tasks, done = {}, {}

    def advance(name: str, n: float) -> None:
        if done.get(name, total) >= total:
            tasks[name], done[name] = display.add_task(title.format(name), total=total), 0
        done[name] += n
        display.update(tasks[name], advance=n)

    return advance


@contextmanager
def follow(display, title: str, then: str | None = None) -> Iterator[Callable[..., None]]:
    """Yield ``tell(done, total=1.0, title=None)`` of a new bar; the bar is full at the end of the block.

    Args:
        then: what goes on for an unknown time once done is total; it gets a second bar without an end.
    """
    task, more = display.add_task(title, total=1), None

    def tell(done: float, total: float = 1.0, title: str | None = None) -> None:
        nonlocal more
        display.update(task, completed=done, total=total, description=title)
        if then and done == total and more is None:
            more = display.add_task(then, total=None)

    yield tell
    for one in (task, more):
        if one is not None:
            display.update(one, completed=1, total=1)
