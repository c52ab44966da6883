"""Stop strings: nothing of a stop leaks, nothing else waits, the cut does not depend on how the text arrived."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include)
    out, stopped = [], False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
    return [*out, matcher.flush()], stopped


def reference(stops: list[str], text: str, include: bool) -> tuple[str, bool]:
    """By definition: at the first character that completes a stop, the longest stop ending there is cut."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if include else end - max(map(len, done))], True
    return text, False


def test_a_stop_over_four_pieces_leaks_nothing() -> None:
    out, stopped = run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "KL"])
    assert out == ["ABC", "", "", "", "", "", ""]
    assert stopped


def test_a_false_start_is_released_as_soon_as_it_cannot_become_a_stop() -> None:
    out, stopped = run(["DEFGHIJ"], ["ABC", "DEF", "x", "D"])
    assert out == ["ABC", "", "DEFx", "", "D"]
    assert not stopped


def test_the_cut_is_exact_inside_a_piece() -> None:
    assert run(["\n\n"], ["line\n", "\nmore"]) == (["line", "", ""], True)
    assert run(["stop"], ["a stop b"]) == (["a ", ""], True)


def test_the_first_complete_stop_wins_whatever_its_place_in_the_list() -> None:
    for stops in (["yy", "x"], ["x", "yy"]):
        assert run(stops, ["a x yy"]) == (["a ", ""], True)


def test_of_two_stops_that_end_together_the_longer_is_cut() -> None:
    assert run(["c", "abc"], ["..ab", "c"]) == (["..", "", ""], True)


def test_include_keeps_the_stop_and_holds_nothing_back() -> None:
    assert run(["END"], ["a E", "N", "D tail"], include=True) == (["a E", "N", "D", ""], True)


def test_text_that_begins_no_stop_passes_whole() -> None:
    out, _ = run(["b,c"], ["</think>", "a", "b", ",", "</think>"])
    assert out == ["</think>", "a", "", "", "b,</think>", ""]


def test_below_min_tokens_no_stop_begins() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", armed=False) == ("ab", False)
    assert matcher.push("a") == ("", False)
    assert matcher.push("", armed=False) == ("a", False)
    assert matcher.push("b") == ("b", False)
    assert matcher.push("xab") == ("x", True)
    assert matcher.push("more") == ("", True)


def test_unicode_stops() -> None:
    assert run(["終わり", "🛑"], ["始め終", "わ", "り!"]) == (["始め", "", "", ""], True)
    assert run(["🛑"], ["go 🛑 no"]) == (["go ", ""], True)


def test_an_empty_stop_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="not empty"):
        StopMatcher(["a", ""])


ALPHABET = "ab"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@given(STOPS, st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_cutting_gives_the_text_of_the_definition(stops: list[str], pieces: list[str], include: bool) -> None:
    out, stopped = run(stops, pieces, include)
    assert ("".join(out), stopped) == reference(stops, "".join(pieces), include)


@given(STOPS, st.lists(st.text(ALPHABET, max_size=4), max_size=12))
@settings(max_examples=300, deadline=None)
def test_only_text_that_may_become_a_stop_is_held(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = released = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        seen, released = seen + piece, released + text
        if stopped:
            return
        held = seen[len(released) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_adversarial_stops_cost_linear_time() -> None:
    """`aaa...b` against `aaa...`: a naive matcher compares a thousand characters for each one."""
    stops = ["a" * 1023 + "b", "a" * 1022 + "c", "a" * 1021 + "d", "a" * 1020 + "e"]
    matcher = StopMatcher(stops)
    start = time.perf_counter()
    for _ in range(5000):
        matcher.push("aaaa")
    assert time.perf_counter() - start < 2.0
