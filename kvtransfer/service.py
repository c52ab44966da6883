"""The lease protocol's two shells over Worker.Lease, the surface that workers use.

    reader (decode worker)                           holder (prefill worker)
    LeaseOpen(request, attempt, incarnation) ------>
                                             <------ LeaseOpened(lease id)
                                             <------ LeaseAnnounce(blocks)   a chunk's step ended; repeated
    [reads over the transport] LeasePulled   ------>
                                             <------ HandOff(first token, ...)
    LeaseVerify after the last read          ------>
                                             <------ LeaseHeld
    LeaseClose(completed)                    ------> unpins

The two have paired before (`kvtransfer.pairing`): the reader knows where the holder's blocks lie, by lane, and signs
LeaseOpen with the pair's key. Either side may end a lease at any time: LeaseClose(not completed), LeaseRevoked, the
stream's break, or silence.

A fetch of a prefix is the same between workers of any role: LeaseOpen names blocks by their hashes, the holder
announces the leading run of them that it has cached, what lies below its device as it comes up, and seals it with a
HandOff that has no output.
"""

from kvtransfer.adoption import Adoption, HandoffSink, HandoffStats
from kvtransfer.core.handoff import End
from kvtransfer.core.lease import HandOffRecord
from kvtransfer.holder import LeaseGrant, LeaseHolder, LeaseSource
from kvtransfer.reader import LeaseReader
from kvtransfer.stream import TOKEN_KEY

__all__ = [
    "TOKEN_KEY",
    "Adoption",
    "End",
    "HandOffRecord",
    "HandoffSink",
    "HandoffStats",
    "LeaseGrant",
    "LeaseHolder",
    "LeaseReader",
    "LeaseSource",
]
