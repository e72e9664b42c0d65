"""Chunks copied from the memory of another process; if bytes are wrong, the socket is used."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire
from lmcache_connector.peers import commands, mapped
from lmcache_connector.peers.commands import NOWHERE, PLACE, Reply
from lmcache_connector.peers.host import HostFolder
from lmcache_connector.peers.server import Limits, PeerServer
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.clock import within
from tests.support.peers import CONFIG, HeldChunks, name_of, read, serving, topology
from tests.support.redis.chunks import GEOMETRY, PARTS, chunk_data, chunk_key

FOUND_SECONDS = 20.0
PLAN = ValuePlan(CONFIG, PARTS)
HASH_KEY = b"a secret of enough bytes"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starved owner is no silent one."""
    monkeypatch.setattr(mapped, "_ANSWER_SECONDS", 20.0)


@pytest.fixture
def chunks() -> HeldChunks:
    held = HeldChunks(range(6))
    held.share()
    return held


@contextmanager
def owner(
    path: Path, chunks: HeldChunks, limits: Limits | None = None, hash_key: bytes | None = None
) -> Iterator[PeerServer]:
    listener = HostFolder(path).listen(name_of("one"))
    with serving(
        chunks, engine_id="one", listener=listener, limits=limits, hash_key=hash_key
    ) as server:
        yield server


@contextmanager
def reader(path: Path, *, maps: bool = True, hash_key: bytes | None = None) -> Iterator[PeerTier]:
    config = replace(CONFIG, hash_key=hash_key)
    tier = PeerTier(config, PARTS, topology(path), maps=maps)
    try:
        assert within(FOUND_SECONDS, lambda: read(tier, [0])[0].hits == [True])
        yield tier
    finally:
        assert tier.close(5.0)


def of(indices: list[int]) -> list[bytes]:
    return [bytes(chunk_data(i)) for i in indices]


