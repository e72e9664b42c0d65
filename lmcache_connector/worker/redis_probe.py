"""Measures Redis without a request that waits.

The probe writes a few chunks of random numbers once, and reads them for every measurement: first
one, then all, to tell latency from bandwidth. Instances with the same model and namespace share
the chunks, which compress about as well as KV. Redis may evict them like any value: missing chunks
are written again before the measurement. Where writing is not allowed, the probe only finds out
whether Redis answers.

One thread, off the engine's steps, reads through the tier as loads do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.plans import Fetched, Tier
from lmcache_connector.threads import Background, Task

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.storage.redis.value_readers import ReadResult

_MAX_BYTES = 16 << 20
_READ_SECONDS = 1.0
"""For each of the two reads. A server that delivers no chunk in a second loses to compute."""
_CONNECT_SECONDS = 0.5
"""The tier connects shortly after the start."""
_RETRY_SECONDS = 0.01
_WRITE_SECONDS = 10.0
_NUM_CHUNKS = 8


def probe_keys(config: ConnectorConfig, root: Mapping[str, object]) -> list[bytes]:
    """Keys of the chunks that measure Redis for the model named by ``root``; none if every hit is
    loaded anyway.

    The chunks are noise of the right size, so instances with other weights may share them, unless
    they write values in another form.
    """
    if config.compute_or_load == "always":
        return []
    hasher = PrefixHasher(root, config.chunk_size, config.hash_key_bytes)
    form = {"codec": "blosc2"} if config.redis_codec == "blosc2" else {}
    return [hasher.root_key({"probe": i, **form}) for i in range(_NUM_CHUNKS)]


class RedisProbe:
    """Measures on request, and once at start; only with a ``tier`` and ``keys``.

    ``keys``: chunks of one part to read, the same in every instance of the model; as many are used
    as 16 MiB hold. ``clock`` is monotonic, in seconds. ``has_updates``: whether :meth:`take` has
    something to return; a plain attribute, cheap to poll every step.
    """

    def __init__(
        self,
        tier: RedisTier | None,
        keys: Sequence[bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys: list[bytes] = []
        self._clock = clock
        self.has_updates = False
        self._closed = threading.Event()
        self._background = Background("lmc-probe")
        self._task: Task[tuple[Fetched, ...]] = Task()
        self._task.settle(None)
        if tier is not None and keys:
            self._tier = tier
            geometry = tier.geometries.of(keys[0])
            self._chunk_bytes, self._dtype = geometry.chunk_bytes, geometry.dtype
            self._keys = list(keys[: max(1, _MAX_BYTES // self._chunk_bytes)])
            self.request()

    def request(self) -> None:
        """Measure soon, unless a measurement is under way."""
        if self._keys and not self.is_busy:
            self._task = self._background.submit(self._measure, self._note_end)

    @property
    def is_busy(self) -> bool:
        return not self._task.is_done

    def take(self) -> tuple[Fetched, ...]:
        """Measurements since the last call, larger reads first. One of 0 bytes that has not failed:
        Redis answers, but had nothing to read."""
        if not self._task.is_done:
            return ()
        self.has_updates = False
        result, self._task.value = self._task.value, None
        return result or ()

    def first(self, seconds: float) -> tuple[Fetched, ...]:
        """The first measurement; while under way, a failure that took ``seconds``. Never waits."""
        return (Fetched(Tier.REDIS, 0, seconds, True),) if self.is_busy else self.take()

    def close(self, seconds: float) -> None:
        """Bounded: a read ends at its deadline, or when the probe closes."""
        self._closed.set()
        self._background.close(seconds)

    def _note_end(self) -> None:
        self.has_updates = True

    def _measure(self) -> tuple[Fetched, ...]:
        started = self._clock()
        one = self._read_once_connected(started + _CONNECT_SECONDS)
        many, missing = self._read_all(one)
        if missing and self._write(missing):
            self._read(len(self._keys))  # reconnect: the misses have cost the connections
            one = self._read(1)
            many, missing = self._read_all(one)
        if one.cut_off:
            return (Fetched(Tier.REDIS, 0, self._clock() - started, True),)
        of_one = Fetched(Tier.REDIS, self._chunk_bytes * one.hits[0], one.seconds)
        # Asking for missing chunks took time that says nothing of Redis' speed.
        if missing or sum(many.hits) < 2:
            return (of_one,)
        of_many = Fetched(Tier.REDIS, self._chunk_bytes * sum(many.hits), many.seconds)
        if many.seconds <= one.seconds:  # noise hides the bandwidth
            return (of_many,)
        return of_many, of_one

    def _read_once_connected(self, until: float) -> ReadResult:
        """Read the first chunk, waiting for the first connection."""
        while True:
            one = self._read(1)
            is_late = self._closed.is_set() or self._clock() >= until
            if one.hits[0] or not one.cut_off or is_late:
                return one
            self._closed.wait(_RETRY_SECONDS)

    def _read_all(self, one: ReadResult) -> tuple[ReadResult, list[int]]:
        """Read all chunks if the first was there. Also returns which chunks are missing."""
        many = self._read(len(self._keys)) if one.hits[0] and len(self._keys) > 1 else one
        if many.cut_off:
            return many, []
        hits = [*many.hits, *[False] * (len(self._keys) - len(many.hits))]
        return many, [i for i, hit in enumerate(hits) if not hit]

    def _read(self, count: int) -> ReadResult:
        buffers = [memoryview(bytearray(self._chunk_bytes)) for _ in range(count)]
        deadline = self._clock() + _READ_SECONDS
        return self._tier.read(self._keys[:count], buffers, deadline, self._closed.is_set)

    def _write(self, missing: Sequence[int]) -> bool:
        """Write these chunks, also over corrupt values. False if Redis took none, or some write did
        not end within 10 s or before the probe was closed."""
        stored: list[bool] = []
        for i in missing:
            if self._closed.is_set():  # a write queued now would delay the tier's close
                return False
            self._tier.put(self._keys[i], _noise(self._dtype, self._chunk_bytes), stored.append)
        until = self._clock() + _WRITE_SECONDS
        while len(stored) < len(missing):
            if self._closed.wait(_RETRY_SECONDS) or self._clock() >= until:
                return False
        return any(stored)


def _noise(dtype: str, num_bytes: int) -> memoryview:
    """Normally distributed numbers: their exponents compress as a model's do."""
    kind: torch.dtype = getattr(torch, dtype)
    count = num_bytes // kind.itemsize
    numbers = torch.randn(count) if kind.is_floating_point else torch.randint(0, 127, (count,))
    noise = torch.zeros(num_bytes, dtype=torch.uint8)
    noise[: count * kind.itemsize] = numbers.to(kind).view(torch.uint8)
    return memoryview(noise.numpy())
