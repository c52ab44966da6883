"""The few NIXL calls that the UCX transport needs, with typed errors. One thread may use an agent.

NIXL's own Python wrapper is bypassed on purpose: it starts the progress thread with a delay of 0, which spins a whole
core even when idle (measured: 87-100 % of a core against 2 % with PROGRESS_DELAY_US, at equal latency, because the
thread then sleeps on UCX's event descriptor). It also reconfigures Python's logging at import.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvtransfer.core.layout import Cut
from kvtransfer.transports.base import Pool, TransferError, TransferFault

PROGRESS_DELAY_US = 10000
MAX_LISTS = 16
"""Prepared lists of own blocks, and of a peer's; each worker it exchanges parts of blocks with needs a few."""
Handle = NewType("Handle", int)
BlockList = NewType("BlockList", int)
BlockIds = npt.NDArray[np.int32]


class PostState(Enum):
    DONE = "done"
    IN_PROGRESS = "in_progress"


def load_bindings() -> ModuleType:
    """NIXL's native module. Raises ImportError with the reason when no variant is usable.

    Lost peers are reported as errors of the reads; NIXL and UCX need not write them to stderr as well.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    reasons = []
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError("; ".join(reasons))


class UnfencedError(TransferError):
    """A post failed in a way that does not prove its other parts stopped: NIXL only asks UCX to cancel them."""


@dataclass(slots=True)
class _Blocks:
    """Where an agent's blocks lie, and NIXL's lists of (offset, bytes) of each of them, the least used first."""

    agent: str
    base: int
    block_bytes: int
    num_blocks: int
    lists: dict[tuple[int, int], BlockList] = field(default_factory=dict)


class UcxAgent:
    """One NIXL agent over one pool. Methods raise TransferError: peer_lost or failed."""

    def __init__(self, name: str, pool: Pool) -> None:
        self._nixl = nixl = load_bindings()
        self._errors = tuple(
            kind for key, kind in vars(nixl).items() if key.startswith("nixl") and key.endswith("Error")
        )
        self._peers: dict[str, _Blocks] = {}
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
            base = pool.memory.ctypes.data
            self._registered = nixl.nixlRegDList(nixl.DRAM_SEG, [(base, pool.memory.nbytes, 0, "")])
            self._agent.registerMem(self._registered, [])
            self._own = _Blocks(nixl.NIXL_INIT_AGENT, base, pool.block_bytes, pool.num_blocks)
            self._list(self._own, 0, pool.block_bytes)
            self.metadata: bytes = self._agent.getLocalMD()
        except self._errors as error:
            raise TransferError(TransferFault.FAILED, f"NIXL cannot use UCX here: {error}") from error

    def add_peer(self, peer_id: str, metadata: bytes, base: int, block_bytes: int, num_blocks: int) -> None:
        """Connects to a process whose blocks lie from `base` on."""
        try:
            found = self._agent.loadRemoteMD(metadata)
            if found.decode() != peer_id:
                self._agent.invalidateRemoteMD(found)
                raise TransferError(TransferFault.FAILED, "stale: the metadata is another incarnation's")
            self._agent.makeConnection(peer_id, [])
            blocks = _Blocks(peer_id, base, block_bytes, num_blocks)
            self._list(blocks, 0, block_bytes)
            self._peers[peer_id] = blocks
        except self._errors as error:
            raise self._typed(error) from error

    def remove_peer(self, peer_id: str) -> None:
        """Only when no read from it is in progress: this fences nothing."""
        for blocks in self._peers.pop(peer_id).lists.values():
            with suppress(*self._errors):  # the connection may be broken already
                self._agent.releasedDlistH(blocks)
        with suppress(*self._errors):
            self._agent.invalidateRemoteMD(peer_id)

    def post(
        self, peer_id: str, cut: Cut, remote_blocks: BlockIds, own_blocks: BlockIds
    ) -> tuple[Handle | None, PostState]:
        """Starts one read; None when it needs no further look. Over shared memory the copy happens in here. Whole
        blocks that follow each other on both sides become one descriptor.

        Raises UnfencedError, as `check` does, when part of it may still write.
        """
        nixl = self._nixl
        try:
            own = self._list(self._own, cut.local_offset, cut.num_bytes)
            remote = self._list(self._peers[peer_id], cut.remote_offset, cut.num_bytes)
            handle = self._agent.makeXferReq(nixl.NIXL_READ, own, own_blocks, remote, remote_blocks, b"", [], False)
        except self._errors as error:
            raise self._typed(error) from error
        try:
            state = self._state(self._agent.postXferReq(handle, b""))
        except self._errors as error:
            self._release(handle)
            raise self._typed(error, posted=True) from error
        if state is PostState.DONE:
            self._release(handle)
            return None, state
        return Handle(handle), state

    def check(self, handle: Handle) -> PostState:
        """DONE and an error are the last word on a post: the handle is released then."""
        try:
            state = self._state(self._agent.getXferStatus(handle))
        except self._errors as error:
            self._release(handle)
            raise self._typed(error, posted=True) from error
        if state is PostState.DONE:
            self._release(handle)
        return state

    def close(self) -> None:
        """Only when no read is in progress."""
        with suppress(*self._errors):  # the process goes on without this agent either way
            for blocks in self._own.lists.values():
                self._agent.releasedDlistH(blocks)
            self._agent.deregisterMem(self._registered, [])
        del self._agent

    def _list(self, blocks: _Blocks, offset: int, num_bytes: int) -> BlockList:
        """NIXL's list of this part of all blocks, prepared when it is first asked for. A request that was made from a
        list does not need it any more.
        """
        key = (offset, num_bytes)
        prepared = blocks.lists.pop(key, None)
        if prepared is None:
            if len(blocks.lists) == MAX_LISTS:
                self._agent.releasedDlistH(blocks.lists.pop(next(iter(blocks.lists))))
            strided = np.array(
                [[blocks.base + offset, num_bytes, 0, blocks.block_bytes, blocks.num_blocks]], dtype=np.uint64
            )
            prepared = BlockList(self._agent.prepXferDlist(blocks.agent, self._nixl.DRAM_SEG, strided, []))
        blocks.lists[key] = prepared
        return prepared

    def _state(self, status: Any) -> PostState:
        if status == self._nixl.NIXL_SUCCESS:
            return PostState.DONE
        if status == self._nixl.NIXL_IN_PROG:
            return PostState.IN_PROGRESS
        raise UnfencedError(TransferFault.FAILED, f"NIXL status {status}")

    def _typed(self, error: Exception, posted: bool = False) -> TransferError:
        if isinstance(error, self._nixl.nixlRemoteDisconnectError):  # nothing comes over a connection that is gone
            return TransferError(TransferFault.PEER_LOST, str(error))
        return (UnfencedError if posted else TransferError)(TransferFault.FAILED, str(error))

    def _release(self, handle: int) -> None:
        with suppress(*self._errors):  # a handle that ended in an error may refuse; the agent frees it when it goes
            self._agent.releaseXferReq(handle)
