"""Hostile and slow peers: the server goes on serving the others, a reader has a miss."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from lmcache_connector.peers.commands import Reply
from lmcache_connector.peers.server import Limits, PeerServer
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.dial import Client, take_socket
from tests.peers.test_server import dial, get, name, url
from tests.peers.test_tier import at, reading, topology_of
from tests.support.peers import CountedLease, HeldChunks, bit_by_bit, once_dialled, read, serving
from tests.support.redis.chunks import GEOMETRY, PARTS, chunk_data, chunk_key

BIG = replace(GEOMETRY, layer_widths=(1 << 16,) * 4)  # 8 MiB a chunk, 4 MiB a value
BIG_PARTS = PartGeometries((BIG,))


def big_chunks(count: int) -> HeldChunks:
    return HeldChunks(range(count), BIG_PARTS)


def read_value(sock: socket.socket, num_bytes: int) -> bool:
    """Whether ``num_bytes`` come in time."""
    while num_bytes > 0:
        try:
            data = sock.recv(min(num_bytes, 1 << 20))
        except TimeoutError:
            return False
        if not data:
            return False
        num_bytes -= len(data)
    return True


@contextmanager
def lying(indices: Sequence[int]) -> Iterator[PeerServer]:
    """A server whose values have right headers and wrong payloads."""
    with serving(HeldChunks(indices)) as server:
        queue = server._queue

        def lie(connection: Any, reply: Reply) -> None:
            if reply.lease is not None:
                line, header, payload, end = reply.parts
                reply = replace(reply, parts=(line, header, bytes(len(payload)), end))
            queue(connection, reply)

        server._queue = lie  # type: ignore[method-assign]
        yield server


# -- the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [19, 5000])
def test_a_range_of_many_digits_holds_no_chunk(digits: int) -> None:
    """Python reads no number of more than 4300 digits."""
    chunks = HeldChunks(range(2))
    with serving(chunks) as server, redis.Redis.from_url(url(server), protocol=2) as client:
        for place in (("0", "9" * digits), ("9" * digits, "0")):
            with pytest.raises(redis.ResponseError, match="none negative"):
                client.execute_command("GETRANGE", name(0), *place)
        assert client.getrange(name(0), 0, 3) == b"LMCV"
        assert chunks.await_leased(lambda count: count == 0)


class GatedChunks(HeldChunks):
    """A lease of a chunk that is not held blocks the server until the gate opens."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count), BIG_PARTS)
        self.is_waiting, self.gate = threading.Event(), threading.Event()
        self.order: list[bytes] = []

    def lease(self, key: bytes) -> CountedLease | None:
        self.order.append(key)
        if key not in self.data:
            self.is_waiting.set()
            assert self.gate.wait(20.0)
        return super().lease(key)


def test_a_client_deferred_for_leases_is_served_after_others_end() -> None:
    """In one turn leases reach their limit, a client is deferred, and leases end."""
    chunks = GatedChunks(4)
    limits = Limits(leased_bytes=12 << 20, stall_seconds=60.0)
    with (
        serving(chunks, ranks=[BIG_PARTS], limits=limits) as server,
        dial(server, 4096) as other,
        dial(server) as asker,
        dial(server) as holder,
    ):
        leaver = dial(server, 4096)
        leaver.sendall(get(0))
        assert chunks.await_leased(lambda count: count == 1)
        holder.sendall(get(9))
        assert chunks.is_waiting.wait(10.0)
        other.sendall(get(1))  # over the limit
        asker.sendall(get(2))
        leaver.close()
        chunks.gate.set()
        assert read_value(asker, BIG.shard_bytes)


