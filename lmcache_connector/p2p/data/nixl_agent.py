"""NIXL agents of one rank: one that lets peers read its memory, one that reads theirs.

Reads are one-sided: the owner of the memory does not notice them. A read that is given up may still
land: UCX cancels nothing that a stopped peer may answer later. Only the end of the agent keeps
its late bytes out, so a read that does not end well takes the reading agent with it, and the next
one begins with a new agent. Other reads under way then are made once more.

NIXL's own progress thread would keep a core busy. The agent that is read is driven by a thread of
ours, and only while somebody may be connecting or reading.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_connector.p2p.errors import PeerError, ReadError
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

Runs = npt.NDArray[np.uint64]
"""Runs of bytes, ``[n, 2]``: address and length."""

MAX_METADATA_BYTES = 1 << 17
_BATCH_BYTES = 16 << 20
"""Of one post, which may copy all of it at once, and holds the GIL meanwhile."""
_MAX_PEERS = 1024
_POLL_SECONDS = 0.0001
_CHECK_SECONDS = 0.1
_ACTIVE_SECONDS = 2.0
_IDLE_SECONDS = 1.0


@dataclass(eq=False)
class _Generation:
    """An agent with what it was told. ``peers``: their names, by metadata. ``reads``: under way, by
    metadata."""

    agent: Any
    peers: dict[bytes, str] = field(default_factory=dict)
    reads: Counter[bytes] = field(default_factory=Counter)
    handles: set[Any] = field(default_factory=set)


class _AgentLostError(Exception):
    """Another read has taken the agent with it."""


class Nixl:
    """Agents that share one list of registered memory. Thread-safe.

    Raises ``PeerError`` where NIXL cannot be imported or has no UCX. ``name``: for NIXL's own log.
    ``is_local``: UCX listens on loopback only. Else it does so on all networks, and serves whoever
    speaks its protocol.
    """

    def __init__(
        self, name: str, clock: Callable[[], float] = time.monotonic, *, is_local: bool = True
    ) -> None:
        self._name = name
        self._ucx = {"engine_config": "NET_DEVICES=lo"} if is_local else {}
        self._clock = clock
        self._lock = threading.RLock()
        self._regions: list[tuple[int, int]] = []
        self._reading: _Generation | None = None
        self._source: _Generation | None = None
        self._changed = threading.Condition()
        self._active_until = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        with _as_peer_errors():
            self._api: Any = _import_api()
            del self._begin().agent

    def register(self, address: int, num_bytes: int) -> None:
        """Host memory that may be read from and into. Before the first read."""
        with self._lock:
            self._regions.append((address, num_bytes))

    def covers(self, runs: Runs) -> bool:
        """Whether all of it is registered."""
        starts, ends = runs[:, 0], runs[:, 0] + runs[:, 1]
        return all(
            any(address <= start and end <= address + size for address, size in self._regions)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )

    def start(self, *, reads: bool, is_read: bool) -> None:
        """Make agents now: registering memory takes time. Raises ``PeerError``."""
        with _as_peer_errors():
            if is_read:
                self.metadata()
            if reads:
                self._generation()

    # -- memory that is read by others ---------------------------------------------------------

    def metadata(self) -> bytes:
        """What a peer needs to read all registered memory: keep it from all but peers."""
        with self._lock:
            if self._stopping:
                raise PeerError("this instance is shutting down", Reason.SHUTDOWN)
            if self._source is None:
                self._source = self._begin(with_memory=True)
                self._thread = start_thread("lmc-p2p-nixl", self._drive)
            found: bytes = self._source.agent.get_agent_metadata()
        self.wake()
        return found

    def wake(self) -> None:
        """Somebody is about to read, or reads."""
        with self._changed:
            self._active_until = self._clock() + _ACTIVE_SECONDS
            self._changed.notify_all()

    def _drive(self) -> None:
        while True:
            with self._changed:
                if self._clock() >= self._active_until and not self._stopping:
                    self._changed.wait(_IDLE_SECONDS)
            with self._lock:
                if self._stopping or self._source is None:
                    return
                with _logged("driving NIXL failed"):
                    self._source.agent.get_new_notifs()
            time.sleep(_POLL_SECONDS)

    # -- memory of others ----------------------------------------------------------------------

    def read(self, metadata: bytes, local: Runs, remote: Runs, go_on: Callable[[], None]) -> None:
        """Fill ``local`` with what is at ``remote``; the same sizes, run by run.

        Blocks. ``go_on`` is called every moment and raises ``PeerError`` to end it. Raises
        ``ReadError`` where NIXL fails; then too nothing lands any more once this has returned.
        """
        while True:
            try:
                return self._read(metadata, local, remote, go_on)
            except _AgentLostError:
                go_on()

    def forget(self, metadata: bytes) -> None:
        """Nothing more is read there by who says so: who still does says it later."""
        with self._lock:
            generation = self._reading
            if generation is None or generation.reads[metadata]:
                return
            name = generation.peers.pop(metadata, None)
            if name is not None:
                with _logged("a NIXL peer was not forgotten"):
                    generation.agent.remove_remote_agent(name)

    def close(self, seconds: float) -> None:
        """End both agents. Bounded by ``seconds``."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        with self._lock:
            self._end_reading(self._reading)
            source, self._source = self._source, None
            if source is not None:
                del source.agent

    def _read(self, metadata: bytes, local: Runs, remote: Runs, go_on: Callable[[], None]) -> None:
        generation = self._generation()
        handles: list[Any] = []
        try:
            go_on = self._now_and_then(go_on)
            with self._peer(generation, metadata) as name:
                for mine, theirs in _batches(local, remote):
                    self._post(generation, name, mine, theirs, handles)
                    go_on()
                self._await(generation, handles, go_on)
        except _AgentLostError:
            raise
        except BaseException as error:
            with self._lock:
                if handles:
                    self._end_reading(generation)
            if isinstance(error, PeerError) or not isinstance(error, Exception):
                raise
            text = f"a NIXL read failed: {type(error).__name__} {str(error)[:100]}"
            raise ReadError(text, Reason.LOST) from error

    def _generation(self) -> _Generation:
        with self._lock:
            if self._stopping:
                raise PeerError("this instance is shutting down", Reason.SHUTDOWN)
            if self._reading is None:
                self._reading = self._begin(with_memory=True)
            return self._reading

    @contextlib.contextmanager
    def _peer(self, generation: _Generation, metadata: bytes) -> Iterator[str]:
        """Its name. It is not forgotten inside."""
        with self._using(generation) as agent:
            name = generation.peers.get(metadata)
            if name is None:
                if len(generation.peers) >= _MAX_PEERS:
                    self.forget(next(iter(generation.peers)))
                said: str | bytes = agent.add_remote_agent(metadata)
                name = said.decode() if isinstance(said, bytes) else said
                generation.peers[metadata] = name
            generation.reads[metadata] += 1
        try:
            yield name
        finally:
            with self._lock:
                generation.reads -= Counter([metadata])

    def _post(
        self, generation: _Generation, name: str, mine: Runs, theirs: Runs, handles: list[Any]
    ) -> None:
        """``handles``: of the read, which gets one more once it may be under way."""
        with self._using(generation) as agent:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(_described(mine), "DRAM"),
                agent.get_xfer_descs(_described(theirs), "DRAM"),
                name,
            )
            generation.handles.add(handle)
            handles.append(handle)  # what fails may be under way in part
            if agent.transfer(handle) == "ERR":
                raise ReadError("a NIXL read failed", Reason.LOST)

    def _await(
        self, generation: _Generation, handles: Sequence[Any], go_on: Callable[[], None]
    ) -> None:
        for handle in handles:
            while (state := self._state(generation, handle)) != "DONE":
                if state == "ERR":
                    raise ReadError("a NIXL read failed", Reason.LOST)
                go_on()
                time.sleep(_POLL_SECONDS)

    def _now_and_then(self, go_on: Callable[[], None]) -> Callable[[], None]:
        """May be called as often as one likes."""
        asked_at = self._clock()

        def ask() -> None:
            nonlocal asked_at
            if self._clock() - asked_at >= _CHECK_SECONDS:
                go_on()
                asked_at = self._clock()

        return ask

    def _state(self, generation: _Generation, handle: Any) -> str:
        with self._using(generation) as agent:
            state = str(agent.check_xfer_state(handle))
            if state == "DONE":
                generation.handles.discard(handle)
                agent.release_xfer_handle(handle)
            return state

    @contextlib.contextmanager
    def _using(self, generation: _Generation) -> Iterator[Any]:
        with self._lock:
            if self._reading is not generation:
                raise _AgentLostError
            yield generation.agent

    # -- details, under the lock ---------------------------------------------------------------

    def _begin(self, *, with_memory: bool = False) -> _Generation:
        agent = self._api.nixl_agent(
            f"{self._name}-{secrets.token_hex(8)}",
            self._api.nixl_agent_config(backends=[], enable_prog_thread=False),
        )
        agent.create_backend("UCX", self._ucx)
        if with_memory and self._regions:
            agent.register_memory(
                [(address, size, 0, "") for address, size in self._regions], "DRAM"
            )
        return _Generation(agent)

    def _end_reading(self, generation: _Generation | None) -> None:
        if generation is None or self._reading is not generation:
            return
        self._reading = None
        for handle in generation.handles:
            with contextlib.suppress(Exception):  # it is under way: its end is the agent's
                handle.release()
            handle._released, handle._agent = True, None
        generation.handles.clear()
        generation.agent.agent = None  # the last reference: UCX is shut down here
        logger.debug("A NIXL agent has ended with its reads")


