"""What processes can do to each other's reads: die, stop, come back. In processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lmcache_connector.p2p.data.nixl_agent import Nixl, Runs
from lmcache_connector.p2p.errors import PeerError
from tests.support.nixl import needs_nixl

pytestmark = needs_nixl
SIZE = 32 << 20
GIVE_UP_SECONDS = 0.5
PATIENCE_SECONDS = 100.0


def whole(memory: np.ndarray) -> Runs:  # type: ignore[type-arg]
    return np.array([(memory.ctypes.data, len(memory))], np.uint64)


@contextmanager
def closing(nixl: Nixl) -> Iterator[Nixl]:
    try:
        yield nixl
    finally:
        nixl.close(5)


def nixl_with(
    memory: np.ndarray,  # type: ignore[type-arg]
    clock: Callable[[], float] = time.monotonic,
) -> Nixl:
    nixl = Nixl("test", clock)
    nixl.register(memory.ctypes.data, len(memory))
    return nixl


def serve(pipe: Connection, tls: str) -> None:
    """Offer memory full of ones until told to end."""
    os.environ["UCX_TLS"] = tls
    memory = np.ones(SIZE, np.uint8)
    nixl = nixl_with(memory)
    pipe.send_bytes(nixl.metadata())
    pipe.send_bytes(whole(memory).tobytes())
    while not pipe.poll(0.5):
        nixl.wake()
    nixl.close(5)


Method = Literal["spawn", "fork"]


@contextmanager
def source(tls: str, method: Method = "spawn") -> Iterator[tuple[BaseProcess, bytes, Runs]]:
    context = _context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, tls))
    process.start()
    try:
        assert ours.poll(PATIENCE_SECONDS)
        metadata = ours.recv_bytes()
        yield process, metadata, np.frombuffer(ours.recv_bytes(), np.uint64).reshape(-1, 2)
    finally:
        process.kill()
        process.join(10)


def _context(method: Method) -> SpawnContext | ForkContext:
    if method == "fork":
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


class Patience:
    """Ends a read after a moment."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> None:
        if time.monotonic() > self._end:
            raise PeerError("long enough")


def read_late(pipe: Connection, method: Method) -> None:
    """Over TCP, from a source that is stopped in the midst of it."""
    os.environ["UCX_TLS"] = "tcp"
    with source("tcp", method) as stopped, source("tcp", method) as other:
        memory = np.zeros(SIZE, np.uint8)
        nixl = nixl_with(memory)
        process, metadata, remote = stopped
        nixl.read(metadata, whole(memory), remote, Patience(PATIENCE_SECONDS))
        assert memory.all()
        memory[:] = 0
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match="long enough"):
            nixl.read(metadata, whole(memory), remote, Patience(GIVE_UP_SECONDS))
        memory[:] = 7
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1.0)  # in which the answers to what was given up come
        assert (memory == 7).all()
        _, metadata, remote = other  # with a new agent
        nixl.read(metadata, whole(memory), remote, Patience(PATIENCE_SECONDS))
        assert (memory == 1).all()
        nixl.close(5)
    pipe.send_bytes(b"done")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_nothing_lands_after_a_read_was_given_up(method: Method) -> None:
    """Not even what UCX has asked for over TCP, which nothing but the agent's end calls off."""
    context = multiprocessing.get_context("spawn")  # one that has not loaded UCX
    ours, theirs = context.Pipe()
    process = context.Process(target=read_late, args=(theirs, method))
    process.start()
    theirs.close()
    assert ours.poll(2 * PATIENCE_SECONDS)
    assert ours.recv_bytes() == b"done"
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def test_sources_that_die_cost_an_error_and_no_descriptor() -> None:
    memory = np.zeros(SIZE, np.uint8)
    nixl = nixl_with(memory)
    counts = []
    for _ in range(2):
        with source("all") as (process, metadata, remote):
            nixl.read(metadata, whole(memory), remote, Patience(PATIENCE_SECONDS))
            process.kill()
            process.join(10)
            with pytest.raises(PeerError):
                nixl.read(metadata, whole(memory), remote, Patience(PATIENCE_SECONDS))
        nixl.forget(metadata)
        counts.append(len(open_files()))
    assert counts[-1] <= counts[0]
    nixl.close(5)


