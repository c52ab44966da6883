"""Clocks are callables that return monotonic seconds; cores receive `now` instead."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

monotonic: Clock = time.monotonic
