"""Which node of a cluster holds a key (pure)."""

from __future__ import annotations

import binascii
from collections.abc import Mapping

from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.client.conversation import Reply, ReplyLimits
from lmcache_connector.storage.redis.client.dial import is_endpoint

NUM_SLOTS = 16384
# Redis advises clusters of at most 1,000 nodes. A map of 16,384 ranges of one slot, with three
# nodes each, has about as many elements.
MAX_NODES = 1000
SLOTS_LIMITS = ReplyLimits(num_bytes=8 << 20, num_items=1 << 18)

Endpoint = tuple[str, int]


def key_slot(key: bytes) -> int:
    """The hash slot of ``key``: CRC16 (XMODEM) of its hash tag if it has one, modulo 16384.

    Source: the Redis cluster specification, "Key distribution model".
    """
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


def parse_slots(reply: Reply, asked: Endpoint) -> Mapping[int, Endpoint]:
    """The master of each slot, from the reply to ``CLUSTER SLOTS`` of the node ``asked``.

    Raises `WireError` for anything but a map in which each slot has one owner.
    """
    if not isinstance(reply, list):
        raise _bad("no list of slots")
    owners: dict[int, Endpoint] = {}
    nodes: set[Endpoint] = set()
    num_slots = 0
    for entry in reply:
        first, last, node = _parse_range(entry, asked)
        nodes.add(node)
        # So the work is bounded, however many ranges there are.
        num_slots += last + 1 - first
        if num_slots > NUM_SLOTS or len(nodes) > MAX_NODES:
            raise _bad("more slots or nodes than a cluster has")
        owners.update(dict.fromkeys(range(first, last + 1), node))
    return owners


def _parse_range(entry: Reply, asked: Endpoint) -> tuple[int, int, Endpoint]:
    match entry:
        case [int(first), int(last), [bytes() | None as name, int(port), *_], *_] if (
            0 <= first <= last < NUM_SLOTS
        ):
            # No name: the node does not know its own, but it is where the asked one is.
            host = name.decode("ascii", "replace") if name else asked[0]
            if is_endpoint(host, port):
                return first, last, (host, port)
    raise _bad("a slot range that is none")


def _bad(detail: str) -> WireError:
    return WireError(WireFault.OUT_OF_STEP, detail)
