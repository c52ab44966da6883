"""How much work a call is, without a clock: the lines of Python that it runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(call: Callable[[], object]) -> int:
    """Lines that `call` runs, those of what it calls included."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what is freed just now may run lines of its own
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
