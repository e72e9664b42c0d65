"""Engines of this host, which find each other in a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.host import HostFolder, SocketName, digest
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_readers import ReadResult
from tests.support.redis.chunks import GEOMETRY, chunk_key

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
