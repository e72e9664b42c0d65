"""A CPU tier that a peer server can serve from, and engines of this host that find each other."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.peers.commands import Chunks, Commands, Greeting
from lmcache_connector.peers.host import HostFolder, SocketName, digest
from lmcache_connector.peers.server import Limits, PeerServer, listen
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.peers.transfers import Transfers
from lmcache_connector.plans import TransferUpdate
from lmcache_connector.storage.chunk_codec import Sealer
from lmcache_connector.storage.geometry import PartGeometries, Stripe
from lmcache_connector.storage.redis import connections
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_readers import ReadResult
from lmcache_connector.threads import Task, ValueT
from tests.support.redis.chunks import GEOMETRY, PARTS, chunk_data, chunk_key

KEYS = tuple(map(chunk_key, range(6)))


@dataclass(frozen=True)
class CountedLease:
    view: memoryview
    chunks: HeldChunks
    key: bytes

    @property
    def offset(self) -> int:
        return self.chunks.offsets[self.key]

    @property
    def headers(self) -> dict[Stripe, bytes]:
        return {}  # none: seals are made anew, as tests change the data

    def release(self) -> None:
        with self.chunks.lock:
            self.chunks.leases[self.key] -= 1
            self.chunks.lock.notify_all()


class HeldChunks:
    """The chunks of ``indices``."""

    def __init__(self, indices: Sequence[int], parts: PartGeometries = PARTS) -> None:
        self.lock = threading.Condition()
        self.leases: Counter[bytes] = Counter()
        self.data = {chunk_key(i): chunk_data(i, parts.of(chunk_key(i))) for i in indices}
        self.elsewhere: set[bytes] = set()
        self.memory: int | None = None
        self.offsets: dict[bytes, int] = {}

    def share(self) -> mmap.mmap:
        """Their bytes from now on in memory that others may map."""
        self.memory = os.memfd_create("chunks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory, max(1, sum(map(len, self.data.values()))))
        shared, at = mmap.mmap(self.memory, 0), 0
        fcntl.fcntl(self.memory, 1033, 0x2 | 0x4)  # F_ADD_SEALS: F_SEAL_SHRINK, F_SEAL_GROW
        for key, data in self.data.items():
            self.offsets[key], shared[at : at + len(data)] = at, data
            at += len(data)
        return shared

    def holds(self, key: bytes) -> bool:
        return key in self.data

    def is_read_from_owner(self, key: bytes) -> bool:
        return key in self.elsewhere

    def lease(self, key: bytes) -> CountedLease | None:
        if key not in self.data:
            return None
        with self.lock:
            self.leases[key] += 1
            self.lock.notify_all()
        return CountedLease(memoryview(self.data[key]), self, key)

    def all_keys(self) -> list[bytes]:
        return list(self.data)

    def await_leased(self, holds: Callable[[int], bool], seconds: float = 20.0) -> bool:
        """Whether ``holds`` accepts the number of leases within that time."""
        with self.lock:
            return self.lock.wait_for(lambda: holds(sum(self.leases.values())), seconds)

    @property
    def num_leased(self) -> int:
        with self.lock:
            return sum(self.leases.values())


def send_transfer(
    transfers: Transfers, name: str, indices: Sequence[int], *job_ids: int, held: str = ""
) -> None:
    """Announce a transfer and its chunks. It is complete once the stores ``job_ids`` have ended."""
    transfers.apply([TransferUpdate(name)])
    transfers.apply([TransferUpdate(name, tuple(KEYS[i] for i in indices))])
    transfers.apply([TransferUpdate(name, (), frozenset(job_ids), held)])


def bit_by_bit() -> socket.socket:
    """A listener whose connections send little at a time: the rest waits in the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


@contextmanager
def serving(
    chunks: HeldChunks | Chunks,
    *,
    ranks: Sequence[PartGeometries] = (PARTS,),
    rank: int = 0,
    limits: Limits | None = None,
    namespace: str = "default",
    hash_key: bytes | None = None,
    engine_id: str = "engine",
    port: int = 0,
    transfers: Transfers | None = None,
    listener: socket.socket | None = None,
    **more: Any,
) -> Iterator[PeerServer]:
    """A peer server on a free port; when it ends, nothing is leased any more."""
    transfers = transfers or Transfers(chunks, 0, 60.0)
    commands = Commands(
        chunks,
        ranks[rank],
        namespace=namespace,
        sealer=Sealer(hash_key),
        greeting=Greeting(len(ranks), engine_id),
        max_payload_bytes=4096 - 128,
        transfers=transfers,
    )
    listeners = [] if "host_socket" in more else [listener or listen("127.0.0.1", port)]
    server = PeerServer(listeners, commands, limits, **more)
    transfers.on_change = server.recheck_held_commands
    try:
        yield server
    finally:
        assert server.close(5.0)
        transfers.close()
        if isinstance(chunks, HeldChunks):
            assert chunks.num_leased == 0


_SECONDS = 30.0
_ENDED = threading.Event()


@contextmanager
def watched_dials() -> Iterator[None]:
    """While entered, `once_dialled` hears of every dial that ends, well or not."""
    with patch.object(connections, "Task", _Dial):
        yield


class _Dial(Task[ValueT]):
    def settle(self, value: ValueT | None) -> None:
        super().settle(value)
        _ENDED.set()


def once_dialled(holds: Callable[[], bool]) -> None:
    """Ask now, and again whenever somebody has been dialled, until it holds."""
    until = time.monotonic() + _SECONDS
    while True:
        _ENDED.clear()
        if holds():
            return
        assert time.monotonic() < until
        _ENDED.wait(1.0)


CONFIG = RedisTierConfig(url="redis://peers")


def name_of(engine: str, rank: int = 0, num_ranks: int = 1) -> SocketName:
    return SocketName(digest("default"), digest(engine), rank, num_ranks)


def topology(path: Path, own: str = "reader") -> PeerTopology:
    greeting = Greeting(1, own)
    return PeerTopology(CONFIG, (), greeting, Share(0), time.monotonic, HostFolder(path))


def read(
    tier: PeerTier, indices: Sequence[int], seconds: float = 5.0
) -> tuple[ReadResult, list[bytes]]:
    buffers = [bytearray(GEOMETRY.chunk_bytes) for _ in indices]
    keys, views = [chunk_key(i) for i in indices], [memoryview(b) for b in buffers]
    result = tier.read(keys, views, time.monotonic() + seconds)
    return result, [bytes(b) for b in buffers]
