"""Addresses of peers, routers and APIs."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port. Of a peer: those of rank 0; rank r listens r ports higher. ``is_dns``: one
    instance per address that the name resolves to."""

    host: str
    port: int
    is_dns: bool = False

    @classmethod
    def parse(cls, text: str, *, may_be_dns: bool = False) -> Address:
        """``HOST:PORT``, ``[IPv6]:PORT`` or, if allowed, ``dns:NAME:PORT``; else ``ValueError``."""
        is_dns = may_be_dns and text.startswith("dns:")
        host, _, port = text.removeprefix("dns:" if is_dns else "").rpartition(":")
        if host[:1] == "[" and host[-1:] == "]":
            host = host[1:-1]
        elif ":" in host:
            raise ValueError("an IPv6 address goes into brackets: [::1]:7450")
        if not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
            raise ValueError("must be HOST:PORT, with a port from 1 to 65535")
        try:
            return cls(host, int(port), is_dns).check()
        except ValueError as error:
            raise ValueError(f"must be HOST:PORT: the host is {error}") from None

    def check(self) -> Address:
        """Returns itself. Raises ``ValueError`` if ``host`` is no host."""
        is_host = _is_address(self.host) or _NAME.fullmatch(self.host)
        if not is_host or len(self.host) > 253 or not self.host.isprintable():  # odd IPv6 scopes
            raise ValueError("neither a host name nor an address")
        return self

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        return _is_address(self.host) and ipaddress.ip_address(self.host).is_loopback

    def why_not_listen(self) -> str:
        """Why this process cannot listen there now, or an empty text."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except (OSError, OverflowError, ValueError) as error:
            return str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        return ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'dns:' if self.is_dns else ''}{host}:{self.port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