@contextmanager
def pair(clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[Nixl, Nixl, Runs, Runs]]:
    """Who reads and who is read, with zeros here and ones there, in this process."""
    zeros, ones = np.zeros(SIZE, np.uint8), np.ones(SIZE, np.uint8)
    with closing(nixl_with(zeros, clock)) as reader, closing(nixl_with(ones)) as read:
        yield reader, read, whole(zeros), whole(ones)


def test_a_long_read_asks_again_and_again_whether_to_go_on() -> None:
    """Also where the system copies at once: a prompt of some gigabytes takes seconds."""
    seconds = count()
    asked: list[None] = []
    with pair(lambda: float(next(seconds))) as (reader, read, mine, theirs):
        reader.read(read.metadata(), mine, theirs, lambda: asked.append(None))
    assert len(asked) >= SIZE // (16 << 20)


def test_a_peer_is_not_forgotten_while_it_is_read() -> None:
    """Another connection to it may end meanwhile."""
    seconds = count()
    with pair(lambda: float(next(seconds))) as (reader, read, mine, theirs):
        metadata = read.metadata()
        reader.read(metadata, mine, theirs, lambda: reader.forget(metadata))
        assert reader._reading is not None
        assert set(reader._reading.peers) == {metadata}
        reader.forget(metadata)
        assert not reader._reading.peers


def test_a_read_that_fails_when_it_begins_takes_the_agent_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of it may be under way."""
    with pair() as (reader, read, mine, theirs):
        reader.start(reads=True, is_read=False)
        first = reader._reading
        assert first is not None
        transfer = first.agent.transfer

        def half(handle: object) -> None:
            transfer(handle)
            raise RuntimeError("NIXL_ERR_BACKEND")

        monkeypatch.setattr(first.agent, "transfer", half)
        with pytest.raises(PeerError):
            reader.read(read.metadata(), mine, theirs, Patience(PATIENCE_SECONDS))
        assert reader._reading is None
        reader.read(read.metadata(), mine, theirs, Patience(PATIENCE_SECONDS))


@pytest.mark.parametrize("who", ["readers", "sources"])
def test_fifty_peers_that_came_and_went_leave_nothing(who: str) -> None:
    zeros, ones = np.zeros(SIZE, np.uint8), np.ones(SIZE, np.uint8)
    counts = []
    with closing(nixl_with(zeros if who == "sources" else ones)) as stays:
        for _ in range(50):
            with closing(nixl_with(ones if who == "sources" else zeros)) as comes:
                reader, read = (stays, comes) if who == "sources" else (comes, stays)
                metadata = read.metadata()
                reader.read(metadata, whole(zeros), whole(ones), Patience(PATIENCE_SECONDS))
                counts.append((len(open_files()), num_threads()))
                reader.forget(metadata)
    for of_one_kind in zip(*counts, strict=True):  # one that has ended may take a moment to go
        assert min(of_one_kind[-10:]) <= max(of_one_kind[:10])


def test_metadata_of_nobody_costs_an_error() -> None:
    memory = np.zeros(SIZE, np.uint8)
    nixl = nixl_with(memory)
    for garbage in (b"x", os.urandom(331), bytes(1000)):
        with pytest.raises(PeerError):
            nixl.read(garbage, whole(memory), whole(memory), Patience(PATIENCE_SECONDS))
    nixl.close(5)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def open_files() -> list[Path]:
    return [place for place in Path("/proc/self/fd").iterdir() if place.is_symlink()]


def listening() -> set[str]:
    """Addresses at which this process listens, as ``/proc/net/tcp`` has them: ``HEX:PORT``."""
    links = (os.fspath(place.readlink()) for place in open_files())
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in own}


def test_ucx_listens_on_loopback_only() -> None:
    before = listening()
    nixl = Nixl("test", is_local=True)
    nixl.metadata()
    new = listening() - before
    assert new
    assert all(address.startswith("0100007F:") for address in new)
    nixl.close(5)
    assert not listening() - before