def test_a_client_of_many_commands_takes_turns() -> None:
    """The client reads all replies, so the server could go on serving it alone."""
    chunks = GatedChunks(2)
    chunks.data = {chunk_key(i): chunk_data(i) for i in range(2)}
    with (
        serving(chunks, limits=Limits(unsent_bytes=1 << 14)) as server,
        dial(server) as holder,
        dial(server) as greedy,
        dial(server) as modest,
    ):
        holder.sendall(get(9))
        assert chunks.is_waiting.wait(10.0)
        greedy.sendall(get(0) * 500)
        modest.sendall(get(1))
        reader = threading.Thread(target=read_value, args=(greedy, 500 * GEOMETRY.shard_bytes))
        reader.start()
        chunks.gate.set()
        assert read_value(modest, GEOMETRY.shard_bytes)
        reader.join(20.0)
        assert not reader.is_alive()
    assert chunks.order.index(chunk_key(1)) < 50


def test_trickling_clients_do_not_block_others_by_leases() -> None:
    """Such clients read slowly and hold all leases that the limit allows."""
    chunks, is_over = big_chunks(8), threading.Event()
    limits = Limits(stall_seconds=0.5, leased_bytes=16 << 20)

    def trickle(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(0.002) and sock.recv(40 << 10):
                pass

    listener = bit_by_bit()
    with (
        serving(chunks, ranks=[BIG_PARTS], limits=limits, listener=listener) as server,
        ExitStack() as stack,
    ):
        slow = [stack.enter_context(dial(server, 4096)) for _ in range(2)]
        threads = [threading.Thread(target=trickle, args=(sock,)) for sock in slow]
        for sock, thread in zip(slow, threads, strict=True):
            sock.sendall(get(0) * 8)
            thread.start()
        try:
            assert chunks.await_leased(lambda count: count >= 2)
            asker = stack.enter_context(dial(server))
            asker.sendall(get(1))
            assert read_value(asker, BIG.shard_bytes)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(20.0)


# -- the reader ----------------------------------------------------------------------------------


def test_a_peer_of_wrong_checksums_is_avoided() -> None:
    """No read goes to it for a while; chunks of another peer are hits."""
    with ExitStack() as stack:
        liar = stack.enter_context(lying(range(4)))
        good = stack.enter_context(serving(HeldChunks(range(3))))
        tier = stack.enter_context(reading(at(liar, good)))

        def has_lied() -> bool:
            hits = read(tier, range(4), 1.0)[0].hits[:3]
            return hits == [True] * 3 and tier.counts().misses["bad_checksum"] > 0

        once_dialled(has_lied)  # the peers are dialled in any order
        lied = tier.counts().misses["bad_checksum"]
        for _ in range(5):
            assert read(tier, range(4), 1.0)[0].hits[:3] == [True] * 3
        assert tier.counts().misses["bad_checksum"] == lied


@pytest.mark.parametrize("is_guest", [False, True])
def test_a_peer_is_greeted_and_then_checked(is_guest: bool) -> None:
    asked: list[bytes] = []

    def check(client: Client) -> None:
        asked.append(client.execute_command("EXISTS", "x"))
        (connection,) = client.connection_pool._available_connections
        assert is_guest or connection.is_last, "it is not greeted yet"
        raise TimeoutError("the check")

    with serving(HeldChunks([])) as server:
        topology = topology_of([] if is_guest else at(server))
        topology.prepare()
        node = topology.admit("127.0.0.1", server.port) if is_guest else topology.peers()[0]
        with pytest.raises(TimeoutError, match="the check"):
            topology.connect(node, 4096, check)
    assert len(asked) == 1


@pytest.mark.parametrize("use", [take_socket, lambda client: client.execute_command("PEER")])
def test_a_lost_connection_is_not_redialled_without_a_greeting(
    use: Callable[[Client], object],
) -> None:
    """redis-py would dial again, and take another server at the port for the peer."""
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(serving(HeldChunks([]))).port
        topology = topology_of(at(port))
        topology.prepare()
        (node,) = topology.peers()
        client = stack.enter_context(contextlib.closing(topology.connect(node, 4096)))
        first.close()
        stack.enter_context(serving(HeldChunks([]), port=port, ranks=[PARTS, PARTS]))
        with pytest.raises(redis.ConnectionError, match="the connection was lost"):
            use(client)
