"""The values of chunks in a Redis, as a test sees them: by their names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from tests.support.redis.servers import Server

_WRITE_SECONDS = 10.0


def value_names(server: Server) -> list[bytes]:
    with server.client() as client:
        return sorted(client.keys("lmc:*-*"))


def values_of(server: Server, tag: bytes) -> list[bytes]:
    """Names of the values of one chunk, by KV head. ``tag``: what their names begin with."""
    with server.client() as client:
        names = client.keys(tag.replace(b"{", b"?").replace(b"}", b"?") + b":*")
    return sorted(names, key=lambda n: n.rsplit(b":", 1)[1])


def wait_for_values(server: Server, least: int) -> None:
    """Writes go to Redis in the background; there are at least as many values as blocks."""
    until = time.monotonic() + _WRITE_SECONDS
    while len(value_names(server)) < least:
        assert time.monotonic() < until, "the writes did not arrive"
        time.sleep(0.02)


def wait_for_chunks(server: Server, keys: Iterable[bytes], num_heads: int) -> None:
    """All values of these chunks are there."""
    wanted, until = {key.hex().encode() for key in keys}, time.monotonic() + _WRITE_SECONDS
    while True:
        found = Counter(name.split(b":")[2].rstrip(b"}") for name in value_names(server))
        if all(found[key] >= num_heads for key in wanted):
            return
        assert time.monotonic() < until, "the writes did not arrive"
        time.sleep(0.02)
