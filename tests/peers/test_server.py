"""A peer server as Redis clients, the Redis tier and strangers see it."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.host import HostFolder, HostSocket, SocketName, digest
from lmcache_connector.peers.server import Limits, PeerServer
from lmcache_connector.storage.chunk_codec import HEADER_BYTES
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.clock import Clock
from tests.support.engines.strangers import SAYINGS, memory_of, talk
from tests.support.peers import HeldChunks, bit_by_bit, serving
from tests.support.redis.chunks import GEOMETRY, chunk_data, chunk_key, config, get_all, open_tier

NUM_CHUNKS = 6
HALVES = [
    PartGeometries((replace(GEOMETRY, shards=(head,)),)) for head in GEOMETRY.shards
]  # two ranks


@pytest.fixture
def chunks() -> HeldChunks:
    return HeldChunks(range(NUM_CHUNKS))


@pytest.fixture
def server(chunks: HeldChunks) -> Iterator[PeerServer]:
    with serving(chunks) as found:
        yield found


def url(server: PeerServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


def name(index: int, layers: str = "0-4", head: int = 0) -> bytes:
    return chunk_tag("default", chunk_key(index)) + f":{layers}:{head}".encode()


# -- readers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"namespace": "another"}, {"hash_key": b"a secret of enough bytes"}]
)
def test_another_namespace_or_key_is_a_miss(
    server: PeerServer, settings: dict[str, object]
) -> None:
    with open_tier(url(server), **settings) as tier:  # type: ignore[arg-type]
        assert get_all(tier, range(2))[0] == [False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_answers_for_its_own_heads(chunks: HeldChunks, rank: int) -> None:
    with (
        serving(chunks, ranks=HALVES, rank=rank) as server,
        redis.Redis.from_url(url(server), protocol=2) as client,
    ):
        own, other = name(0, head=rank), name(0, head=1 - rank)
        assert client.exists(own, other, name(9), name(0, "0-5")) == 1
        assert client.get(own) is not None
        assert client.get(other) is None


def test_many_chunks_are_asked_for_at_once(server: PeerServer) -> None:
    def asked(*words: bytes) -> object:
        with redis.Redis.from_url(url(server), protocol=2) as client:
            return client.execute_command("HOLDS", *words)

    keys = b"".join(map(chunk_key, (0, 9, 5)))
    assert asked(b"default", keys) == b"101"
    assert asked(b"another", keys) == b"000"
    for wrong in ((), (keys,), (b"default", b""), (b"default", keys[1:]), (b"default", keys * 171)):
        with pytest.raises(redis.ResponseError, match="keys"):
            asked(*wrong)


def test_redis_commands_read_values(server: PeerServer) -> None:
    with redis.Redis.from_url(url(server), protocol=2) as client:
        whole = client.get(name(0))
        assert whole[HEADER_BYTES:] == chunk_data(0)[: GEOMETRY.shard_bytes]
        assert client.strlen(name(0)) == len(whole)
        assert client.getrange(name(0), 0, 127) == whole[:128]
        assert client.getrange(name(0), 100, 200) == whole[100:201]
        assert client.getrange(name(9), 0, 127) == b""
        half = client.get(name(0, "1-3", head=1))
        first = GEOMETRY.shard_bytes + GEOMETRY.layer_offsets[1]
        assert half[HEADER_BYTES:] == chunk_data(0)[first : first + GEOMETRY.layer_offsets[2]]
        assert client.pttl(name(0)) == -1
        assert Greeting.parse(client.execute_command("PEER")) == Greeting(1, "engine")
        for impossible in ("2-2", "3-1", "0-5", "4-5"):
            assert client.get(name(0, impossible)) is None
        assert client.get(name(0, head=2)) is None
        assert client.get(b"lmc:{default:xyz}:0-4:0") is None


@pytest.mark.parametrize(
    "words", [("SET", "x", "y"), ("DEL", "x"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")]
)
def test_other_commands_of_redis_are_unknown(server: PeerServer, words: tuple[str, ...]) -> None:
    with redis.Redis.from_url(url(server), protocol=2) as client:
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.execute_command(*words)
        assert client.get(name(0)) is not None


def test_names_are_listed_to_its_user_on_its_host_alone(
    server: PeerServer, chunks: HeldChunks
) -> None:
    with redis.Redis.from_url(url(server), protocol=2) as client:
        for ask in (client.scan, client.dbsize):
            with pytest.raises(redis.ResponseError, match="on the Unix socket only"):
                ask()
    with tempfile.TemporaryDirectory(prefix="lmc-") as short_path:
        folder = HostFolder(Path(short_path) / "host")
        name = SocketName(digest("default"), digest("engine"), 0, 1)
        with (
            serving(chunks, host_socket=HostSocket(folder, name)),
            redis.Redis(unix_socket_path=folder.address(name), protocol=2) as client,
        ):
            assert client.dbsize() == 4 * NUM_CHUNKS
            assert len(set(client.scan_iter(count=5))) == 4 * NUM_CHUNKS
            one = chunk_key(3).hex()
            assert len(set(client.scan_iter(f"lmc:{{default:{one}*"))) == 4
            assert list(client.scan_iter("lmc:{other:*")) == []
            with pytest.raises(redis.ResponseError, match="too long"):
                client.scan(match="*0" * 129)  # one of 256 KiB took seconds to compile


# -- bounds of a client's cost -------------------------------------------------------------------


def dial(server: PeerServer, buffer_bytes: int = 0) -> socket.socket:
    sock = socket.socket()
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.settimeout(10.0)
    sock.connect(("127.0.0.1", server.port))
    return sock


def get(index: int, head: int = 0) -> bytes:
    wanted = name(index, head=head)
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(wanted), wanted)


def is_closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            assert data
    return True


@pytest.mark.parametrize("said", SAYINGS, ids=lambda said: said.replace(" ", "-"))
def test_strangers_cost_little(chunks: HeldChunks, said: str) -> None:
    with serving(chunks, limits=Limits(stall_seconds=0.5)) as server:
        talk(server.port, SAYINGS[said], 50)
        before = memory_of_self()
        for _ in range(4):
            assert talk(server.port, SAYINGS[said], 50) < 64 << 10
        assert memory_of_self() - before < 32 << 20
        with redis.Redis.from_url(url(server), protocol=2) as client:
            assert client.get(name(0)) is not None


def memory_of_self() -> int:
    return memory_of(os.getpid())


def test_a_flood_of_commands_keeps_nobody_waiting_for_all_answers(
    chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client asks during the first answer, and waits for two turns at most."""
    asked: list[bytes] = []

    def exists(index: int) -> bytes:
        return get(index).replace(b"$3\r\nGET", b"$6\r\nEXISTS")

    def holds(key: bytes) -> bool:
        if not asked:
            other.sendall(exists(1))
        asked.append(key)
        return True

    with serving(chunks) as server, dial(server) as flooding, dial(server) as other:
        other.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert other.recv(100) == b"+PONG\r\n"
        monkeypatch.setattr(chunks, "holds", holds)
        flooding.sendall(exists(0) * 500)
        assert other.recv(100) == b":1\r\n"
        assert asked.index(chunk_key(1)) <= 2 * 64