def test_chunks_of_shared_memory_do_not_cross_the_socket(
    path: Path, chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(path, chunks), reader(path) as tier:
        monkeypatch.setattr(tier._readers, "read", _forbidden)
        for indices in ([0], [3, 1, 5], list(range(6))):
            result, data = read(tier, indices)
            assert result.hits == [True] * len(indices)
            assert data == of(indices)
        assert chunks.await_leased(lambda count: count == 0)


def _forbidden(*args: object) -> None:
    raise AssertionError("read by the socket")


@pytest.mark.parametrize("hash_key", [None, HASH_KEY])
def test_bytes_that_change_during_a_copy_miss(path: Path, hash_key: bytes | None) -> None:
    """A reader that was stopped for longer than its leases copies such bytes."""
    held = HeldChunks(range(2))
    shared = held.share()
    with owner(path, held, hash_key=hash_key), reader(path, hash_key=hash_key) as tier:
        assert tier._mapped is not None
        original = held.data[chunk_key(1)]
        shared[held.offsets[chunk_key(1)]] ^= 1  # the seal stays
        keys = [chunk_key(0), chunk_key(1)]
        buffers = [bytearray(GEOMETRY.chunk_bytes) for _ in keys]
        limit = Deadline(time.monotonic() + 5.0, time.monotonic)
        (node,) = tier._topology.peers()
        views = [memoryview(b) for b in buffers]
        assert tier._mapped.read(keys, views, node, limit) == [True, False]
        result, data = read(tier, [0, 1])  # the socket brings the sealed bytes
        assert result.hits == [True, True]
        assert data[1] == bytes(original)


def test_without_shared_memory_the_socket_is_used(path: Path) -> None:
    with owner(path, HeldChunks(range(3))), reader(path) as tier:
        result, data = read(tier, [0, 1, 2])
        assert (result.hits, data) == ([True] * 3, of([0, 1, 2]))
        assert tier.num_fallbacks == 0, "that is no failure"


def test_an_owner_that_restarts_is_mapped_again(path: Path) -> None:
    first, second = HeldChunks([0, 1]), HeldChunks([1, 0, 2])
    first.share(), second.share()
    with ExitStack() as owning:
        owning.enter_context(owner(path, first))
        with reader(path) as tier:
            assert read(tier, [0, 1])[0].hits == [True, True]
            owning.close()
            with owner(path, second):
                assert within(FOUND_SECONDS, lambda: read(tier, [2])[0].hits == [True])
                before = tier.num_mapped
                result, data = read(tier, [0, 1, 2])
                assert (result.hits, data) == ([True] * 3, of([0, 1, 2]))
                assert tier.num_mapped == before + 3


def test_memory_of_an_ended_owner_is_unmapped_without_a_read(
    path: Path, chunks: HeldChunks
) -> None:
    """While a reader maps it, the system cannot free it for an owner that starts again."""
    before = _num_mapped()
    with ExitStack() as owning:
        owning.enter_context(owner(path, chunks))
        with reader(path):
            assert _num_mapped() == before + 1
            owning.close()
            assert within(FOUND_SECONDS, lambda: _num_mapped() == before)


def _num_mapped() -> int:
    """Number of this process's read-only mappings of shared chunks."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:chunks" in line and " r--s " in line for line in maps)


def test_leases_of_a_silent_client_expire(path: Path, chunks: HeldChunks) -> None:
    with owner(path, chunks, Limits(stall_seconds=2.0)), asking(path) as ask:
        names = [b"lmc:{default:" + chunk_key(0).hex().encode() + b"}"]
        suffix = _suffixes()
        said = ask(b"LEASE", *(name + end for name in names for end in suffix))
        assert said.startswith(b"$%d\r\n" % (PLACE.size * len(suffix)))
        assert chunks.num_leased == 1
        assert chunks.await_leased(lambda count: count == 0, 10.0)


def test_each_lease_ends_the_one_before_the_last(path: Path, chunks: HeldChunks) -> None:
    """A new lease ends the one before the last, because the last is still being copied."""
    with owner(path, chunks, Limits(leased_bytes=1)), asking(path) as ask:
        name = b"lmc:{default:" + chunk_key(0).hex().encode() + b"}" + _suffixes()[0]
        for number in range(4):
            assert ask(b"LEASE", name).startswith(b"$136")
            assert chunks.num_leased == min(number + 1, 2)
        assert ask(b"RELEASE") == b"+OK\r\n", "answered although all that may be leased is leased"
        assert chunks.num_leased == 0
        assert ask(b"LEASE", b"nonsense") == b"$136\r\n" + PLACE.pack(NOWHERE, b"") + b"\r\n"


def _suffixes() -> list[bytes]:
    from lmcache_connector.storage.redis.value_names import stripe_suffix

    return [stripe_suffix(stripe) for stripe in GEOMETRY.stripes(4096 - 128)]


@contextmanager
def asking(path: Path) -> Iterator[Callable[..., bytes]]:
    folder, sock = HostFolder(path), socket.socket(socket.AF_UNIX)
    sock.settimeout(10.0)
    sock.connect(folder.address(name_of("one")))

    def ask(*words: bytes) -> bytes:
        sock.sendall(command(*words))
        return sock.recv(1 << 16)

    with sock:
        yield ask


def test_one_command_leases_no_more_than_a_share(
    path: Path, chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_MAX_LEASED_BYTES", 2 * GEOMETRY.chunk_bytes)
    chunks.share()
    with owner(path, chunks):
        folder = HostFolder(path)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(folder.address(name_of("one")))  # the path itself may be too long
            tags = [chunk_tag("default", key) + b":0-4:0" for key in chunks.data]
            sock.sendall(command(b"LEASE", *tags))
            assert chunks.await_leased(lambda count: count == 2)
            answer = sock.recv(1 << 16)
            places = PLACE.iter_unpack(answer.split(b"\r\n", 1)[1][:-2])
            assert [offset != NOWHERE for offset, _ in places] == [True] * 2 + [False] * 4
        assert chunks.await_leased(lambda count: count == 0)


@pytest.mark.parametrize("num_values", [2, 3], ids=["of one chunk", "of two chunks"])
def test_a_chunk_larger_than_a_command_may_lease_is_copied(
    path: Path, chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch, num_values: int
) -> None:
    """A batch has several values of one chunk, or the end of one and the start of the next."""
    monkeypatch.setattr(commands, "_MAX_LEASED_BYTES", GEOMETRY.chunk_bytes // 2)
    value_bytes = GEOMETRY.chunk_bytes // len(PLAN.stripes_of(chunk_key(0)))
    monkeypatch.setattr(mapped, "_BATCH_BYTES", num_values * value_bytes)
    with owner(path, chunks), reader(path) as tier:
        monkeypatch.setattr(tier._readers, "read", _forbidden)
        result, data = read(tier, list(range(6)))
        assert (result.hits, data) == ([True] * 6, of(list(range(6))))


def test_clients_on_the_network_get_no_memory(chunks: HeldChunks) -> None:
    with serving(chunks) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(10.0)
        for words in ((b"MAP",), (b"LEASE", b"x")):
            sock.sendall(command(*words))
            data, descriptors, _, _ = socket.recv_fds(sock, 256, 1)
            assert data == b"-ERR this connection cannot map memory\r\n"
            assert not descriptors


LIES = {
    "place": (1 << 40).to_bytes(8, "little") + bytes(128),
    "length": b"short",
    "header": bytes(8 + 128),
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_leases_are_no_hit(path: Path, lie: str) -> None:
    """Nor a crash: the places lie outside of the memory, the headers are of other values."""
    with liar(path, LIES[lie]):
        found = topology(path)
        found.prepare()
        (node,) = found.peers()
        peers = mapped.MappedPeers(PLAN, found.socket_path)
        limit = Deadline(time.monotonic() + 5.0, time.monotonic)
        buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
        assert peers.read([chunk_key(0)], [buffer], node, limit) == [False]
        peers.close()


@contextmanager
def liar(path: Path, place: bytes) -> Iterator[None]:
    held = HeldChunks([0])
    held.share()
    listener = HostFolder(path).listen(name_of("one"))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            assert held.memory is not None
            socket.send_fds(sock, [b"+OK\r\n"], [held.memory])
            asked = sock.recv(1 << 16)
            count = int(asked[1 : asked.index(b"\r\n")]) - 1
            sock.sendall(b"$%d\r\n%b\r\n" % (len(place) * count, place * count))
            with contextlib.suppress(OSError):  # the reader has left
                sock.recv(1 << 16)
                sock.sendall(b"+OK\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield
    thread.join(10.0)
    assert not thread.is_alive()


def test_memory_that_may_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("x")
    try:
        os.ftruncate(descriptor, 4096)
        with pytest.raises(ValueError, match="may change"):
            mapped._mapped(descriptor)
    finally:
        os.close(descriptor)


def reader_of_one(
    path: Path, seconds: float, clock: Callable[[], float] = time.monotonic
) -> tuple[mapped.MappedPeers, Callable[[], object]]:
    """Peers of the folder's one owner, and a call that reads a chunk of it within ``seconds``."""
    found = topology(path)
    found.prepare()
    (node,) = found.peers()
    peers = mapped.MappedPeers(PLAN, found.socket_path, clock)
    buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
    limit = Deadline(clock() + seconds, clock)
    return peers, lambda: peers.read([chunk_key(0)], [buffer], node, limit)


def node_of_one() -> str:
    return f"host {name_of('one').engine}"


@pytest.mark.parametrize("step_seconds", [0.0, 0.005], ids=["runs on", "loses the GIL"])
def test_a_load_past_its_deadline_blames_no_owner(
    path: Path, chunks: HeldChunks, step_seconds: float
) -> None:
    """Otherwise later loads would not use its memory, and its rank would count as away."""
    steps = itertools.count()
    with HostFolder(path).listen(name_of("one")):
        peers, read = reader_of_one(path, 0.0, lambda: next(steps) * step_seconds)
        for number in (1, 2):
            assert read() == [False]
            assert peers.num_failed == number, "it is asked again"
    with owner(path, chunks):
        peers, read = reader_of_one(path, 0.0)
        assert read() == [False]
        assert not peers.is_silent(node_of_one())


def test_a_trickling_reply_of_an_owner_ends_with_the_loads_deadline(path: Path) -> None:
    """Each byte comes soon; the reply never ends."""
    with HostFolder(path).listen(name_of("one")) as listener:
        thread = threading.Thread(target=_trickle, args=(listener,))
        thread.start()
        peers, read = reader_of_one(path, 0.3)
        assert read() == [False], "or it waits for ever"
        thread.join(10.0)
        assert not thread.is_alive()
        peers.close()


def _trickle(listener: socket.socket) -> None:
    held = HeldChunks([0])
    held.share()
    assert held.memory is not None
    sock, _ = listener.accept()
    with sock, contextlib.suppress(OSError):  # the reader has left
        sock.recv(1 << 16)
        socket.send_fds(sock, [b"+OK\r\n"], [held.memory])
        while True:
            sock.sendall(b"*")
            time.sleep(0.05)


@pytest.mark.parametrize("num_batches", [1, 3, 6])
def test_batches_before_the_deadline_are_hits(
    path: Path, chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    """The last of them is copied and its reply is read, so the connection can be used again."""
    monkeypatch.setattr(mapped, "_BATCH_BYTES", 1)

    def reply_deadline(limit: Deadline, **_: float) -> Deadline:
        return Deadline(limit.clock() + 20.0, limit.clock)  # an owner may need more than a moment

    monkeypatch.setattr(mapped, "_reply_deadline", reply_deadline)
    keys, num_asked = [chunk_key(i) for i in range(6)], 0
    sent = Wire.send

    def send(*arguments: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        sent(*arguments)

    monkeypatch.setattr(Wire, "send", send)
    num_values = num_batches * len(PLAN.stripes_of(keys[0]))
    with owner(path, chunks):
        peers, read = reader_of_one(path, 60.0)
        assert read() == [True]
        num_asked = 0
        (node,) = peers._idle
        limit = Deadline(time.monotonic() + 60.0, time.monotonic, lambda: num_asked >= num_values)
        buffers = [memoryview(bytearray(GEOMETRY.chunk_bytes)) for _ in keys]
        hits = peers.read(keys, buffers, node, limit)
        assert hits == [True] * num_batches + [False] * (6 - num_batches)
        assert [bytes(each) for each in buffers[:num_batches]] == of(list(range(num_batches)))
        assert peers.num_failed == 0
        assert read() == [True]
        peers.close()


@pytest.mark.parametrize("num_answers", [0, 1, 3])
def test_batches_before_an_owner_falls_silent_are_hits(
    path: Path, chunks: HeldChunks, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    monkeypatch.setattr(mapped, "_BATCH_BYTES", GEOMETRY.chunk_bytes)
    monkeypatch.setattr(mapped, "_ANSWER_SECONDS", 1.5)
    numbers, lease = itertools.count(), commands.Commands._lease

    def leasing(*arguments: Any) -> Reply:
        reply = lease(*arguments)
        return reply if next(numbers) < num_answers else replace(reply, parts=(b"$",))

    monkeypatch.setattr(commands.Commands, "_lease", leasing)
    keys, node = [chunk_key(i) for i in range(6)], node_of_one()
    buffers = [memoryview(bytearray(GEOMETRY.chunk_bytes)) for _ in keys]
    with owner(path, chunks):
        peers, _ = reader_of_one(path, 60.0)
        limit = Deadline(time.monotonic() + 60.0, time.monotonic)
        hits = peers.read(keys, buffers, node, limit)
        assert hits == [True] * num_answers + [False] * (6 - num_answers)
        assert [bytes(each) for each in buffers[:num_answers]] == of(list(range(num_answers)))
        assert (peers.num_failed, peers.is_silent(node)) == (1, True)
        peers.close()
