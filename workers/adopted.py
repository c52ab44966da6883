"""The hub as one adoption sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.service import End, HandOffRecord, HandoffStats
from workers.intake import Entry

if TYPE_CHECKING:
    from workers.hub import Hub


class AdoptedRequest:
    """A `HandoffSink`: tells the hub which of its requests it is about."""

    def __init__(self, hub: Hub, entry: Entry) -> None:
        self._hub = hub
        self._entry = entry

    def activated(self, record: HandOffRecord, stats: HandoffStats) -> None:
        self._hub.activated(self._entry, record, stats)

    def ended(self, end: End) -> None:
        self._hub.adoption_ended(self._entry, end)

    def quarantine_over(self) -> None:
        self._hub.quarantine_over(self._entry)
