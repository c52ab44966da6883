"""Clocks are callables that return monotonic seconds; cores receive `now` instead."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

monotonic: Clock = time.monotonic


class VirtualClock:
    """A clock that moves when told to. `clock()` reads it, `advance(s)` moves it forward."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError("time does not go back")
        self.now += seconds
        return self.now
