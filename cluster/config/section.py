"""What every section of a configuration file is made of: the strict, frozen base, and types with limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.config.units import parse_bytes


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


def auto_to_none(value: object) -> object:
    return None if value == "auto" else value


def on_or_off(value: object) -> object:
    """YAML takes a bare `on` or `off` for a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def auto_size(value: object) -> object:
    return None if value is None or value == "auto" else parse_bytes(value)


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Milliseconds = Annotated[float, Field(ge=0, le=86_400_000)]
"""0 is allowed: it switches off what the field is about."""
