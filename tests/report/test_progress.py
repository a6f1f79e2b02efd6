"""Contract of the progress display: bars count what they are told, end full, and are not drawn where nobody looks."""

from __future__ import annotations

import pytest

from verl_rounding_align.report import progress as bars


@pytest.fixture
def display():
    with bars.progress() as display:
        yield display


def state(display) -> list[tuple]:
    return [(task.description, task.completed, task.total) for task in display.tasks]


def test_a_bar_advances_and_says_what_it_is_told(display):
    advance = bars.bar(display, "tokens", 5)
    advance()
    advance(2)
    assert state(display) == [("tokens", 3, 5)]
    advance(title="more tokens")
    assert state(display) == [("more tokens", 4, 5)]


def test_there_is_a_bar_for_each_name_and_another_when_it_is_full(display):
    advance = bars.bar_by_name(display, "scores {}", 4)
    for name, n in (("a", 3), ("b", 4), ("a", 1), ("a", 2)):
        advance(name, n)
    assert state(display) == [("scores a", 4, 4), ("scores b", 4, 4), ("scores a", 2, 4)]


def test_what_is_followed_ends_full_and_what_comes_then_has_a_bar_of_its_own(display):
    with bars.follow(display, "generates", "asks") as tell:
        tell(1, 4)
        assert state(display) == [("generates", 1, 4)]
        tell(4, 4, "generates: 4")
        assert state(display) == [("generates: 4", 4, 4), ("asks", 0, None)]
        tell(4, 4)
    assert state(display) == [("generates: 4", 1, 1), ("asks", 1, 1)]


def test_a_block_that_fails_leaves_its_bar_where_it_was(display):
    with pytest.raises(KeyError), bars.follow(display, "generates") as tell:
        tell(1, 4)
        raise KeyError
    assert state(display) == [("generates", 1, 4)]


def test_a_display_that_is_not_shown_draws_nothing(capfd):
    def use(shown):
        with bars.progress(shown) as display:
            bars.bar(display, "tokens", 2)()
            bars.bar_by_name(display, "{}", 2)("a", 1)
            with bars.follow(display, "generates", "asks") as tell:
                tell(1.0)
            display.print("a line")
        return capfd.readouterr()

    assert use(False) == ("", "")
    shown = use(True)
    assert shown.out == "" and "tokens" in shown.err and "a line" in shown.err
