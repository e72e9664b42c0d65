"""Parses the URL of the Redis tier, without connecting.

====================================================================  =============================
``redis://[user[:password]@]host[:port][/db]``                        one server
``rediss://...?ssl_ca_certs=&ssl_certfile=&ssl_keyfile=``             the same over TLS
``unix://[user[:password]@]/path/to.sock[?db=]``                      one server, Unix socket
``redis+sentinel://[user:password@]host[:port],host.../master[/db]``  the master Sentinel names
``redis+cluster://[user:password@]host[:port],host...``               a cluster, from any node
====================================================================  =============================

``rediss+sentinel`` and ``rediss+cluster`` are the TLS forms. The sentinels' own credentials are
``?sentinel_username=&sentinel_password=``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class TopologyKind(Enum):
    """How many servers hold the values, and how they are found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


# URL options, named as in redis-py. Others are refused.
_TLS_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"}
    | {"ssl_cert_reqs", "ssl_check_hostname"}
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_SECRETS = ("sentinel_username", "sentinel_password", "ssl_password")
_MAX_CHARS = 200
_HOST = re.compile(r"[^\s\\/\x00-\x1f\x7f]{1,253}")
_ENCODE = "; write / ? # @ [ ] in a password as %2F %3F %23 %40 %5B %5D"
_CERT_REQS = ("required", "optional", "none")
_SCHEMES = {
    "redis": (TopologyKind.SINGLE, False),
    "rediss": (TopologyKind.SINGLE, True),
    "unix": (TopologyKind.SINGLE, False),
    "redis+sentinel": (TopologyKind.SENTINEL, False),
    "rediss+sentinel": (TopologyKind.SENTINEL, True),
    "redis+cluster": (TopologyKind.CLUSTER, False),
    "rediss+cluster": (TopologyKind.CLUSTER, True),
}


@dataclass(frozen=True)
class RedisAddress:
    """A parsed URL. ``repr`` and ``str`` show no secret. ``options``: of TLS and sentinels, typed
    as in redis-py."""

    kind: TopologyKind
    tls: bool
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def tls_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in _TLS_OPTIONS}

    def sentinel_login(self) -> tuple[str | None, str | None]:
        return self.options.get("sentinel_username"), self.options.get("sentinel_password")

    def redact(self, error: object) -> str:
        """``error`` for a log: short, in one line, and without credentials, which messages of
        servers and libraries may repeat."""
        # Redis repeats 128 characters of arguments, maybe a part of a secret: cut them all off.
        text = str(error).partition(", with args beginning with")[0] or type(error).__name__
        secrets = {self.username, self.password, *map(self.options.get, _SECRETS)}
        # The longest first: a user name may be part of the password.
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text[:_MAX_CHARS].encode("unicode_escape").decode()

    def __str__(self) -> str:
        """For logs, without credentials and options."""
        scheme = next(s for s, kind in _SCHEMES.items() if kind == (self.kind, self.tls))
        if self.path:
            return f"unix://{self.path}"
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        return f"{scheme}://{hosts}" + (f"/{self.master}" if self.master else "")


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ``ValueError``, whose message never repeats the URL: it may contain a password."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ValueError(f"redis_url: unknown scheme; use one of {', '.join(_SCHEMES)}")
    if "#" in rest:
        raise ValueError(f"redis_url: a # ends a URL{_ENCODE}")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    login, _, names = netloc.rpartition("@")
    if "@" in login and "," in login:
        raise ValueError(f"redis_url: give user and password once, before the first host{_ENCODE}")
    # Options are parsed as those of a Unix socket: redis-py has no URL with several hosts.
    given = _parsed(
        f"unix://{login}@/{path}?{query}", f"an option or the database is not a number{_ENCODE}"
    )
    path, db, master = given.pop("path").rstrip("/"), given.pop("db", 0), ""
    hosts: tuple[tuple[str, int], ...] = ()
    if scheme != "unix":
        hosts = tuple(_host(name, kind) for name in names.split(","))
        master, db = _split_path(kind, path, db)
        path = ""
    elif names or not path:
        raise ValueError("redis_url: unix:// needs the path of a socket, which begins with a /")
    if kind is TopologyKind.SINGLE and len(hosts) > 1:
        raise ValueError("redis_url: several hosts need redis+sentinel:// or redis+cluster://")
    if kind is TopologyKind.CLUSTER and db:
        raise ValueError("redis_url: a cluster has database 0 only")
    username, password = given.pop("username", None), given.pop("password", None)
    _check_options(kind, tls, given)
    return RedisAddress(kind, tls, hosts, path, master, db, username, password, given)


def _parsed(url: str, problem: str) -> dict[str, Any]:
    """Parse with redis-py, but drop its error message, which may repeat a piece of a password."""
    from redis.connection import parse_url  # late: settings are parsed without Redis too

    try:
        given: dict[str, Any] = parse_url(url)
    except ValueError:
        raise ValueError(f"redis_url: {problem}") from None
    given.pop("connection_class", None)
    return given


def _host(name: str, kind: TopologyKind) -> tuple[str, int]:
    problem = f"a host or port is malformed{_ENCODE}"
    given = _parsed(f"redis://{name}", problem)
    if "host" not in given:
        raise ValueError("redis_url: a host is missing")
    if _HOST.fullmatch(given["host"]) is None:
        raise ValueError(f"redis_url: {problem}")
    return given["host"], given.get("port", 26379 if kind is TopologyKind.SENTINEL else 6379)


def _split_path(kind: TopologyKind, path: str, db: int) -> tuple[str, int]:
    """Master and database in the path of a URL with hosts."""
    pieces = [piece for piece in path.split("/") if piece]
    master = ""
    if kind is TopologyKind.SENTINEL:
        if not pieces:
            raise ValueError("redis_url: redis+sentinel:// needs /master-name after the hosts")
        master = pieces.pop(0)
    if pieces and not db:
        if not pieces[0].isdecimal():
            raise ValueError("redis_url: the database must be a number")
        db = int(pieces.pop(0))
    if pieces:
        raise ValueError("redis_url: too many parts in the path")
    return master, db


def _check_options(kind: TopologyKind, tls: bool, options: Mapping[str, Any]) -> None:
    allowed = _TLS_OPTIONS if tls else frozenset[str]()
    if kind is TopologyKind.SENTINEL:
        allowed |= _SENTINEL_OPTIONS
    for name in options:
        if name not in allowed:
            known = ", ".join(sorted(allowed | {"db"}))
            shown = repr(name) if name.isidentifier() else ""
            raise ValueError(f"redis_url: unknown option {shown}; valid here: {known}")
    if options.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        raise ValueError(f"redis_url: ssl_cert_reqs must be one of {', '.join(_CERT_REQS)}")
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"redis_url: {name} is not a file")
    if "ssl_ca_path" in options and not Path(options["ssl_ca_path"]).is_dir():
        raise ValueError("redis_url: ssl_ca_path is not a folder")
