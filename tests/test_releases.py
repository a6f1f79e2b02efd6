"""Contract of releases: a range takes the releases in it, with any pre-release or local part, and refuses all others in one
sentence that names what needs it, the range, the tested release and the installed one."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from verl_rounding_align import releases

RANGE = SpecifierSet(">=2.11,!=2.12.*,<2.14")


@pytest.mark.parametrize(
    ("installed", "inside"),
    [
        ("2.11.0", True),
        ("2.11.0rc1", True),
        ("2.13.1+cpu", True),
        ("2.13.0.dev20260101+cu130", True),
        ("2.10.9", False),
        ("2.12.1", False),
        ("2.14.0", False),
        ("2.14.0rc1", False),
        ("unknown", False),
    ],
)
def test_a_release_is_judged_without_its_pre_release_and_local_parts(installed, inside):
    assert releases.covers(RANGE, installed) is inside


def test_a_release_outside_is_refused_in_one_sentence():
    with pytest.raises(releases.UntestedRelease) as error:
        releases.check("torch", "2.12.1+cpu", RANGE, "sites", "2.11.0, 2.13.0")
    assert str(error.value) == (
        "sites works with torch >=2.11,!=2.12.*,<2.14 (tested with 2.11.0, 2.13.0); torch 2.12.1+cpu is installed"
    )
    assert isinstance(error.value, ValueError)  # what the command line prints as one line


def test_a_release_inside_passes():
    assert releases.check("torch", "2.13.0+cpu", RANGE, "sites", "2.13.0") is None
