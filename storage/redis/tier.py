"""Chunks in Redis: the tier that instances share.

Threads, all started by the constructor and ended by `RedisTier.close`:

- ``num_connections`` readers share out every load (`redis_reader`);
- as many writers, but one core in two at most, drain the write queue (`redis_writer`).

Nothing here raises for a server's sake: whatever a server does, or does not do, is a miss or a
failed write, counted by reason, and logged once per episode.
"""

from __future__ import annotations

import logging
import os
import random as random_module
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redis import Connection
from redis.exceptions import RedisError, ResponseError

from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.storage.chunk_codec import Sealer
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.circuit_breaker import Backoff, CircuitBreaker
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.counters import Counters
from lmcache_connector.storage.redis.load import ReadPlan, ValueLoad, ValueLoadQueue
from lmcache_connector.storage.redis.reader import Reader
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag
from lmcache_connector.storage.redis.write_queue import OnDone, PendingWrite, WriteQueue
from lmcache_connector.storage.redis.writer import WritePlan, Writer

logger = logging.getLogger(__name__)

# Chunks known to be stored badly, kept to be written anew; the oldest are forgotten.
_MAX_SPOILED = 4096
_POLL_SECONDS = 0.02
# For threads to notice that they are to end, however short the time given.
_CLOSE_GRACE_SECONDS = 0.5


