"""Connects to a server with redis-py: TCP, TLS or a Unix socket, credentials, database.

redis-py asks and answers whatever is a command. What it reads of one question's answers is bounded
in bytes and in time by the socket that it is given here. Where values are to move, the socket is
taken from it.
"""

from __future__ import annotations

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

# What connecting and asking raise. The last ones are redis-py's, about answers without any sense.
TALK_ERRORS = (
    OSError,
    redis.RedisError,
    *(AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError),
)
# Another node of the cluster has the key, or will soon have it; but this one answers.
REDIRECTIONS = (AskError, TryAgainError, ClusterDownError)
SMALL_BYTES = 64 << 10

_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


class UnreachableError(redis.ConnectionError):
    """No route, nobody there, no trust."""


def says_no(error: Exception) -> bool:
    """Whether the server lives, and would not have this connection: it may have too many, and what
    is connected goes on. After its refusal it hangs up, which can be all that is seen of it."""
    is_away = isinstance(error, UnreachableError)
    return isinstance(error, ResponseError | redis.ConnectionError) and not is_away


def is_wrong_type(error: object) -> bool:
    """Whether an answer says that a key holds no string."""
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def is_endpoint(host: str, port: int) -> bool:
    """Whether a server may name this as another's address."""
    return _HOST.fullmatch(host) is not None and 1 <= port <= 65535


class Dialer:
    """Connects to the servers behind one URL. Thread-safe.

    ``connect_seconds`` bounds connecting to each address of a name, ``answer_seconds`` the TLS
    handshake and the answers to each question; ``clock`` returns seconds. A name look-up is the
    system's, and as slow as it is.
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
            "parser_class": _RESP2Parser,  # hiredis believes the lengths of arrays
            "retry": Retry(NoBackoff(), 0),
        }
        # Without any password OpenSSL would ask the terminal, and wait.
        self._tls = {"ssl_password": "", **address.tls_options()} if address.tls else {}

    def connect(self, host: str, port: int, max_bytes: int) -> Client:
        """To a server with data; ``host`` is of no matter for a Unix socket. ``max_bytes``: of all
        answers to one question. Raises one of ``TALK_ERRORS``."""
        address = self._address
        login = {"username": address.username, "password": address.password, "db": address.db}
        return self._open(host, port, max_bytes=max_bytes, **login)

    def connect_sentinel(self, host: str, port: int) -> Client:
        """Raises one of ``TALK_ERRORS``."""
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


def take_socket(client: Client) -> socket.socket:
    """The client's connected socket, for another owner: nothing is left to read, neither in the
    socket nor in redis-py's buffer. Raises one of ``TALK_ERRORS``."""
    connection = client.connection_pool.get_connection()
    if connection.can_read(0):
        raise InvalidResponse("bytes that nobody asked for")
    sock: socket.socket = connection._sock.sock
    connection._sock = None  # it would be closed with the client
    return sock


def be_patient(client: Client, seconds: float) -> None:
    """From now on the answers to each question may take ``seconds``. Raises one of
    ``TALK_ERRORS``."""
    connection = client.connection_pool.get_connection()
    connection.allow(seconds)
    client.connection_pool.release(connection)


def never_redial(client: Client) -> None:
    """From now on a connection that is lost stays lost. redis-py would dial again before the next
    command, and who listens there then may be another server than the one that was looked at.
    Raises one of ``TALK_ERRORS``."""
    connection = client.connection_pool.get_connection()
    connection.is_last = True
    client.connection_pool.release(connection)


class PendingCommand:
    """A command that was sent, and more of them while its answer is waited for. Raises one of
    ``TALK_ERRORS``."""

    def __init__(self, client: Client, *words: Any) -> None:
        self._pool = client.connection_pool
        self._connection = self._pool.get_connection()
        self._connection.send_command(*words)

    def __enter__(self) -> PendingCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._connection)

    def add(self, packed: bytes) -> bool:
        """Send another one, from any thread. False if it cannot be sent at once."""
        try:
            sent: int = self._connection._sock.sock.send(packed, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return sent == len(packed)

    def answer(self) -> Any:
        """The next one: there are as many as commands."""
        return self._connection.read_response()


class _BoundedSocket:
    """Gives redis-py so many bytes and seconds for the answers to one question."""

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
        if self.sock.gettimeout() != 0.0:  # with it, redis-py looks whether anything is there
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
    """Of redis-py's connections. It would name itself to the server, which may not be allowed."""

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
        """For the answers to each question."""
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
