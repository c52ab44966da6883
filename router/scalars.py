"""Checks of single values from outside. Each returns the value in its own type or raises INVALID_ARGUMENT naming
field and limit.

Messages never contain the value: it may be a megabyte, and it is the caller's.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

from headrace.errors import HeadraceError, invalid

INT64_MAX = 2**63 - 1
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def integer(field: str, value: object, low: int, high: int) -> int:
    """A whole number in low..high; a float only when it is whole (JSON clients write 5.0)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(field, "must be an integer")
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        raise invalid(field, "must be an integer")
    if not low <= value <= high:
        raise invalid(field, f"must be between {low} and {high}")
    return int(value)


def number(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """A finite number in low..high, or in (low, high] with `above_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(field, "must be a number")
    inside = low < value <= high if above_low else low <= value <= high
    if not inside:  # also NaN, which no comparison holds
        bounds = f"greater than {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
        raise invalid(field, f"must be {bounds}")
    return float(value)


def boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(field, "must be true or false")
    return value


def string(field: str, value: object, max_chars: int) -> str:
    """A text of at most `max_chars` characters."""
    if not isinstance(value, str):
        raise invalid(field, "must be a string")
    if len(value) > max_chars:
        raise invalid(field, f"must have at most {max_chars} characters")
    return value


def label(field: str, value: object) -> str:
    """A client's name for its request: at most 128 printable characters."""
    text = string(field, value, 128)
    if not text.isprintable():
        raise invalid(field, "must have printable characters only")
    return text


def array(field: str, value: object, max_items: int) -> list[object]:
    if not isinstance(value, list):
        raise invalid(field, "must be a list")
    if len(value) > max_items:
        raise invalid(field, f"must have at most {max_items} items")
    return value


def json_object(field: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise invalid(field, "must be an object")
    return value


def one_of(field: str, value: object, allowed: Iterable[str]) -> str:
    names = sorted(allowed)
    if not isinstance(value, str) or value not in names:
        raise invalid(field, f"must be one of {', '.join(names)}")
    return value


def unknown_field(name: str, known: Iterable[str], where: str = "") -> HeadraceError:
    """The refusal of a field that nobody reads, with the nearest known name. A strange name is not repeated."""
    if not _FIELD_NAME.fullmatch(name):
        return invalid("body", "unknown field (its name is not plain letters, digits and underscores)")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return invalid(where + name, f"unknown field{hint}")
