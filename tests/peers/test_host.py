"""Engines of one host find each other in a folder; anything else in the folder does no harm."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.peers import host, server
from lmcache_connector.peers.host import (
    HostFolder,
    HostFolderError,
    HostSocket,
    SocketName,
    digest,
    open_folder,
)
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.server import PeerServer
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from tests.support.clock import within
from tests.support.peers import CONFIG, HeldChunks, name_of, serving, topology
from tests.support.processes import open_files
from tests.support.redis.chunks import PARTS, chunk_data, chunk_key

FOUND_SECONDS = 20.0
"""Two are enough; a busy machine may need more."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host"


@contextmanager
def engine(path: Path, chunks: HeldChunks, name: str = "one", **more: int) -> Iterator[PeerServer]:
    own = name_of(name, **more)
    with serving(chunks, engine_id=name, host_socket=HostSocket(HostFolder(path), own)) as found:
        yield found
    assert str(own) not in names_in(path)


@contextmanager
def looking(path: Path, own: str = "reader") -> Iterator[AnyLookup]:
    """A lookup as on the scheduler side, where a thread maintains it; here `holds` does."""
    peers = PeerLookup(CONFIG, [PARTS], topology(path, own))
    with closing(AnyLookup({Tier.PEER: peers}, time.monotonic)) as lookup:
        yield lookup


