"""A number that all instances of one model share through Redis, and that never falls.

One small key holds it. A thread reads the key every second and puts the higher of its own number
and the server's into it, so instances that advanced while the server was away, or whose key the
server lost, agree again. Two that raise the same number at once raise it to the same.
"""

from __future__ import annotations

import random as random_module
import threading
import time
from collections.abc import Callable

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.resp import command, first_line, is_redirection
from lmcache_connector.storage.redis.topology import make_topology
from lmcache_connector.storage.redis.value_names import epoch_key

_MAX_DIGITS = 15


class RedisEpoch:
    """``model``: a digest of the model, hex. Thread-safe; starts one thread."""

    def __init__(
        self,
        config: RedisTierConfig,
        model: str,
        *,
        poll_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self._config = config
        self._key = epoch_key(config.namespace, model)
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._number = 0
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._woken = threading.Event()
        self._closed = threading.Event()
        self._servers = Servers(config, make_topology(config, clock), clock, random)
        self._thread = threading.Thread(target=self._run, name="lmc-redis-epoch", daemon=True)
        self._thread.start()

    def number(self) -> int:
        """The highest number heard of so far. Never blocks."""
        return self._number

    def advance(self) -> int:
        """Raise the number by one, here at once, for the others as soon as Redis can be told."""
        with self._lock:
            self._number += 1
            number = self._number
        self._woken.set()
        return number

    def wait(self, seconds: float) -> bool:
        """Wait until Redis has answered once. Whether it has."""
        return self._heard.wait(seconds)

    def close(self, timeout: float = 1.0) -> None:
        """End the thread; one that hangs in a name look-up is left behind, a daemon."""
        self._closed.set()
        self._woken.set()
        self._thread.join(timeout)
        self._servers.topology.close()

    def _run(self) -> None:
        links = Connections(self._servers, self._config.read_timeout_seconds)
        while not self._closed.is_set():
            self._woken.clear()
            self._servers.refresh()
            self._exchange(links)
            self._woken.wait(self._poll_seconds)
        links.close()

    def _exchange(self, links: Connections) -> None:
        node = self._servers.topology.node_of(self._key)
        if node is None:
            return
        try:
            wire = links.get(node)
            self._agree(wire)
            links.succeeded(node)
        except UnavailableError:
            return
        except WireError as error:
            links.drop(node, str(error), blame=error.is_peers_fault)

    def _agree(self, wire: Wire) -> None:
        wire.send([command(b"GET", self._key)], self._deadline())
        theirs = self._read_number(wire)
        with self._lock:
            self._number = ours = max(self._number, theirs)
        self._heard.set()
        if theirs < ours:
            wire.send([command(b"SET", self._key, b"%d" % ours)], self._deadline())
            line = wire.receive_line(self._deadline())
            if line != b"+OK":
                raise _unexpected(line)

    def _read_number(self, wire: Wire) -> int:
        line = wire.receive_line(self._deadline())
        if line == b"$-1":
            return 0
        if not line.startswith(b"$"):
            raise _unexpected(line)
        value = wire.receive_line(self._deadline())
        whole = line == b"$%d" % len(value)
        if not whole or not value.isdigit() or len(value) > _MAX_DIGITS:
            raise _unexpected(value)
        return int(value)

    def _deadline(self) -> Deadline:
        until = self._clock() + self._config.read_timeout_seconds
        return Deadline(until, self._clock, self._closed.is_set)


def _unexpected(line: bytes) -> WireError:
    return WireError(
        WireFault.OUT_OF_STEP, first_line(line), is_peers_fault=not is_redirection(line)
    )
