"""Lease streams that lose, repeat and reorder single messages: HTTP/2 never does, but a fault of this program may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[Any], Awaitable[None]]


class MessageFaults:
    """What is to be done to messages by kind, in the order of arming; `happened` counts `VERB KIND` once it is done."""

    def __init__(self, happened: Counter[str]) -> None:
        self.happened = happened
        self.armed: list[str] = []
        """`VERB KIND`, once for each message."""

    def arm(self, verb: str, kind: str, count: int = 1) -> None:
        self.armed += [f"{verb} {kind}"] * count

    def take(self, kind: str) -> str:
        """The verb for a message of this kind that goes out now; "": none."""
        for at, what in enumerate(self.armed):
            verb, _, victim = what.partition(" ")
            if victim == kind:
                del self.armed[at]
                return verb
        return ""


def faulty_pump(faults: MessageFaults, pump: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`kvtransfer.stream.pump` that loses, repeats and reorders what it writes."""

    def faulty(write: Send) -> Send:
        behind: list[Any] = []

        async def send(message: Any) -> None:
            kind = message.WhichOneof("kind")
            verb = faults.take(kind)
            if verb == "reorder":
                behind.append(message)
                return
            if verb == "drop":
                faults.happened[f"drop {kind}"] += 1
                return
            await write(message)
            if verb == "duplicate":
                await write(message)
                faults.happened[f"duplicate {kind}"] += 1
            while behind:
                late = behind.pop()
                await write(late)
                faults.happened[f"reorder {late.WhichOneof('kind')}"] += 1

        return send

    async def run(read: Any, write: Send, *rest: Any, **named: Any) -> Any:
        return await pump(read, faulty(write), *rest, **named)

    return run
