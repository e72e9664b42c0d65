"""Connects to a server with redis-py: TCP, TLS or a Unix socket, credentials, database.

redis-py sends commands and parses replies. `_BoundedSocket` bounds the bytes and seconds of each
command's replies. `take_socket` takes the socket away from redis-py, for the transfer of values.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection as _Connection
from redis.connection import ConnectionPool, _RESP2Parser
from redis.connection import SSLConnection as _SSLConnection
from redis.connection import UnixDomainSocketConnection as _UnixConnection
from redis.crc import key_slot as key_slot
from redis.exceptions import AskError, ClusterDownError, InvalidResponse, TryAgainError
from redis.exceptions import AuthenticationError as AuthenticationError
from redis.exceptions import NoPermissionError as NoPermissionError
from redis.exceptions import ResponseError as ResponseError
from redis.retry import Retry

from lmcache_connector.net.deadline import KEEPALIVE
from lmcache_connector.storage.redis.client.url import RedisAddress

Client: TypeAlias = redis.Redis
Check: TypeAlias = Callable[[Client], None]
"""Raises if a new connection is not to be used."""

# Errors of connecting and of commands. The last ones: redis-py's, on malformed replies.
CONNECTION_ERRORS = (
    OSError,
    redis.RedisError,
    *(AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError),
)
# The node works, but the key is, or soon will be, at another node, or its slot has no node.
REDIRECTIONS = (AskError, TryAgainError, ClusterDownError)
SMALL_BYTES = 64 << 10  # limit of the replies to one command, unless large ones are due

_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


class UnreachableError(redis.ConnectionError):
    """No socket: unknown host, no route, refused, timed out, or a failed TLS handshake."""


class ReplicaError(Exception):
    """The server says that it is a replica."""


def is_rejected_by_server(error: Exception) -> bool:
    """Whether the server works but refuses this connection, for instance because it has too many;
    existing connections go on. It may just hang up instead of sending an error."""
    is_away = isinstance(error, UnreachableError)
    return isinstance(error, ResponseError | redis.ConnectionError) and not is_away


def is_wrong_type(error: object) -> bool:
    """Whether a reply says that the key holds no string."""
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def is_endpoint(host: str, port: int) -> bool:
    """Whether a server may name this address as another server's."""
    return _HOST.fullmatch(host) is not None and 1 <= port <= 65535


