"""Parses the URL of the Redis tier, without connecting.

====================================================================  =============================
``redis://[user[:password]@]host[:port][/db]``                        one server
``rediss://...?ssl_ca_certs=&ssl_certfile=&ssl_keyfile=``             the same over TLS
``unix://[user[:password]@]/path/to.sock[?db=]``                      one server, Unix socket
``redis+sentinel://[user:password@]host[:port],host.../master[/db]``  the master Sentinel names
``redis+cluster://[user:password@]host[:port],host...``               a cluster, from any node
====================================================================  =============================

``rediss+sentinel`` and ``rediss+cluster`` are the TLS forms. The sentinels' own credentials, if
any, are ``?sentinel_username=&sentinel_password=``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit


class TopologyKind(Enum):
    """How many servers hold the values, and how they are found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


# URL options, named as in other clients. Any other option is refused.
_TLS_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"}
    | {"ssl_cert_reqs", "ssl_check_hostname"}
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_SECRETS = ("sentinel_username", "sentinel_password", "ssl_password")
_CERT_REQS = ("required", "optional", "none")
_DEFAULT_PORTS = {TopologyKind.SENTINEL: 26379}
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
    """A parsed URL. No secret shows in ``repr`` or ``str``."""

    kind: TopologyKind
    tls: bool
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def tls_options(self) -> dict[str, str]:
        """The options about certificates, as given."""
        return {name: value for name, value in self.options if name in _TLS_OPTIONS}

    def sentinel_login(self) -> tuple[str | None, str | None]:
        """User and password of the sentinels."""
        options = dict(self.options)
        return options.get("sentinel_username"), options.get("sentinel_password")

    def redact(self, text: str) -> str:
        """``text`` without credentials, which the message of a server or a library may repeat."""
        secrets = {self.username, self.password, *(dict(self.options).get(o) for o in _SECRETS)}
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        """The address for logs, without credentials and options."""
        scheme = next(s for s, kind in _SCHEMES.items() if kind == (self.kind, self.tls))
        if self.path:
            return f"unix://{self.path}"
        hosts = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}" + (f"/{self.master}" if self.master else "")


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ``ValueError``. Its message never repeats the URL, which may hold a password."""
    # `_parse_hosts` splits several hosts: urlsplit reads only one host and port.
    try:
        parts = urlsplit(url)
    except ValueError:
        # The messages of urlsplit may repeat a piece of a password.
        raise ValueError("redis_url: malformed") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"redis_url: unknown scheme; use one of {', '.join(_SCHEMES)}")
    kind, tls = _SCHEMES[parts.scheme]
    credentials, _, netloc = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = unquote(parts.path)
    db, master = options.pop("db", ""), ""
    if parts.scheme == "unix":
        if not path.strip("/"):
            raise ValueError("redis_url: unix:// needs the path of a socket")
    else:
        master, db, path = _split_path(kind, path, db)
    _check_options(kind, tls, options)
    hosts = () if path else _parse_hosts(netloc, _DEFAULT_PORTS.get(kind, 6379))
    if kind is TopologyKind.SINGLE and len(hosts) > 1:
        raise ValueError("redis_url: several hosts need redis+sentinel:// or redis+cluster://")
    return RedisAddress(
        kind=kind,
        tls=tls,
        hosts=hosts,
        path=path,
        master=master,
        db=_parse_db(kind, db),
        username=unquote(username) or None,
        password=unquote(password) or None,
        options=tuple(sorted(options.items())),
    )


def _split_path(kind: TopologyKind, path: str, db: str) -> tuple[str, str, str]:
    """``(master, db, "")`` from the path of a URL with hosts."""
    pieces = [piece for piece in path.split("/") if piece]
    master = ""
    if kind is TopologyKind.SENTINEL:
        if not pieces:
            raise ValueError("redis_url: redis+sentinel:// needs /master-name after the hosts")
        master = pieces.pop(0)
    if pieces and not db:
        db = pieces.pop(0)
    if pieces:
        raise ValueError("redis_url: too many parts in the path")
    return master, db, ""


def _parse_db(kind: TopologyKind, db: str) -> int:
    if not db:
        return 0
    if not db.isdecimal():
        raise ValueError("redis_url: the database must be a number")
    if kind is TopologyKind.CLUSTER and int(db):
        raise ValueError("redis_url: a cluster has database 0 only")
    return int(db)


def _parse_hosts(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for piece in netloc.split(","):
        try:
            split = urlsplit(f"//{piece}")
            host, port = split.hostname, split.port
        except ValueError:
            raise ValueError("redis_url: a host or port is malformed") from None
        if not host:
            raise ValueError("redis_url: a host is missing")
        hosts.append((host, default_port if port is None else port))
    return tuple(hosts)


def _check_options(kind: TopologyKind, tls: bool, options: Mapping[str, str]) -> None:
    allowed: frozenset[str] = frozenset()
    if tls:
        allowed |= _TLS_OPTIONS
    if kind is TopologyKind.SENTINEL:
        allowed |= _SENTINEL_OPTIONS
    for name in options:
        if name not in allowed:
            known = ", ".join(sorted(allowed | {"db"}))
            shown = repr(name) if name.isidentifier() else ""
            raise ValueError(f"redis_url: unknown option {shown}; here only {known} make sense")
    if options.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        raise ValueError(f"redis_url: ssl_cert_reqs is one of {', '.join(_CERT_REQS)}")
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"redis_url: {name} names no file")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
