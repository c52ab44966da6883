"""A process group of two over torch.distributed: the reader is rank 0, the holder rank 1. Free-standing: neither
`init_process_group` nor the worker's own groups know of it.

All methods but `abort` block, and are called in one thread. `gloo` moves CPU memory. With `nccl` each rank needs a GPU
of its own (the first that its process sees), a piece passes through a buffer on it, the communicator is made by the
first piece, and only an abort ends a wait. Written for it, tested with gloo.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost peers are errors of the reads
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # an error ends the communicator, not the process

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from kvtransfer.transports.base import TransferError, TransferFault

dist: Any = torch.distributed
"""Its types leave out what is used here."""
BACKENDS = ("gloo", "nccl")
READER, HOLDER = 0, 1
DATA_TAG, ABORT_TAG = 0, 1


class Staging:
    """Memory of the transport's own that a piece passes through; `bytes` is its part on the host."""

    def __init__(self, backend: str, num_bytes: int) -> None:
        on_device = backend == "nccl"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_device)
        self._moved = torch.empty(num_bytes, dtype=torch.uint8, device="cuda") if on_device else self._host
        self.bytes: npt.NDArray[np.uint8] = self._host.numpy()

    def to_send(self, num_bytes: int) -> torch.Tensor:
        if self._moved is not self._host:
            self._moved[:num_bytes].copy_(self._host[:num_bytes])
        return self._moved[:num_bytes]

    def to_receive(self, num_bytes: int) -> torch.Tensor:
        return self._moved[:num_bytes]

    def received(self, num_bytes: int) -> None:
        if self._moved is not self._host:
            self._host[:num_bytes].copy_(self._moved[:num_bytes])


class Store:
    """Where the two members find each other: a TCPStore that the holder opens for this pair on its own address."""

    def __init__(self, host: str, port: int, key: str, timeout_s: float, listening_fd: int | None = None) -> None:
        """The holder gives the listening socket, which goes over to the store. Raises TransferError(peer_lost)."""
        limit = timedelta(seconds=timeout_s)
        try:
            store = (
                dist.TCPStore(host, port, is_master=False, timeout=limit)
                if listening_fd is None
                else dist.TCPStore(
                    host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening_fd
                )
            )
            self.inner: Any = dist.PrefixStore(key, store)
        except RuntimeError as error:
            raise TransferError(TransferFault.PEER_LOST, f"no store for the pair: {_first_line(error)}") from error


class Group:
    """Methods raise TransferError(peer_lost) when the other member is gone or the group was aborted."""

    def __init__(
        self, backend: str, store: Store, host: str, rank: int, pair_timeout_s: float, move_timeout_s: float
    ) -> None:
        """Waits for the other member, at most `pair_timeout_s`. A send or receive of more than `move_timeout_s` fails:
        who waits for it should have aborted the group by then.
        """
        self._aborted = False
        self._move_timeout = timedelta(seconds=move_timeout_s)
        self._store = store
        self._other = HOLDER if rank == READER else READER
        self._backend = backend
        try:
            self._group: Any = _make(
                backend, store.inner, host, rank, timedelta(seconds=pair_timeout_s), self._move_timeout
            )
        except RuntimeError as error:
            store.inner = None
            raise TransferError(TransferFault.PEER_LOST, f"no group for the pair: {_first_line(error)}") from error

    def send(self, staging: Staging, num_bytes: int) -> None:
        self._wait(lambda: self._group.send([staging.to_send(num_bytes)], self._other, DATA_TAG))

    def receive(self, staging: Staging, num_bytes: int) -> None:
        self._wait(lambda: self._group.recv([staging.to_receive(num_bytes)], self._other, DATA_TAG))
        staging.received(num_bytes)

    def abort(self) -> None:
        """From any thread: whoever waits in `send` or `receive` gets an error, now or soon.

        Gloo's own abort lets waiters wait. But when one operation's time is over it closes all pairs of the group.
        """
        self._aborted = True
        try:
            if self._backend == "nccl":
                self._group.abort()
            else:
                never = torch.empty(1, dtype=torch.uint8)
                self._group.recv([never], self._other, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:  # expected of gloo; and the group may be broken already
            pass

    def close(self) -> None:
        """Gives threads and sockets back, whoever still has this object: an exception's frames may, for long. Only when
        nobody waits in it any more.
        """
        self._group = self._store.inner = None

    def _wait(self, start: Any) -> None:
        try:
            start().wait(self._move_timeout)
            if self._backend == "nccl":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise TransferError(TransferFault.PEER_LOST, _first_line(error)) from error
        if self._aborted:
            raise TransferError(TransferFault.PEER_LOST, "the group was aborted")


def _make(backend: str, store: Any, host: str, rank: int, to_pair: timedelta, to_move: timedelta) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = to_move
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = to_pair
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:200]
