"""Which chunks of a prompt are in Redis: for the scheduler, which reads none of them.

A question is one multi-key ``EXISTS`` per chunk, all sent at once, one round trip per server.
"""

from __future__ import annotations

import random as random_module
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.storage.geometry import ChunkGeometry, Stripe
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters
from lmcache_connector.storage.redis.resp import command, first_line, is_redirection
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix


@dataclass(frozen=True)
class RedisLookupStats:
    """Counts since the start; ``servers`` is of now."""

    questions: int
    chunks_found: int
    # Questions answered with 0 for want of an answer in time.
    failures: int
    servers: tuple[tuple[str, str], ...]


class RedisLookup:
    """``geometries``: one per rank of the model; a chunk is there only if all values of all ranks
    are. Not thread-safe, but for `stats`: one thread owns it."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: Sequence[ChunkGeometry],
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self._config = config
        self._clock = clock
        self._suffixes = _suffixes(
            s for geometry in geometries for s in geometry.stripes(config.max_payload_bytes)
        )
        self._counters = Counters()
        self._servers = Servers(config, make_topology(config, clock), clock, random)
        self._links = Connections(self._servers, config.read_timeout_seconds)

    def __repr__(self) -> str:
        return f"RedisLookup({self._config.address}, namespace={self._config.namespace!r})"

    def exists_prefix(
        self, keys: Sequence[bytes], deadline: float, cancelled: Callable[[], bool] = never
    ) -> int:
        """How many leading chunks are wholly in Redis; 0 on any trouble or past ``deadline`` (a
        reading of the clock, seconds). Blocks until then at most, but for a connection that has to
        be made first: see `tend`."""
        if not keys:
            return 0
        self._links.refresh()
        self._counters.add("questions")
        counts = self._ask(keys, Deadline(deadline, self._clock, cancelled))
        if counts is None:
            self._counters.add("failures")
            return 0
        wanted = len(self._suffixes)
        found = next((i for i, count in enumerate(counts) if count != wanted), len(counts))
        self._counters.add("chunks_found", found)
        return found

    def tend(self) -> None:
        """Connect ahead of need."""
        self._links.tend()

    def close(self) -> None:
        self._links.close()
        self._servers.topology.close()

    def stats(self) -> RedisLookupStats:
        counts = self._counters.snapshot()
        return RedisLookupStats(
            questions=counts["questions"],
            chunks_found=counts["chunks_found"],
            failures=counts["failures"],
            servers=self._servers.states(),
        )

    def _ask(self, keys: Sequence[bytes], deadline: Deadline) -> list[int] | None:
        """How many values of each chunk exist, None on any trouble."""
        tags = [chunk_tag(self._config.namespace, key) for key in keys]
        by_node: dict[Node, list[int]] = {}
        for index, tag in enumerate(tags):
            node = self._servers.topology.node_of(tag)
            if node is None:
                return None
            by_node.setdefault(node, []).append(index)
        counts = [0] * len(tags)
        asked: list[tuple[Node, Wire]] = []
        try:
            for node, indices in by_node.items():
                asked.append((node, self._links.get(node)))
                question = b"".join(self._command(tags[i]) for i in indices)
                asked[-1][1].send([question], deadline)
            for node, wire in asked:
                for index in by_node[node]:
                    counts[index] = _number(wire.receive_line(deadline))
                self._links.succeeded(node)
        except UnavailableError:
            self._drop_all(asked, "another server is unavailable", blame=False)
            return None
        except WireError as error:
            self._drop_all(asked, str(error), blame=error.is_servers_fault)
            return None
        return counts

    def _drop_all(self, asked: Sequence[tuple[Node, Wire]], detail: str, *, blame: bool) -> None:
        """Answers may still be on the way on any of them."""
        for node, _ in asked:
            self._links.drop(node, detail, blame=blame)

    def _command(self, tag: bytes) -> bytes:
        return command(b"EXISTS", *(tag + suffix for suffix in self._suffixes))


def _suffixes(stripes: Iterable[Stripe]) -> tuple[bytes, ...]:
    """Ranks that hold the same head hold the same values: ask once."""
    return tuple(dict.fromkeys(stripe_suffix(stripe) for stripe in stripes))


def _number(line: bytes) -> int:
    if line[:1] == b":" and line[1:].isdigit():
        return int(line[1:])
    raise WireError("bad_reply", first_line(line), is_servers_fault=not is_redirection(line))