@pytest.mark.parametrize("engine_id", ["engine-0_dp1", "my engine", "moteur à vapeur", "50%2b"])
def test_peers_know_every_engine_id(engine_id: str) -> None:
    assert Greeting.parse(Greeting(2, engine_id).pack()) == Greeting(2, engine_id)


@pytest.mark.parametrize(("may_open", "num_clients"), [(1024, 256), (1 << 20, 1024), (-1, 1024)])
def test_clients_leave_files_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, may_open: int, num_clients: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (may_open, may_open))
    assert Limits().num_clients == num_clients


def test_silent_strangers_displace_no_client(chunks: HeldChunks) -> None:
    ping = b"*1\r\n$4\r\nPING\r\n"
    with (
        serving(chunks, limits=Limits(num_clients=4)) as server,
        dial(server) as asker,
        contextlib.ExitStack() as stack,
    ):
        asker.sendall(ping)
        assert asker.recv(100) == b"+PONG\r\n"
        strangers = [stack.enter_context(dial(server)) for _ in range(20)]
        assert all(map(is_closed, strangers[:16]))
        asker.sendall(ping)
        assert asker.recv(100) == b"+PONG\r\n"


def test_clients_that_read_nothing_are_dropped(chunks: HeldChunks) -> None:
    """Their leases are bounded, and all end."""
    large = HeldChunks([])
    big = replace(GEOMETRY, layer_widths=(1 << 14,) * 4)
    parts = PartGeometries((big,))
    large.data = {chunk_key(i): chunk_data(i, big) for i in range(8)}  # 2 MiB each
    limits = Limits(stall_seconds=0.5, unsent_bytes=1 << 20, leased_bytes=8 << 20)
    with serving(large, ranks=[parts], limits=limits, listener=bit_by_bit()) as server:
        slow = [dial(server, 4096) for _ in range(20)]
        for sock in slow:
            sock.sendall(b"".join(get(i) for i in range(8)) * 2 + b"*1\r\n$4\r\nQUIT\r\n")
        assert large.await_leased(lambda count: count > 0)
        assert not large.await_leased(lambda count: count > 8 + 2, 0.4)
        quick = config(url(server), max_value_bytes=1 << 22, read_timeout_seconds=10.0)
        with open_tier(quick.url, big, max_value_bytes=1 << 22, read_timeout_seconds=10.0) as tier:
            assert get_all(tier, range(8), 20.0)[0] == [True] * 8  # the slow clients are dropped
        assert large.await_leased(lambda count: count == 0)
        for sock in slow:
            assert is_closed(sock)
            sock.close()


