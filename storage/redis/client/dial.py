"""Connects to a server: TCP, TLS or a Unix socket, credentials, database."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.keepalive import keep_alive
from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.client.conversation import (
    Conversation,
    ErrorReply,
    RefusedError,
)
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.client.url import RedisAddress

# What connecting and asking raise: no route, no trust (an `ssl.SSLError` is an ``OSError``), no
# sense, no rights.
TALK_ERRORS = (OSError, WireError, RefusedError)

# A name with more addresses than that is not tried further.
_MAX_ADDRESSES = 8
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")
_CERTIFICATES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_NO = frozenset({"0", "false", "no"})


@dataclass(frozen=True, slots=True)
class Login:
    """What a server is told first. ``None`` and 0: nothing."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0

    def commands(self) -> list[bytes]:
        commands = []
        if self.username is not None or self.password is not None:
            words = [] if self.username is None else [self.username.encode()]
            commands.append(command(b"AUTH", *words, (self.password or "").encode()))
        if self.db:
            commands.append(command(b"SELECT", b"%d" % self.db))
        return commands


class Dialer:
    """Connects to the servers behind one URL. Thread-safe.

    ``connect_seconds`` bounds connecting with the TLS handshake, ``answer_seconds`` each answer
    after that; ``clock`` returns seconds. A name look-up is the system's, and as slow as it is.
    """

    def __init__(
        self,
        address: RedisAddress,
        connect_seconds: float,
        answer_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._clock = clock

    def connect(self, host: str, port: int) -> Conversation:
        """To a server with data; ``host`` is of no matter for a Unix socket. Raises one of
        ``TALK_ERRORS``."""
        address = self._address
        return self._greet(host, port, Login(address.username, address.password, address.db))

    def connect_sentinel(self, host: str, port: int) -> Conversation:
        """Raises one of ``TALK_ERRORS``."""
        return self._greet(host, port, Login(*self._address.sentinel_login()))

    def _greet(self, host: str, port: int, login: Login) -> Conversation:
        sock = self._open(host, port)
        conversation = Conversation(sock, self._answer_seconds, self._clock)
        try:
            for reply in conversation.ask(*login.commands()):
                if isinstance(reply, ErrorReply):
                    raise RefusedError(reply)
                if reply != b"OK":
                    raise WireError(WireFault.OUT_OF_STEP, "an unexpected answer to AUTH or SELECT")
        except BaseException:
            conversation.close()
            raise
        return conversation

    def _open(self, host: str, port: int) -> socket.socket:
        deadline = Deadline(self._clock() + self._connect_seconds, self._clock)
        if self._address.path:
            return _connected(socket.AF_UNIX, self._address.path, deadline)
        sock = _open_tcp(host, port, deadline)
        if not self._address.tls:
            return sock
        try:
            sock.settimeout(max(0.001, deadline.remaining()))  # for the handshake as a whole
            return self._tls_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    def _tls_context(self) -> ssl.SSLContext:
        """Made anew for every connection: certificates are renewed while an engine runs."""
        options = self._address.tls_options()
        context = ssl.create_default_context()
        required = _CERTIFICATES[options.get("ssl_cert_reqs", "required")]
        checked = options.get("ssl_check_hostname", "yes").lower() not in _NO
        context.check_hostname = checked and required is not ssl.CERT_NONE
        context.verify_mode = required
        if "ssl_certfile" in options:
            # Without any password OpenSSL would ask the terminal, and wait.
            password = options.get("ssl_password", "")
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password)
        if "ssl_ca_certs" in options or "ssl_ca_path" in options:
            context.load_verify_locations(options.get("ssl_ca_certs"), options.get("ssl_ca_path"))
        return context


def is_endpoint(host: str, port: int) -> bool:
    """Whether a server may name this as another's address."""
    return _HOST.fullmatch(host) is not None and 1 <= port <= 65535


def _open_tcp(host: str, port: int, deadline: Deadline) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (UnicodeError, ValueError, OverflowError):
        raise OSError("that is no host name") from None
    error: OSError = OSError("the host has no address")
    for family, _, _, _, where in found[:_MAX_ADDRESSES]:
        try:
            sock = _connected(family, where, deadline)
        except OSError as problem:
            error = problem
            continue
        keep_alive(sock)
        return sock
    raise error


def _connected(family: int, where: object, deadline: Deadline) -> socket.socket:
    if (left := deadline.remaining()) <= 0.0:
        raise TimeoutError("timed out")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(left)
        sock.connect(where)  # type: ignore[arg-type]
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return sock
