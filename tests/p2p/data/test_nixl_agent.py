"""What processes can do to each other's reads: die, stop, come back. In processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
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


def whole(memory: np.ndarray) -> Runs:  # type: ignore[type-arg]
    return np.array([(memory.ctypes.data, len(memory))], np.uint64)


def nixl_with(memory: np.ndarray) -> Nixl:  # type: ignore[type-arg]
    nixl = Nixl("test")
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


@contextmanager
def source(tls: str) -> Iterator[tuple[multiprocessing.process.BaseProcess, bytes, Runs]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, tls))
    process.start()
    try:
        assert ours.poll(60)
        metadata = ours.recv_bytes()
        yield process, metadata, np.frombuffer(ours.recv_bytes(), np.uint64).reshape(-1, 2)
    finally:
        process.kill()
        process.join(10)


class Patience:
    """Ends a read after a moment."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> None:
        if time.monotonic() > self._end:
            raise PeerError("long enough")


def read_late(pipe: Connection) -> None:
    """Over TCP, from a source that is stopped in the midst of it."""
    os.environ["UCX_TLS"] = "tcp"
    memory = np.zeros(SIZE, np.uint8)
    nixl = nixl_with(memory)
    with source("tcp") as (process, metadata, remote):
        nixl.read(metadata, whole(memory)[:, :], remote, Patience(30))
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
    with source("tcp") as (_, metadata, remote):  # with a new agent
        nixl.read(metadata, whole(memory), remote, Patience(30))
        assert (memory == 1).all()
    nixl.close(5)
    pipe.send_bytes(b"done")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_nothing_lands_after_a_read_was_given_up(method: Literal["spawn", "fork"]) -> None:
    """Not even what UCX has asked for over TCP, which nothing but the agent's end calls off."""
    context = (
        multiprocessing.get_context("spawn")
        if method == "spawn"
        else multiprocessing.get_context("fork")
    )
    ours, theirs = context.Pipe()
    process = context.Process(target=read_late, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(120)
    assert ours.recv_bytes() == b"done"
    process.join(10)
    assert process.exitcode == 0


def test_sources_that_die_cost_an_error_and_no_descriptor() -> None:
    memory = np.zeros(SIZE, np.uint8)
    nixl = nixl_with(memory)
    counts = []
    for _ in range(2):
        with source("all") as (process, metadata, remote):
            nixl.read(metadata, whole(memory), remote, Patience(30))
            process.kill()
            process.join(10)
            with pytest.raises(PeerError):
                nixl.read(metadata, whole(memory), remote, Patience(10))
        nixl.forget(metadata)
        counts.append(len(open_files()))
    assert counts[-1] <= counts[0]
    nixl.close(5)


def test_metadata_of_nobody_costs_an_error() -> None:
    memory = np.zeros(SIZE, np.uint8)
    nixl = nixl_with(memory)
    for garbage in (b"x", os.urandom(331), bytes(1000)):
        with pytest.raises(PeerError):
            nixl.read(garbage, whole(memory), whole(memory), Patience(10))
    nixl.close(5)


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