def runs_of(views: Sequence[memoryview]) -> Runs:
    """Where these bytes lie."""
    places = [(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in views]
    return np.array(places, np.uint64).reshape(-1, 2)


def _described(runs: Runs) -> Any:
    """As NIXL takes it: address, length, device."""
    return np.column_stack((runs, np.zeros(len(runs), np.uint64)))


def _batches(local: Runs, remote: Runs) -> Iterator[tuple[Runs, Runs]]:
    """Both in parts of about ``_BATCH_BYTES``; a longer run is cut."""
    if not np.array_equal(local[:, 1], remote[:, 1]):
        raise PeerError("what is to be read has another size here than there", Reason.PROTOCOL)
    mine, theirs = _cut(local), _cut(remote)
    number = (np.cumsum(mine[:, 1]) - 1) // np.uint64(_BATCH_BYTES)
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(mine)]
    for first, last in pairwise(edges):
        if last > first:
            yield mine[first:last], theirs[first:last]


def _cut(runs: Runs) -> Runs:
    if not len(runs) or runs[:, 1].max() <= _BATCH_BYTES:
        return runs
    pieces = [
        (address + start, min(_BATCH_BYTES, size - start))
        for address, size in runs.tolist()
        for start in range(0, size, _BATCH_BYTES)
    ]
    return np.array(pieces, np.uint64).reshape(-1, 2)


@contextlib.contextmanager
def _as_peer_errors() -> Iterator[None]:
    """NIXL's errors have no base of their own."""
    try:
        yield
    except Exception as error:
        raise PeerError(f"NIXL cannot be used: {str(error)[:200]}") from error


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """NIXL's errors have no base of their own."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)


def _import_api() -> Any:
    """Late: it loads UCX. Raises ``ImportError``."""
    from nixl import _api

    return _api
