"""Tells the scheduler which chunks of a prompt are in Redis, without reading them.

A look-up sends one multi-key ``EXISTS`` per chunk, all at once: one round trip per server.
"""

from __future__ import annotations

import random as random_module
import time
from collections.abc import Callable, Sequence

from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.resp import command, first_line, is_redirection
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix


class RedisLookup:
    """``geometries``: one per rank of the model. A chunk is there only if all values of all ranks
    are. ``clock`` returns seconds, ``random`` numbers in [0, 1).

    One thread owns it; only `servers` may be called from others.
    """

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
        stripes = [s for g in geometries for s in g.stripes(config.max_payload_bytes)]
        # Each suffix once: ranks that hold the same head hold the same values.
        self._suffixes = tuple(dict.fromkeys(map(stripe_suffix, stripes)))
        self._servers = Servers(config, make_topology(config, clock), clock, random)
        self._connections = Connections(self._servers, config.read_timeout_seconds)

    def __repr__(self) -> str:
        return f"RedisLookup({self._config.address}, namespace={self._config.namespace!r})"

    def exists_prefix(
        self, keys: Sequence[bytes], deadline: float, cancelled: Callable[[], bool] = never
    ) -> int:
        """The number of leading chunks that are wholly in Redis; 0 on any trouble.

        ``deadline`` is a reading of the clock, in seconds. Blocks until then at most, unless a
        connection has to be made first: see `tend`.
        """
        if not keys:
            return 0
        self._servers.refresh()
        counts = self._ask(keys, Deadline(deadline, self._clock, cancelled))
        wanted = len(self._suffixes)
        return next((i for i, count in enumerate(counts) if count != wanted), len(counts))

    def tend(self) -> None:
        """Connect ahead of need."""
        self._connections.tend()

    def close(self) -> None:
        self._connections.close()
        self._servers.topology.close()

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        """The servers asked so far, and the states of their circuits. Thread-safe."""
        return self._servers.states()

    def _ask(self, keys: Sequence[bytes], deadline: Deadline) -> list[int]:
        """The number of existing values of each chunk; empty on any trouble."""
        tags = [chunk_tag(self._config.namespace, key) for key in keys]
        by_node: dict[Node, list[int]] = {}
        for index, tag in enumerate(tags):
            node = self._servers.topology.node_of(tag)
            if node is None:
                return []
            by_node.setdefault(node, []).append(index)
        counts = [0] * len(tags)
        asked: list[tuple[Node, Wire]] = []
        try:
            for node, indices in by_node.items():
                asked.append((node, self._connections.get(node)))
                names = [[tags[i] + suffix for suffix in self._suffixes] for i in indices]
                question = b"".join(command(b"EXISTS", *each) for each in names)
                asked[-1][1].send([question], deadline)
            for node, wire in asked:
                for index in by_node[node]:
                    counts[index] = _number(wire.receive_line(deadline))
                self._connections.succeeded(node)
        except UnavailableError:
            self._drop_all(asked, "another server is unavailable", blame=False)
            return []
        except WireError as error:
            self._drop_all(asked, str(error), blame=error.is_peers_fault)
            return []
        return counts

    def _drop_all(self, asked: Sequence[tuple[Node, Wire]], detail: str, *, blame: bool) -> None:
        """Drop all connections that an answer may still come on."""
        for node, _ in asked:
            self._connections.drop(node, detail, blame=blame)


def _number(line: bytes) -> int:
    if line[:1] == b":" and line[1:].isdigit():
        return int(line[1:])
    is_peers_fault = not is_redirection(line)
    raise WireError(WireFault.OUT_OF_STEP, first_line(line), is_peers_fault=is_peers_fault)