# Misses that speak of the way to the server, not of what it holds.
_LINK_FAULTS = frozenset({"deadline", "unavailable", "closed", "stalled"})


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one load brought. ``hits[i]``: chunk i is there, every byte verified. ``seconds``: how
    long it took. ``cut_off``: chunks are left out because the servers were too slow or broke."""

    hits: list[bool]
    seconds: float
    cut_off: bool


@dataclass(frozen=True)
class RedisTierStats:
    """Counts since the start; ``queued_bytes`` and ``servers`` are of now."""

    chunks_hit: int
    chunks_missed: int
    bytes_read: int
    # Misses by reason, e.g. ``missing``, ``bad_checksum``, ``forged_tag``, ``deadline``.
    misses: Mapping[str, int]
    chunks_written: int
    chunks_already_there: int
    # Left to the instance that was already writing them.
    chunks_claimed_elsewhere: int
    # Given up because the queue was full, or because the server refuses writes for now.
    chunks_dropped: int
    chunks_failed: int
    bytes_written: int
    queued_bytes: int
    # ``(node, circuit state)``.
    servers: tuple[tuple[str, str], ...]
    writes_paused: bool


class RedisTier:
    """One rank's chunks in Redis. ``write_shards``: the KV heads of ``geometry.shards`` this rank
    writes, all when None; heads that several ranks hold are written by one of them.
    Thread-safe."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometry: ChunkGeometry,
        write_shards: tuple[int, ...] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        """Returns at once; connections are made in the background. Raises ``ValueError`` where
        ``geometry`` has no place in the value format."""
        stripes = geometry.stripes(config.max_payload_bytes)
        sealer = Sealer(config.hash_key)
        self._config = config
        self._geometry = geometry
        self._clock = clock
        self._counters = Counters()
        self._misses = Counters()
        self._spoiled = _RecentKeys(_MAX_SPOILED)
        self._topology = make_topology(config, clock)
        self._servers = Servers(config, self._topology, clock, random, greet=_warn_of_noeviction)
        self._pause = CircuitBreaker(
            Backoff(config.backoff_min_seconds, config.backoff_max_seconds, random), clock
        )
        self._read_plan = _read_plan(config, geometry, sealer)
        self._loads = ValueLoadQueue()
        self._queue = WriteQueue(config.write_queue_bytes, clock)
        readers = [
            Reader(
                f"lmc-redis-read-{i}",
                self._servers,
                self._loads,
                sealer,
                self._counters,
                self._spoiled.add,
            )
            for i in range(config.num_connections)
        ]
        mine = geometry.shards if write_shards is None else write_shards
        self._writes_anything = bool(mine)
        write_plan = WritePlan(
            geometry=geometry,
            stripes=tuple(stripe for stripe in stripes if stripe.shard in mine),
            namespace=config.namespace,
            ttl_options=config.ttl_options,
            claim_options=(b"NX", b"PX", b"%d" % round(config.claim_seconds * 1000)),
        )
        self._writers = [
            Writer(
                f"lmc-redis-write-{i}",
                self._servers,
                self._queue,
                write_plan,
                sealer,
                self._counters,
                self._pause,
                self._spoiled.discard,
            )
            for i in range(_num_writers(config.num_connections))
        ]
        self._threads: list[threading.Thread] = [*readers, *self._writers]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"RedisTier({self._config.address}, namespace={self._config.namespace!r})"

    @property
    def geometry(self) -> ChunkGeometry:
        return self._geometry

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
    ) -> list[bool]:
        """Fetch consecutive chunks of one prompt.

        ``keys``: 32 bytes each. ``buffers``: for each key ``geometry.chunk_bytes`` writable bytes;
        received in place, so what is not a hit holds rubbish afterwards. ``deadline``: a reading
        of the clock (seconds, ``time.monotonic`` unless told) past which this does not wait.

        Per key: True when every byte is verified. After the first False the rest is not worth
        fetching and may be either. Blocks; touches no buffer once it has returned.
        """
        return self.fetch(keys, buffers, deadline, cancelled).hits

    def fetch(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
    ) -> Fetched:
        """`get_into`, and what it says about the servers' speed."""
        self._check_sizes(keys, buffers)
        started = self._clock()
        hits, reasons = self._fetch(keys, buffers, Deadline(deadline, self._clock, cancelled))
        for reason in reasons:
            self._misses.add(reason)
        self._counters.add("chunks_hit", sum(hits))
        self._counters.add("chunks_missed", len(hits) - sum(hits))
        return Fetched(hits, self._clock() - started, not _LINK_FAULTS.isdisjoint(reasons))

    def _fetch(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], limit: Deadline
    ) -> tuple[list[bool], list[str]]:
        """Per key whether it is there, and for each that is not the reason."""
        nodes = self._locate(keys, limit)
        if nodes is None:
            return [False] * len(keys), ["unavailable"] * len(keys)
        usable = next((i for i, n in enumerate(nodes) if self._servers.is_open(n)), len(keys))
        load = ValueLoad(self._read_plan, keys[:usable], buffers[:usable], nodes[:usable], limit)
        if usable and self._loads.add(load):
            load.wait()
        left = len(keys) - usable
        return load.results() + [False] * left, load.miss_reasons() + ["unavailable"] * left

    def put(self, key: bytes, buffer: memoryview, on_done: OnDone, order: int = 0) -> bool:
        """Write a chunk in the background, if there is room. Never blocks.

        ``buffer``: ``geometry.chunk_bytes`` bytes, not to change before ``on_done``, which is
        called exactly once from any thread, maybe before this returns: True when all values this
        rank writes are known to be in Redis. ``order``: the chunk's index in its prompt; when the
        queue is full the deepest chunks are given up first. False when this chunk was.
        """
        self._check_sizes([key], [buffer])
        write = PendingWrite(key, buffer, order, [on_done])
        if not self._writes_anything:
            write.finish(True)
            return True
        if (self._pause.seconds_until_retry() or 0.0) > 0.0:
            dropped = [write]
        else:
            dropped = self._queue.offer(write)
        for victim in dropped:
            self._counters.add("chunks_dropped")
            victim.finish(False)
        return write not in dropped

    def hold_writes(self, until: float) -> None:
        """Leave the machine's cores alone until then, a reading of the clock, as far as that can
        wait: see `WriteQueue.hold`."""
        self._queue.hold(until)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is left to write. Whether that came within ``timeout`` seconds."""
        return self._queue.wait_empty(timeout)

    def close(self, timeout: float) -> bool:
        """Write what can be written within ``timeout`` seconds, drop the rest, end all threads.
        Idempotent. False if a thread had to be left behind (say, in a name look-up); it is a
        daemon and touches no buffer."""
        until = time.monotonic() + timeout
        self._queue.wait_empty(timeout)
        for write in self._queue.close():
            self._counters.add("chunks_dropped")
            write.finish(False)
        for writer in self._writers:
            writer.stop()
        self._loads.close()
        until = max(until, time.monotonic() + _CLOSE_GRACE_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._topology.close()
        return not any(thread.is_alive() for thread in self._threads)

    def stats(self) -> RedisTierStats:
        counts = self._counters.snapshot()
        return RedisTierStats(
            chunks_hit=counts["chunks_hit"],
            chunks_missed=counts["chunks_missed"],
            bytes_read=counts["bytes_read"],
            misses=self._misses.snapshot(),
            chunks_written=counts["chunks_written"],
            chunks_already_there=counts["chunks_already_there"],
            chunks_claimed_elsewhere=counts["chunks_claimed_elsewhere"],
            chunks_dropped=counts["chunks_dropped"],
            chunks_failed=counts["chunks_failed"],
            bytes_written=counts["bytes_written"],
            queued_bytes=self._queue.num_bytes,
            servers=self._servers.states(),
            writes_paused=self._pause.seconds_until_retry() is not None,
        )

    def take_write_times(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each burst of writes since the last call, for metrics."""
        return [burst for writer in self._writers for burst in writer.take_bursts()]

    def _check_sizes(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, {len(buffers)} buffers")
        for key, buffer in zip(keys, buffers, strict=True):
            if len(key) != 32:
                raise ValueError(f"a chunk key has 32 bytes, not {len(key)}")
            if buffer.format != "B" or buffer.nbytes != self._geometry.chunk_bytes:
                raise ValueError(
                    f"a buffer has {self._geometry.chunk_bytes} bytes of format B, "
                    f"not {buffer.nbytes} of {buffer.format}"
                )

    def _locate(self, keys: Sequence[bytes], limit: Deadline) -> list[Node] | None:
        """Where each chunk lives. Waits, at the start only, until that is known."""
        while not self._topology.nodes():
            if limit.remaining() <= 0.0:
                return None
            time.sleep(min(_POLL_SECONDS, limit.remaining()))
        nodes = []
        for key in keys:
            node = self._topology.node_of(chunk_tag(self._config.namespace, key))
            if node is None:
                return None
            nodes.append(node)
        return nodes


def _num_writers(num_connections: int) -> int:
    """A writer mostly computes and copies. On two cores a second one only takes the core on which
    the engine, or a server on this machine, could run."""
    num_cores = os.cpu_count() or 1
    return max(1, min(num_connections, num_cores // 2))


def _read_plan(config: RedisTierConfig, geometry: ChunkGeometry, sealer: Sealer) -> ReadPlan:
    return ReadPlan(
        geometry=geometry,
        stripes=geometry.stripes(config.max_payload_bytes),
        namespace=config.namespace,
        keyed=sealer.keyed,
        verb=b"GETEX" if config.refresh_ttl else b"GET",
        verb_options=config.ttl_options if config.refresh_ttl else (),
    )


def _warn_of_noeviction(connection: Connection) -> None:
    """A server without a memory limit that evicts nothing grows until the machine is out of it."""
    connection.send_command("INFO", "memory")
    try:
        info = connection.read_response()
    except ResponseError:
        return  # not allowed to ask, so nothing to say
    if not isinstance(info, bytes):
        raise RedisError("an unexpected answer to INFO")
    facts = dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)
    if facts.get(b"maxmemory") == b"0" and facts.get(b"maxmemory_policy") == b"noeviction":
        logger.warning(
            "this redis server has no maxmemory and the policy noeviction: cached chunks will fill "
            "its memory. Set maxmemory and maxmemory-policy allkeys-lru, or redis_ttl_seconds."
        )


class _RecentKeys:
    """A bounded set that forgets the oldest. Thread-safe."""

    def __init__(self, max_size: int) -> None:
        self._keys: dict[bytes, None] = {}
        self._max_size = max_size
        self._lock = threading.Lock()

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key] = None
            if len(self._keys) > self._max_size:
                del self._keys[next(iter(self._keys))]

    def discard(self, key: bytes) -> bool:
        """Whether ``key`` was in it."""
        with self._lock:
            return self._keys.pop(key, self) is None
