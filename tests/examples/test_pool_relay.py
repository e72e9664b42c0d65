"""Events of several instances as a router gets them through the relay, over real sockets.

Publishers and schema are vLLM's own; topics and fields are those that llm-d's router reads
(pkg/kvevents/engineadapter/vllm_msgpack.go and pkg/kvcache/kvblock/pseudo_pod.go of
llm-d/llm-d-router).
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
from lmcache_connector.kv_events.log import BlockRun, BlocksRemoved, BlocksStored
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
    return to_vllm(BlocksStored(tier, run))


def removed(tier: Tier, *indices: int) -> Any:
    return to_vllm(BlocksRemoved(tier, tuple(map(block, indices))))


def frames(*events: Any, topic: str = f"kv@pod-a@{MODEL}", number: int = 0) -> list[bytes]:
    """A message as vLLM sends it."""
    payload = msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=list(events)))
    return [topic.encode(), number.to_bytes(8, "big"), payload]


def told(pool: Pool, *events: Any) -> list[tuple[str, list[Any]]]:
    """Topics and events of the messages instead of one with ``events``."""
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    return [
        (message[0].decode(), decoder.decode(message[2]).events)
        for message in pool.split(frames(*events))
    ]


def test_a_block_is_told_of_once() -> None:
    """Else a router that counts who has it would never believe that it is gone."""
    pool = Pool("redis")
    assert told(pool, stored(Tier.REDIS, 1))[1:] == [(POOL, [stored(Tier.REDIS, 1)])]
    assert told(pool, stored(Tier.REDIS, 1))[1:] == []
    assert told(pool, removed(Tier.REDIS, 1))[1:] == [(POOL, [removed(Tier.REDIS, 1)])]
    assert told(pool, stored(Tier.REDIS, 1))[1:] == [(POOL, [stored(Tier.REDIS, 1)])]


def test_an_event_has_what_routers_read() -> None:
    """The map-encoded form of vLLM since its #42892, by llm-d's names and types."""
    (_, message) = Pool("redis").split(frames(stored(Tier.REDIS, 1, 2)))
    timestamp, (event,) = msgspec.msgpack.decode(message[2])
    assert isinstance(timestamp, float)
    assert event["type"] == "BlockStored"
    assert event["medium"] == "STORAGE"  # llm-d's tier "storage"
    assert event["locality"] == "REMOTE"
    # A u64 or up to 64 bytes, as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES says.
    assert all(0 <= name < 1 << 64 for name in event["block_hashes"])
    assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
    assert event["group_idx"] == 0


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


def test_two_instances_are_heard_through_it(router: Any) -> None:
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
        while not wanted <= heard.keys():  # a publisher's first messages find no subscriber
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
