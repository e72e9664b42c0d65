"""Addresses of peers, and request ids that carry two of them.

A router that knows no ``kv_transfer_params`` names both instances in the request id::

    [cmpl-]___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE[-0][-RANDOM]

vLLM adds a prefix, an index and eight hexadecimal digits, which are random on each instance. The
transfer is named by the part that both instances see alike.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_connector.p2p.errors import AddressError

MAX_TRANSFER_ID_BYTES = 512

_MARKS = ("___prefill_addr_", "___decode_addr_")
_PLACE = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-]+):([0-9]{1,5})"
_ROUTE = re.compile(rf"{_MARKS[0]}{_PLACE}{_MARKS[1]}{_PLACE}_([A-Za-z0-9_.\-]+)")
_RANDOM_END = re.compile(r"-[0-9a-f]{8}\Z")
_SCOPE = re.compile(r"[A-Za-z0-9.\-_]{1,15}\Z")  # of a link-local address: an interface
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9.\-]*[A-Za-z0-9])?\Z")


@dataclass(frozen=True, slots=True, order=True)
class PeerAddress:
    """Where an instance's rank 0 takes control messages; rank r listens r ports higher."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise AddressError(f"port {self.port} is not between 1 and 65535")
        if not _is_host(self.host):
            raise AddressError(f"{self.host[:64]!r} is neither a host name nor an IP address")

    def of_rank(self, rank: int) -> PeerAddress:
        """Raises :class:`AddressError` past the last port."""
        return PeerAddress(self.host, self.port + rank)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def data_ports(first: int, place: int, transports: Sequence[str]) -> dict[str, int]:
    """The port on which each transport of a rank listens. ``first``: 0 leaves the choice to the
    system. ``place``: of the rank among those of all data-parallel engines, which may share a host.

    Raises :class:`AddressError` past the last port.
    """
    if first == 0:
        return dict.fromkeys(transports, 0)
    ports = {name: first + place * len(transports) + i for i, name in enumerate(transports)}
    if max(ports.values()) > 65535:
        raise AddressError(f"data_port {first} leaves no port for all ranks: choose a lower one")
    return ports


@dataclass(frozen=True, slots=True)
class RequestRoute:
    """What a request id says. ``transfer_id`` is the same on both instances."""

    prefill: PeerAddress
    decode: PeerAddress
    transfer_id: str


def parse_request_id(request_id: str) -> RequestRoute | None:
    """``None`` for an id without addresses. Raises :class:`AddressError` for a malformed one."""
    if not any(mark in request_id for mark in _MARKS):
        return None
    start = request_id.find(_MARKS[0])
    found = _ROUTE.fullmatch(_RANDOM_END.sub("", request_id[max(start, 0) :]))
    if found is None or sum(request_id.count(mark) for mark in _MARKS) != 2:
        raise AddressError(
            "the request id is not of the form "
            "___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE"
        )
    transfer_id = checked_transfer_id(found.group(0))
    prefill_host, prefill_port, decode_host, decode_port, _ = found.groups()
    return RequestRoute(
        prefill=PeerAddress(prefill_host.strip("[]"), int(prefill_port)),
        decode=PeerAddress(decode_host.strip("[]"), int(decode_port)),
        transfer_id=transfer_id,
    )


def checked_transfer_id(name: object) -> str:
    """The name itself. Raises :class:`AddressError` for one that cannot go over the wire."""
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= MAX_TRANSFER_ID_BYTES:
            return name
    except UnicodeEncodeError:
        pass
    raise AddressError(
        f"a request id must be a string of 1 to {MAX_TRANSFER_ID_BYTES} bytes to name a hand-over"
    )


def _is_host(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return _HOST_NAME.match(host) is not None
    scope = getattr(found, "scope_id", None)  # Python takes anything for one
    return scope is None or _SCOPE.match(scope) is not None