class Dialer:
    """Connects to the servers behind one URL. Thread-safe.

    ``connect_seconds`` bounds connecting to each address of a name, ``answer_seconds`` the TLS
    handshake and the replies to each command; ``clock`` returns seconds. Name resolution takes as
    long as the system takes.
    """

    def __init__(
        self,
        address: RedisAddress,
        connect_seconds: float,
        answer_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._common = {
            "clock": clock,
            "socket_connect_timeout": connect_seconds,
            "socket_timeout": answer_seconds,
            "protocol": 2,
            "parser_class": _Parser,  # hiredis allocates what the length of an array claims
            "retry": Retry(NoBackoff(), 0),
        }
        # With no password given, OpenSSL would prompt on the terminal.
        self._tls = {"ssl_password": "", **address.tls_options()} if address.tls else {}

    def connect(self, host: str, port: int, max_bytes: int, *checks: Check) -> Client:
        """Connect to a data server. A Unix socket ignores ``host`` and ``port``. ``max_bytes``: of
        the replies to one command. Raises one of ``CONNECTION_ERRORS``, or what a check raises."""
        address = self._address
        login = {"username": address.username, "password": address.password, "db": address.db}
        client = self._open(host, port, max_bytes=max_bytes, **login)
        try:
            for check in checks:
                check(client)
        except BaseException:
            client.close()
            raise
        return client

    def connect_sentinel(self, host: str, port: int) -> Client:
        """Raises one of ``CONNECTION_ERRORS``."""
        username, password = self._address.sentinel_login()
        return self._open(host, port, max_bytes=SMALL_BYTES, username=username, password=password)

    def _open(self, host: str, port: int, **options: Any) -> Client:
        options |= self._common
        if self._address.path:
            pool = ConnectionPool(_Unix, path=self._address.path, **options)
        else:
            options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
            kind = _Tls if self._address.tls else _Tcp
            pool = ConnectionPool(kind, host=host, port=port, **self._tls, **options)
        pool.release(pool.get_connection())
        return Client.from_pool(pool)


def require_master(client: Client) -> None:
    """A check that needs no rights. Raises `ReplicaError` or one of ``CONNECTION_ERRORS``."""
    with contextlib.suppress(ResponseError):  # a proxy's, for instance
        if b"replica" in client.execute_command("HELLO"):
            raise ReplicaError


def take_socket(client: Client) -> socket.socket:
    """The client's connected socket, for another owner, with nothing left to read in it or in
    redis-py's buffer. Raises one of ``CONNECTION_ERRORS``."""
    connection = client.connection_pool.get_connection()
    if connection.can_read(0):
        raise InvalidResponse("unexpected bytes")
    sock: socket.socket = connection._sock.sock
    connection._sock = None  # it would be closed with the client
    return sock


def set_reply_timeout(client: Client, seconds: float) -> None:
    """Allow ``seconds`` for the replies to each further command. Raises one of
    ``CONNECTION_ERRORS``."""
    connection = client.connection_pool.get_connection()
    connection.allow(seconds)
    client.connection_pool.release(connection)


def disable_reconnect(client: Client) -> None:
    """Do not reconnect a lost connection. redis-py would redial before the next command, and might
    reach another server than the one that was checked. Raises one of ``CONNECTION_ERRORS``."""
    connection = client.connection_pool.get_connection()
    connection.is_last = True
    client.connection_pool.release(connection)


class PendingCommand:
    """A command in flight, to which more can be added while its reply is pending. Raises one of
    ``CONNECTION_ERRORS``."""

    def __init__(self, client: Client, *words: Any) -> None:
        self._pool = client.connection_pool
        self._connection = self._pool.get_connection()
        self._connection.send_command(*words)

    def __enter__(self) -> PendingCommand:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def add(self, packed: bytes) -> bool:
        """Send another command. Thread-safe. False unless all of it was sent at once."""
        try:
            sent: int = self._connection._sock.sock.send(packed, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return sent == len(packed)

    def answer(self) -> Any:
        """The next reply; there is one per command. A lost connection's socket stays open until
        the end, for `add` on another thread."""
        return self._connection.read_response(disconnect_on_error=False)


class _Parser(_RESP2Parser):
    # A node that serves no key at all sends CLUSTERDOWN too, with another text.
    EXCEPTION_CLASSES = _RESP2Parser.EXCEPTION_CLASSES | {
        "CLUSTERDOWN": {"Hash slot not served": ClusterDownError}
    }


class _BoundedSocket:
    """Limits bytes and seconds of the replies to one command."""

    def __init__(
        self, sock: socket.socket, max_bytes: int, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.sock = sock
        self._max_bytes = max_bytes
        self.seconds = seconds
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        self._bytes_left = self._max_bytes
        self._until = self._clock() + self.seconds

    def recv(self, num_bytes: int) -> bytes:
        left = self._until - self._clock()
        if self.sock.gettimeout() != 0.0:  # 0: redis-py only polls for data
            if left <= 0.0:
                raise TimeoutError("timed out")
            self.sock.settimeout(left)
        if self._bytes_left <= 0:
            raise OSError("an answer that is too long")
        data = self.sock.recv(min(num_bytes, self._bytes_left))
        self._bytes_left -= len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


class _Bounded:
    """Mixin for redis-py's connections. Omits CLIENT SETINFO, which ACLs may forbid."""

    _sock: _BoundedSocket | None
    is_last = False

    def __init__(self, *, clock: Callable[[], float], max_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self.lib_name = self.lib_version = self.driver_info = None
        self._bounds = max_bytes, options["socket_timeout"], clock

    def _connect(self) -> _BoundedSocket:
        if self.is_last:
            raise redis.ConnectionError("the connection was lost")
        try:
            sock = super()._connect()  # type: ignore[misc]
        except OSError as error:
            raise UnreachableError(str(error)) from error
        return _BoundedSocket(sock, *self._bounds)

    def allow(self, seconds: float) -> None:
        """Seconds for the replies to each command."""
        self._bounds = self._bounds[0], seconds, self._bounds[2]
        if self._sock is not None:
            self._sock.seconds = seconds

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is not None:
            self._sock.renew()
        super().send_packed_command(command, check_health)  # type: ignore[misc]


class _Tcp(_Bounded, _Connection):
    pass


class _Tls(_Bounded, _SSLConnection):
    pass


class _Unix(_Bounded, _UnixConnection):
    pass
