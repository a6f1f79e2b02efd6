"""Which releases of another package a part of this one works with, and one sentence where another release is installed.

Every range is a ``SpecifierSet`` in the module that depends on it. A pre-release and a local part do not count: ``0.30.0rc1``
and ``0.30.0+cpu`` are judged as ``0.30.0``, since a pre-release already has the code of the release that it leads to.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class UntestedRelease(ValueError):
    """An installed release that a part of this package was not written for; the message is for the user."""


def base(installed: str) -> Version | None:
    """Return a release without its pre-release and local parts; None where the text is no version.

    >>> str(base("0.30.0rc1+cpu")), base("dev")
    ('0.30.0', None)
    """
    try:
        return Version(Version(installed).base_version)
    except InvalidVersion:
        return None


def covers(supported: SpecifierSet, installed: str) -> bool:
    """Return whether a release lies in a range; a text that is no version lies in none.

    >>> covers(SpecifierSet(">=0.28,<0.33"), "0.32.1+cpu"), covers(SpecifierSet(">=0.28,<0.33"), "0.33.0rc1")
    (True, False)
    """
    release = base(installed)
    return release is not None and supported.contains(release)


def text(supported: SpecifierSet) -> str:
    """Return a range as one writes it, low end first.

    >>> text(SpecifierSet("<0.33,>=0.28"))
    '>=0.28,<0.33'
    """
    return ",".join(map(str, sorted(supported, key=lambda s: (Version(s.version.removesuffix(".*")), s.operator))))


def check(name: str, installed: str, supported: SpecifierSet, what: str, tested: str) -> None:
    """Refuse a release that is outside a range.

    Args:
        name: the other package.
        installed: its release, as the package itself says it.
        supported: releases whose code was read, or run.
        what: what works with them, the first words of the message: a config key, a command, a feature.
        tested: the release, or releases, that tests ran.

    Raises:
        UntestedRelease: a ValueError that names what, range, tested and installed release.

    >>> check("verl", "0.8.0", SpecifierSet(">=0.9,<0.10"), "rounding_align", "0.9.1")
    Traceback (most recent call last):
    ...
    verl_rounding_align.releases.UntestedRelease: rounding_align works with verl >=0.9,<0.10 (tested with 0.9.1); \
verl 0.8.0 is installed
    """
    if not covers(supported, installed):
        raise UntestedRelease(
            f"{what} works with {name} {text(supported)} (tested with {tested}); {name} {installed} is installed"
        )
