"""The hub's part in tool calls: a gateway's Pause and Resume go into the scheduler, Paused goes out behind the tokens.

A gateway resumes only after Paused: so the session's order alone tells tokens of before the pause from those behind the
tool's answer, although both have the same offsets.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.clock import Clock
from headrace.core.records import FinishReason
from headrace.errors import Code
from headrace.ids import RequestKey
from headrace.v1 import worker_pb2 as pb
from workers.core.request import Keep
from workers.core.scheduler import Scheduler
from workers.engine import Engine
from workers.intake import Entry, call_from
from workers.sessions import GatewaySession


class ToolWaits(ABC):
    """See `workers.hub.Hub`, which is the one that workers make."""

    _scheduler: Scheduler
    _clock: Clock
    _loop: asyncio.AbstractEventLoop
    _entries: dict[RequestKey, Entry]
    _handles: dict[tuple[GatewaySession, int], Entry]

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    @abstractmethod
    def _reserve(self) -> None: ...

    @abstractmethod
    def _fail(self, entry: Entry, code: Code, reason: str, message: str, retry_after_s: float = 0.0) -> None: ...

    # ---- from gateways

    def pause(self, session: GatewaySession, message: pb.Pause) -> None:
        """`paused` answers. A handle that has ended already is answered by its Done or Failed."""
        entry = self._handles.get((session, message.handle))
        if entry is not None:
            with self.engine.lock:
                self._scheduler.pause(entry.request.key, call_from(message), self._clock())
                self.engine.wake()

    def resume(self, session: GatewaySession, message: pb.Resume) -> None:
        """The tool's answer. What this worker cannot take in ends here, and another worker may."""
        entry = self._handles.get((session, message.handle))
        if entry is None:
            return
        key = entry.request.key
        with self.engine.lock:
            resumed = self._scheduler.resume(key, message.token_ids, self._clock())
            if not resumed:
                self._scheduler.finish(key, FinishReason.ERROR, self._clock())
            self.engine.wake()
        if not resumed:
            self._fail(entry, Code.UNAVAILABLE, "not_resumed", "the worker cannot take the tool's answer in")
        entry.session.load_changed()
        self._reserve()

    # ---- from the engine thread

    def paused(self, paused: Sequence[tuple[RequestKey, Keep]]) -> None:
        """They wait for their tools; no token of theirs is on its way any more."""
        self._loop.call_soon_threadsafe(self._tell_paused, list(paused))

    def _tell_paused(self, paused: list[tuple[RequestKey, Keep]]) -> None:
        for key, keep in paused:
            if (entry := self._entries.get(key)) is not None:
                entry.session.put(pb.SessionResponse(paused=pb.Paused(handle=entry.handle, keep=keep.value)))
                entry.session.load_changed()
        self._reserve()
