"""What a look at a machine found: one line a check. Says nothing about how it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It runs, slower or less safely than it could."""
    FAIL = "fail"
    """A deployment would not start, or not do what the configuration says."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    found: str
    advice: str = ""
    """What to do; empty where nothing is."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured, for scripts; names carry the unit."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.FAIL, found, advice)
