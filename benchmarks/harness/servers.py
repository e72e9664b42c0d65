"""Valkey servers for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.redis import servers
from tests.support.redis.servers import CACHE, Server

_FILLER = bytes(512 << 10)
_FILLERS_PER_MIB = (1 << 20) // len(_FILLER)


@contextmanager
def running_valkey(mib: int) -> Iterator[Server]:
    """An empty Valkey with ``mib`` of memory, which evicts the least recently used values: out of
    10 samples, since out of 5, its default, it also evicts some that were written a minute ago."""
    settings = {"maxmemory": f"{mib}mb", "maxmemory-samples": "10"}
    with servers.running_valkey(CACHE | settings) as server:
        yield server


@contextmanager
def warm_valkey(mib: int = 1024) -> Iterator[Server]:
    """A Valkey as after days of service: full, so that new values replace old ones.

    A new Valkey has to get memory from the system page by page. In a virtual machine that costs
    several times as much as writing a value (here 5 ms instead of 0.5 ms per MiB), but only once:
    it says nothing about the cost of a cache.

    A benchmark's values must fit into ``mib``: the fillers are evicted first.
    """
    with running_valkey(mib) as server:
        with server.client() as client:
            for number in range(mib * _FILLERS_PER_MIB):
                client.set(f"filler:{number}", _FILLER)
            assert client.info("stats")["evicted_keys"] > 0, "it is not full"
        yield server
