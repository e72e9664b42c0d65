"""Events of several instances through the relay to a router, over real sockets.

Publishers and schema are vLLM's own; topics are those that llm-d's router reads.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from examples.routers.pool_relay import Pool, relay
from lmcache_connector.kv_events.log import BlockRun, KvEvent
from lmcache_connector.kv_events.vllm_events import to_vllm
from lmcache_connector.plans import Tier
from tests.support.redis.servers import free_port

MODEL = "some/model"
POOL = f"kv@pool:redis@{MODEL}"
PATIENCE_SECONDS = 20.0


def block(index: int) -> bytes:
    return index.to_bytes(32, "big")


def stored(tier: Tier, *indices: int) -> Any:
    run = BlockRun(
        tuple(map(block, indices)), None, array("I", range(16 * len(indices))), block_size=16
    )
    return to_vllm(KvEvent(tier, run, is_stored=True))


@contextmanager
def running_relay(source: str, target: str) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=relay, args=([source], target, Pool("redis"), stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def router() -> Iterator[Any]:
    """A router's socket, bound as llm-d's ``zmqEndpoint``, and its port."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, port
        socket.close(linger=0)


def test_it_relays_two_instances(router: Any) -> None:
    socket, port = router
    entry = free_port()
    publishers = [
        ZmqEventPublisher(0, f"tcp://127.0.0.1:{entry}", topic=f"kv@{pod}@{MODEL}")
        for pod in ("pod-a", "pod-b")
    ]
    heard: dict[str, list[Any]] = {}
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    wanted = {f"kv@pod-a@{MODEL}", f"kv@pod-b@{MODEL}", POOL}
    with running_relay(f"tcp://*:{entry}", f"tcp://127.0.0.1:{port}"):
        until, number = time.monotonic() + PATIENCE_SECONDS, 0
        while not wanted <= heard.keys():  # the first messages find no subscriber
            assert time.monotonic() < until, heard
            number += 1
            for publisher in publishers:
                both = [stored(Tier.CPU, number), stored(Tier.REDIS, number)]
                publisher.publish(KVEventBatch(ts=1.0, events=both))
            while socket.poll(50):
                topic, _, payload = socket.recv_multipart()
                heard.setdefault(topic.decode(), []).extend(decoder.decode(payload).events)
        socket.setsockopt(zmq.RCVTIMEO, 100)
    for publisher in publishers:
        publisher.shutdown()
    assert {event.medium for event in heard[POOL]} == {"STORAGE"}
    names = [name for event in heard[POOL] for name in event.block_hashes]
    assert len(names) == len(set(names))
    for topic in wanted - {POOL}:
        assert {event.medium for event in heard[topic]} == {"CPU"}