def names_in(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def holds(lookup: AnyLookup, index: int) -> bool:
    lookup.maintain()
    return bool(lookup.find([chunk_key(index)], time.monotonic() + 0.1))


def test_an_engine_and_its_new_chunks_are_found_soon(path: Path) -> None:
    chunks = HeldChunks([0])
    with looking(path) as lookup:
        assert not holds(lookup, 0)
        assert not lookup.has_servers, "nobody is asked, so no thread is woken"
        with engine(path, chunks):
            assert within(FOUND_SECONDS, lambda: holds(lookup, 0))
            assert lookup.has_servers
            assert not holds(lookup, 1)
            chunks.data[chunk_key(1)] = chunk_data(1)
            assert within(FOUND_SECONDS, lambda: holds(lookup, 1))
        assert within(FOUND_SECONDS, lambda: not holds(lookup, 0))
        with engine(path, chunks, "another"):
            assert within(FOUND_SECONDS, lambda: holds(lookup, 0))


def test_other_kinds_of_engines_are_ignored(path: Path) -> None:
    """The engine itself, other namespaces, other ranks, and other numbers of ranks."""
    folder = HostFolder(path)
    others = (
        name_of("reader"),
        SocketName(digest("other"), digest("a"), 0, 1),
        name_of("b", rank=1, num_ranks=2),
        name_of("c", num_ranks=2),
    )
    with ExitStack() as stack:
        for name in others:
            stack.enter_context(folder.listen(name))
        found = topology(path)
        found.prepare()
        assert found.peers() == ()


def test_foreign_files_of_the_folder_stay(path: Path) -> None:
    folder, chunks = HostFolder(path), HeldChunks([0])
    strange = str(name_of("strange"))
    (path / strange).write_bytes(b"no socket")
    (path / str(name_of("folder"))).mkdir()
    (path / str(name_of("link"))).symlink_to("/dev/zero")
    for other in ("x", strange + "x", "." + strange, strange.replace("-0-1", "-0-9999999")):
        (path / other).write_bytes(b"")
    os.mkfifo(path / str(name_of("pipe")))
    before = names_in(path)
    with engine(path, chunks), looking(path) as lookup:
        assert within(FOUND_SECONDS, lambda: holds(lookup, 0))
        assert before < names_in(path)
        assert folder.engines(digest("default"), 0, 1) == [name_of("one")]


def test_a_dead_engines_socket_is_removed_by_others(path: Path) -> None:
    folder = HostFolder(path)
    folder.listen(name_of("dead")).close()  # a killed engine leaves its name
    assert (path / str(name_of("dead"))).exists()
    with looking(path) as lookup:

        def is_empty() -> bool:
            lookup.maintain()
            return not names_in(path)

        assert within(FOUND_SECONDS, is_empty)
    folder.listen(name_of("dead")).close()
    with engine(path, HeldChunks([0])):
        assert names_in(path) == {str(name_of("one"))}, "a start removes it too"
    with folder.listen(name_of("dead")):
        assert folder.remove_if_dead(name_of("dead")) is False
        assert (path / str(name_of("dead"))).exists()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until a server has checked its socket's name twice from now on."""
    looks, renew = threading.Semaphore(0), HostSocket.renew

    def note(host_socket: HostSocket) -> socket.socket | None:
        try:
            return renew(host_socket)
        finally:
            looks.release()

    monkeypatch.setattr(HostSocket, "renew", note)

    def wait() -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(2):  # one may be under way
            assert looks.acquire(timeout=FOUND_SECONDS)

    return wait


def remove_name(path: Path) -> None:
    (path / str(name_of("one"))).unlink()


def replace_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("remove", [remove_name, shutil.rmtree, replace_folder])
def test_a_cleaner_of_the_folder_separates_engines_for_seconds(
    path: Path, remove: Callable[[Path], None]
) -> None:
    """Cleaners of /tmp remove old files, and names of live sockets with them."""
    with engine(path, HeldChunks([0, 1])), looking(path) as lookup:
        assert within(FOUND_SECONDS, lambda: holds(lookup, 0))
        remove(path)
        with looking(path, "late") as late:
            assert within(FOUND_SECONDS, lambda: holds(late, 0))
        assert within(FOUND_SECONDS, lambda: holds(lookup, 1))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_with_another_mode_is_not_used(path: Path, looked: Callable[[], None]) -> None:
    with engine(path, HeldChunks([0])), looking(path) as lookup:
        assert within(FOUND_SECONDS, lambda: holds(lookup, 0))
        shutil.rmtree(path)
        path.mkdir(mode=0o755)
        looked()
        assert not names_in(path)
        holds(lookup, 0)
        path.chmod(0o700)
        with looking(path, "late") as late:
            assert within(FOUND_SECONDS, lambda: holds(late, 0))


def test_a_lost_folder_is_not_looked_for_at_each_look_up(
    tmp_path: Path, looked: Callable[[], None]
) -> None:
    """The end of a login removes ``/run/user/ID``. Each attempt would take a thread."""
    path = tmp_path / "user" / "host"
    path.parent.mkdir()
    with engine(path, HeldChunks([0])):
        found = topology(path)
        found.prepare()
        assert len(found.peers()) == 1
        shutil.rmtree(path.parent)
        assert not found.is_current()
        with pytest.raises(HostFolderError, match="cannot be used"):
            found.prepare()
        assert found.is_current()
        looked()  # the server goes on
        path.parent.mkdir()
        assert within(FOUND_SECONDS, lambda: not found.is_current())
        assert within(FOUND_SECONDS, lambda: bool(names_of_peers(found)))


def names_of_peers(found: PeerTopology) -> tuple[str, ...]:
    found.prepare()
    return found.peers()


def test_an_engine_removes_only_its_own_name(path: Path) -> None:
    with ExitStack() as stack:
        folder = HostFolder(path)
        first = HostSocket(folder, name_of("one"))
        remove_name(path)
        second = stack.enter_context(closing(HostSocket(folder, name_of("one"))))
        assert first.renew() is None, "another one that lives has its name"
        first.close()
        assert not folder.remove_if_dead(name_of("one"))
        assert second.renew() is None


def test_an_ended_engine_is_no_server_any_more(path: Path) -> None:
    """Each start has a new name, so the open circuit of the old one would stay open for ever."""
    with looking(path) as lookup:
        for number in range(3):
            with engine(path, HeldChunks([0]), f"start-{number}"):
                assert within(FOUND_SECONDS, lambda: holds(lookup, 0))
                assert lookup.servers() == (("this host", CircuitState.CLOSED),)
            assert within(FOUND_SECONDS, lambda: not holds(lookup, 0))
        assert within(FOUND_SECONDS, lambda: not holds(lookup, 0) and not lookup.servers())


def test_two_engines_of_one_name_do_not_replace_each_other(path: Path) -> None:
    folder = HostFolder(path)
    with folder.listen(name_of("one")):
        with pytest.raises(HostFolderError, match=r"another engine .* uses the same engine_id"):
            folder.listen(name_of("one"))
        assert names_in(path) == {str(name_of("one"))}
    folder.listen(name_of("one")).close()  # after its death


def test_engines_that_start_at_the_same_time_are_found(path: Path) -> None:
    """A file system's clock ticks every few milliseconds."""
    found, folder = topology(path), HostFolder(path)
    tick = time.time_ns() + 10**9
    with folder.listen(name_of("first")):
        os.utime(path, ns=(tick, tick))
        found.prepare()
        with folder.listen(name_of("second")):
            os.utime(path, ns=(tick, tick))
            assert not found.is_current()
            found.prepare()
            assert len(found.peers()) == 2


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o755, 0o777])
def test_a_folder_that_others_may_enter_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(HostFolderError, match="must belong to the user of this process, with mode"):
        HostFolder(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_anothers_folder_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(HostFolderError, match="must belong to the user"):
        HostFolder(path)


def test_a_link_to_a_folder_and_a_file_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "target")
    with pytest.raises(HostFolderError, match="cannot be used"):
        HostFolder(path)
    path.unlink()
    path.write_bytes(b"")
    with pytest.raises(HostFolderError, match="cannot be used"):
        HostFolder(path)


def test_without_the_default_folder_nothing_is_shared(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    monkeypatch.setattr(host, "default_folder", lambda user: path)
    assert open_folder(None) is None
    assert "Nothing is shared with other engines of this host" in caplog.text
    with pytest.raises(HostFolderError):
        open_folder(str(path))


def test_paths_may_be_long(tmp_path: Path) -> None:
    """A socket's path has 107 bytes at most."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with engine(deep / "host", HeldChunks([0])), looking(deep / "host") as lookup:
        assert within(FOUND_SECONDS, lambda: holds(lookup, 0))


def test_a_folder_is_closed_with_its_last_user(path: Path) -> None:
    """An engine that starts again in a process would leave a descriptor there each time."""

    def num_open() -> int:
        return open_files().count(str(path))

    found = topology(path)
    assert num_open() == 1
    del found
    gc.collect()
    assert num_open() == 0


def test_another_user_is_not_served(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_user_of", lambda sock: os.geteuid() + 1)
    with engine(path, HeldChunks([0])):
        folder, sock = HostFolder(path), socket.socket(socket.AF_UNIX)
        sock.settimeout(10.0)
        sock.connect(folder.address(name_of("one")))
        with sock:
            assert sock.recv(1) == b""
