"""A read's buffers belong to it until no reader is inside."""

from __future__ import annotations

import threading
import time

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig, ValuePlan
from lmcache_connector.storage.redis.pending_read import PendingRead
from lmcache_connector.storage.redis.topology import Node

GEOMETRY = ChunkGeometry(16, 0, (8, 8), (0,), 1, "uint8")


def test_a_read_whose_time_is_over_waits_for_the_readers_inside() -> None:
    plan = ValuePlan(RedisTierConfig(url="redis://nowhere"), PartGeometries((GEOMETRY,)))
    buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
    over = Deadline(time.monotonic(), time.monotonic)
    read = PendingRead(plan, [bytes(32)], [buffer], [Node("a")], over)
    waiting = threading.Thread(target=read.wait, daemon=True)
    with read.reading() as is_inside:
        assert is_inside
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "a reader may still receive into the buffer"
    waiting.join(10.0)
    assert not waiting.is_alive()
    with read.reading() as is_inside:
        assert not is_inside
