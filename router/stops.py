"""Stop strings over a stream of text: nothing of a stop leaks, nothing else is kept back longer than needed."""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """Knuth-Morris-Pratt: `state` is the length of the longest end of the text so far that begins `word`."""

    __slots__ = ("border", "state", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.border = _borders(word)
        self.state = 0

    def step(self, char: str) -> int:
        state = self.state
        while state and self.word[state] != char:
            state = self.border[state]
        self.state = state + 1 if self.word[state] == char else 0
        return self.state


def _borders(word: str) -> list[int]:
    """border[k]: length of the longest proper prefix of word[:k] that also ends it."""
    border = [0] * (len(word) + 1)
    length = 0
    for k in range(1, len(word)):
        while length and word[k] != word[length]:
            length = border[length]
        if word[k] == word[length]:
            length += 1
        border[k + 1] = length
    return border


class StopMatcher:
    """The stop strings of one branch. The result depends on the text alone, never on how it was cut into pushes.

    The first stop to be complete wins; of two that end at one character the longer. With `include` the stop itself is
    part of the text and nothing is held back. Cost: O(characters x stops), O(1) while no stop has begun.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is not empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """The text that may go out now, and whether a stop was found (the text then ends there; later pushes give '').

        Not `armed` (the branch is below its min_tokens): the text passes whole and no stop can begin in it.
        """
        if self._stopped:
            return "", True
        if not self._automata:
            return text, False
        if not armed:
            return self.release() + text, False
        if not self._held and self._first.isdisjoint(text):
            return text, False
        return self._scan(text)

    def flush(self) -> str:
        """What was held when the branch ended without a stop."""
        return "" if self._stopped else self.release()

    def _scan(self, text: str) -> tuple[str, bool]:
        window = self._held + text
        offset = len(self._held)
        for position, char in enumerate(text, start=offset + 1):
            matched = 0
            for automaton in self._automata:
                if automaton.step(char) == len(automaton.word):
                    matched = max(matched, len(automaton.word))
            if matched:
                self._stopped = True
                end = position if self._include else position - matched
                return window[offset if self._include else 0 : end], True
        keep = max(automaton.state for automaton in self._automata)
        self._held = window[len(window) - keep :] if keep else ""
        if self._include:
            return text, False
        return window[: len(window) - keep], False

    def release(self) -> str:
        """What is held and not out yet; no stop can have begun before what comes next."""
        held = "" if self._include else self._held
        self._held = ""
        for automaton in self._automata:
            automaton.state = 0
        return held
