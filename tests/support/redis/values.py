"""The values of chunks in a Redis, as a test sees them: by their names."""

from __future__ import annotations

from tests.support.redis.servers import Server
from tests.support.waits import wait_until


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
    wait_until(lambda: len(value_names(server)) >= least, "the writes did not arrive")