def test_trickling_readers_are_dropped(chunks: HeldChunks) -> None:
    big = replace(GEOMETRY, layer_widths=(1 << 16,) * 4)
    held = HeldChunks([])
    held.data = {chunk_key(0): chunk_data(0, big)}
    parts, clock = PartGeometries((big,)), Clock(0.0)
    with (
        serving(held, ranks=[parts], clock=clock, listener=bit_by_bit()) as server,
        dial(server, 4096) as sock,
    ):
        sock.sendall(get(0) * 4)
        assert held.await_leased(lambda count: count > 0)
        for _ in range(100):
            with contextlib.suppress(ConnectionError):
                sock.recv(4096)
            clock.now += 1.0
            if held.await_leased(lambda count: count == 0, 0.2):
                break
        assert held.num_leased == 0


def test_a_client_that_sends_half_a_command_is_dropped(chunks: HeldChunks) -> None:
    clock = Clock(0.0)
    with serving(chunks, clock=clock) as server, dial(server) as sock:
        sock.sendall(get(1) + get(0)[:-5])
        sock.settimeout(0.2)
        for _ in range(50):
            with contextlib.suppress(TimeoutError):
                if is_closed(sock):
                    return
            clock.now += 6.0
        raise AssertionError("it waits for the rest for ever")


def test_a_taken_port_is_an_error(chunks: HeldChunks, server: PeerServer) -> None:
    with pytest.raises(OSError, match="in use"), serving(chunks, port=server.port):
        pass


@pytest.mark.parametrize(
    "line",
    [
        *(b"", None, 5, b"lmcache-connector 0 x", b"lmcache-connector 1", b"redis 1 x"),
        *(b"lmcache-connector 1 x y", b"lmcache-connector 9999999 x", b"lmcache-connector -1 x"),
    ],
)
def test_foreign_greetings_fail(line: object) -> None:
    with pytest.raises(ValueError, match="not a peer server"):
        Greeting.parse(line)


def test_an_idle_server_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server shares the process of an engine's worker."""
    turns, seconds = threading.Semaphore(0), list[float]()
    with (
        serving(HeldChunks([0])) as server,
        redis.Redis.from_url(url(server), protocol=2) as client,
    ):
        assert client.ping()
        select = server._selector.select

        def note(timeout: float) -> list[Any]:
            seconds.append(timeout)
            turns.release()
            return select(timeout)

        monkeypatch.setattr(server._selector, "select", note)
        assert turns.acquire(timeout=20.0)
        assert turns.acquire(timeout=20.0)
        assert min(seconds) > 0.5
        assert client.ping()
