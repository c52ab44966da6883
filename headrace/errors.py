"""Two kinds of error: a caller's mistake or refusal (`HeadraceError`, reaches the client) and a broken invariant (ends
the process).

Lack of room inside a core is neither: it is the value `Rejected` or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """gRPC's status names; `HTTP_STATUS` gives each its HTTP twin."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ABORTED = "ABORTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


HTTP_STATUS: dict[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 499,
    Code.ABORTED: 503,
    Code.FAILED_PRECONDITION: 409,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
}


class HeadraceError(Exception):
    """A refusal with a code, a message for people, and the field, retry time and reason (a machine word such as
    `tenant_rate`, finer than the code) where they apply.

    The message never echoes the input, never names classes, paths or peers.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        fallback: str | None = None,
    ) -> None:
        """fallback: why the fallback deployment did not answer in its place, a machine word."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.fallback = fallback


def invalid(field: str, message: str, *, reason: str | None = None) -> HeadraceError:
    """A bad parameter: the message should name the limit that was broken."""
    return HeadraceError(Code.INVALID_ARGUMENT, f"{field}: {message}", field=field, reason=reason)


class StartupError(Exception):
    """The program cannot start: one clear line for the terminal and a non-zero exit."""


class InvariantError(Exception):
    """A broken invariant. Nobody catches it below the process's outermost loop."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """No room: a machine word (`queue_full`, `too_large`, ...) and when to try again (seconds)."""

    reason: str
    retry_after_s: float = 1.0
