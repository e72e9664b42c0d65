"""Tells an llm-d router which chunks are in the Redis that instances share, for all of them.

vLLM publishes an instance's KV cache events under the topic ``kv@POD@MODEL``. Chunks in Redis then
earn credit for that pod alone, though every instance can load them. llm-d's routers know pools:
events under ``kv@pool:NAME@MODEL`` are credited to every candidate. This relay publishes events of
Redis (medium ``STORAGE``, locality ``REMOTE``) under the pool's topic, each block once however many
instances report it, and all others unchanged.

    python -m examples.routers.pool_relay --pool redis --to tcp://router:5557 tcp://*:5557

takes events from instances whose ``--kv-events-config`` says ``"endpoint":"tcp://RELAY:5557"``. An
address with ``*`` is bound, any other one is connected to. Needs pyzmq and msgspec, as vLLM does.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

logger = logging.getLogger("pool_relay")

MAX_BLOCKS = 1 << 20
"""Blocks remembered, so that each is published once: some 100 MB."""
MAX_TOPICS = 1024
_MAX_MESSAGE_BYTES = 64 << 20
_POLL_MILLISECONDS = 100
_RUBBISH = (ValueError, LookupError, TypeError, RecursionError, msgspec.DecodeError)
Frames = list[bytes]
"""Topic, sequence number (8 bytes, big-endian), a batch of events as msgpack."""


class Pool:
    """The blocks known to be in Redis, and their events. ``name`` has no ``@``."""

    def __init__(self, name: str, max_blocks: int = MAX_BLOCKS) -> None:
        self._name = name
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[str, Any], None] = OrderedDict()
        self._sent: dict[bytes, int] = {}  # messages by topic

    def split(self, frames: Frames) -> Iterator[Frames]:
        """The messages to publish instead of this one. Raises one of ``_RUBBISH`` unless it is a
        batch of events under a topic ``kv@POD@MODEL``."""
        topic, _, payload = frames
        start, _, model = topic.decode().split("@", 2)
        batch = msgspec.msgpack.decode(payload)
        if start != "kv" or not isinstance(batch, list) or not isinstance(batch[1], list):
            raise ValueError("not a batch of KV cache events")
        pooled = [event for event in batch[1] if _is_in_redis(event)]
        if not pooled:
            yield frames
            return
        pool_topic = f"kv@pool:{self._name}@{model}".encode()
        if pool_topic not in self._sent and len(self._sent) >= MAX_TOPICS:
            raise ValueError("too many models")
        own = [event for event in batch[1] if not _is_in_redis(event)]
        news = [event for event in pooled if self._is_news(model, event)]
        # Empty batches, too: a gap in a pod's sequence numbers would count as a loss.
        yield [topic, frames[1], msgspec.msgpack.encode([batch[0], own, *batch[2:]])]
        if news:
            number = self._sent.get(pool_topic, 0)
            self._sent[pool_topic] = number + 1
            encoded = msgspec.msgpack.encode([batch[0], news])
            yield [pool_topic, number.to_bytes(8, "big"), encoded]

    def _is_news(self, model: str, event: dict[str, Any]) -> bool:
        """Whether the event is new. Removals always are: this relay may have missed the store."""
        blocks = [(model, name) for name in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            for block in blocks:
                self._blocks.pop(block, None)
            return True
        is_news = any(block not in self._blocks for block in blocks)
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return is_news


def relay(sources: Sequence[str], target: str, pool: Pool, stop: threading.Event) -> None:
    """Runs until ``stop`` is set. Messages that are no batch of events are logged and dropped."""
    context = zmq.Context()
    taking, giving = context.socket(zmq.SUB), context.socket(zmq.PUB)
    try:
        taking.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        taking.setsockopt(zmq.SUBSCRIBE, b"kv@")
        for source in sources:
            _open(taking, source)
        _open(giving, target)
        while not stop.is_set():
            if taking.poll(_POLL_MILLISECONDS):
                _pass_on(taking.recv_multipart(), giving, pool)
    finally:
        taking.close(linger=0)
        giving.close(linger=1000)
        context.term()


def _pass_on(frames: Frames, giving: zmq.Socket[bytes], pool: Pool) -> None:
    try:
        messages = list(pool.split(frames))
    except _RUBBISH as error:
        logger.warning("Dropped a message that is not a batch of events: %s", error)
        return
    for message in messages:
        giving.send_multipart(message)


def _is_in_redis(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("type") in ("BlockStored", "BlockRemoved")
        and event.get("medium") == "STORAGE"
        and event.get("locality") == "REMOTE"
    )


def _open(socket: zmq.Socket[bytes], address: str) -> None:
    if "*" in address:
        socket.bind(address)
    else:
        socket.connect(address)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", help="where instances publish, or tcp://*:5557")
    parser.add_argument("--to", required=True, help="the router's zmqEndpoint")
    parser.add_argument("--pool", default="redis", help="the pool's name")
    arguments = parser.parse_args()
    if not arguments.pool or "@" in arguments.pool:
        parser.error("--pool: a name without @")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        relay(arguments.sources, arguments.to, Pool(arguments.pool), stop)
    except zmq.ZMQError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
