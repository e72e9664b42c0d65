"""The data plane through a torch process group: NCCL between GPUs (or Gloo, in tests).

A connection is the TCP transport's (:mod:`lmcache_connector.p2p.data.tcp`), which proves its
session and carries the heads of frames. A process group of two beside it carries the payload. The
receiver keeps the store at which both meet, on the interface it listens on, and names the store's
port over the connection. A payload crosses in pieces of at most ``PIECE_BYTES``, through a buffer
on the device.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.p2p.data.tcp import PIECE_BYTES, TcpTransport, no_deadline
from lmcache_connector.p2p.errors import PeerError

_PORT = struct.Struct("<H")
_RECEIVER, _SENDER = 0, 1


class ProcessGroupTransport(TcpTransport):
    """``backend`` is ``nccl`` for a CUDA ``device``. Raises ``PeerError`` where it is missing."""

    def __init__(
        self,
        backend: Literal["nccl", "gloo"],
        device: torch.device,
        stall_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(stall_seconds, clock)
        if backend == "nccl" and not distributed.is_nccl_available():
            raise PeerError("this build of torch has no NCCL")
        self.name = backend
        self._device = device

    def _receiving_path(self, wire: Wire, host: str) -> _GroupPath:
        """Host the store, and let the sender find it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        deadline = Deadline(self._clock() + self._stall_seconds, self._clock)
        wire.send([_PORT.pack(port)], deadline)
        with _as_peer_errors():
            store = distributed.TCPStore(
                host,
                port,
                2,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
            return self._path(wire, store, _RECEIVER)

    def _sending_path(self, wire: Wire, host: str) -> _GroupPath:
        port = bytearray(_PORT.size)
        deadline = Deadline(self._clock() + self._stall_seconds, self._clock)
        try:
            wire.receive([memoryview(port)], deadline)
        except WireError as error:
            raise PeerError(f"no process group: {error}") from error
        with _as_peer_errors():
            store = distributed.TCPStore(
                host, _PORT.unpack(port)[0], 2, is_master=False, timeout=self._timeout
            )
            return self._path(wire, store, _SENDER)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._stall_seconds)

    def _path(self, wire: Wire, store: Any, rank: int) -> _GroupPath:
        group = self._group(store, rank)
        return _GroupPath(wire, group, 1 - rank, self._device, self._timeout, self._clock)

    def _group(self, store: Any, rank: int) -> Any:
        if self.name == "gloo":
            return distributed.ProcessGroupGloo(store, rank, 2, self._timeout)
        torch.cuda.set_device(self._device)  # of this thread
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return distributed.ProcessGroupNCCL(store, rank, 2, options)


class _GroupPath:
    """Payloads through a group, to or from the one other member. Belongs to one thread."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        wire: Wire,
        group: Any,
        peer: int,
        device: torch.device,
        timeout: timedelta,
        clock: Callable[[], float],
    ) -> None:
        self._wire = wire
        self._group = group
        self._peer = peer
        self._device = device
        self._timeout = timeout
        self._clock = clock
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, head: bytes, views: Sequence[memoryview]) -> None:
        self._wire.send([head], no_deadline(self._clock))
        for piece in _pieces(views):
            staged = self._room(piece.numel())
            staged.copy_(piece)
            self._wait(self._group.send([staged], self._peer, 0))

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        for piece in _pieces(views):
            if deadline.cancelled():
                raise PeerError("the transport is shutting down")
            staged = self._room(piece.numel())
            self._wait(self._group.recv([staged], self._peer, 0))
            piece.copy_(staged)

    def close(self) -> None:
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            with _as_peer_errors(), contextlib.suppress(PeerError):
                abort()

    def _wait(self, work: Any) -> None:
        with _as_peer_errors():
            work.wait(self._timeout)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _room(self, num_bytes: int) -> torch.Tensor:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]


def _pieces(views: Sequence[memoryview]) -> Iterator[torch.Tensor]:
    for view in views:
        with warnings.catch_warnings(action="ignore"):  # of memory that is only read
            whole = torch.frombuffer(view, dtype=torch.uint8)
        yield from whole.split(PIECE_BYTES)


@contextlib.contextmanager
def _as_peer_errors() -> Iterator[None]:
    """torch knows only RuntimeError for whatever a peer does."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"the process group failed: {str(error).splitlines()[0][:200]}") from error
