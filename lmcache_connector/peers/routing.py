"""Which KV transfer a request belongs to: by its ``kv_transfer_params``, else by its request id.

A router for NIXL sends the prefill request with ``{"do_remote_decode": true}``, takes the
parameters from its answer, and passes them on with the decode request::

    do_remote_prefill   true: fetch this prompt's KV
    remote_host/_port   the peer server of the instance that has the KV
    remote_request_id   the transfer's id there
    remote_engine_id, remote_block_ids, remote_num_tokens, tp_size: used by other connectors

A router without such parameters names both instances in the request id, as for vLLM's P2P
connector::

    [cmpl-]___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE[-0][-RANDOM]

vLLM adds a prefix, an index and eight hexadecimal digits, which differ between the two instances.
The transfer id is the part that both instances see alike.

A router for the P2P tier of vLLM's offloading sends objects with ``kv_request_id``,
``remote_host`` and ``remote_port``::

    remote_decoder      another instance will fetch this prompt's KV under that ``kv_request_id``
    remote_prefiller    fetch this prompt's KV from there
    remote_kv_source    that instance may hold chunks of the prompt: ask it
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_connector.net.address import Address

MAX_TRANSFER_ID_BYTES = 512

_MARKS = ("___prefill_addr_", "___decode_addr_")
_PLACE = r"((?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-]+):[0-9]{1,5})"
_ROUTE = re.compile(rf"{_MARKS[0]}{_PLACE}{_MARKS[1]}{_PLACE}_[A-Za-z0-9_.\-]+")
_RANDOM_END = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True, slots=True)
class Send:
    """The prompt's KV goes to whoever asks for ``transfer_id``. ``answers``: the router wants
    ``kv_transfer_params`` in the response."""

    transfer_id: str
    answers: bool


@dataclass(frozen=True, slots=True)
class Receive:
    """The prompt's KV comes from ``source``; without a ``transfer_id``, whatever chunks it has."""

    transfer_id: str
    source: Address


@dataclass(frozen=True, slots=True)
class Router:
    """``own``: address of this instance's peer server, if any; ``hosts``: hosts that a request may
    make this instance dial, see `may_dial`."""

    own: Address | None
    sends: bool
    receives: bool
    hosts: tuple[str, ...]

    def part_in(self, request_id: str, params: Mapping[str, Any] | None) -> Send | Receive | None:
        """``None`` if the request has no KV transfer, or one for a role this instance lacks. Raises
        ``ValueError`` if the transfer is malformed or not allowed."""
        part = self._by_params(request_id, params) or self._by_id(request_id)
        if isinstance(part, Receive):
            if not self.receives:
                return None
            if not may_dial(part.source.host, self.hosts):
                raise ValueError(f"{part.source.host} is not among the 'peer_hosts'")
        return part if isinstance(part, Receive) or self.sends else None

    def _by_params(
        self, request_id: str, params: Mapping[str, Any] | None
    ) -> Send | Receive | None:
        if not params:
            return None
        if not isinstance(params, Mapping):
            raise ValueError("kv_transfer_params is not an object")
        if self.receives and _flag(params, "do_remote_prefill"):
            return Receive(_checked(params.get("remote_request_id")), _address(params))
        if self.sends and _flag(params, "do_remote_decode"):
            return Send(_checked(request_id), answers=True)
        if self.sends and (reader := _object(params, "remote_decoder")) is not None:
            return Send(_checked(reader.get("kv_request_id")), answers=False)
        if self.receives and (sender := _object(params, "remote_prefiller")) is not None:
            return Receive(_checked(sender.get("kv_request_id")), _address(sender))
        if self.receives and (holder := _object(params, "remote_kv_source")) is not None:
            return Receive("", _address(holder))
        return None

    def _by_id(self, request_id: str) -> Send | Receive | None:
        if not any(mark in request_id for mark in _MARKS):
            return None
        start = max(0, request_id.find(_MARKS[0]))
        found = _ROUTE.fullmatch(_RANDOM_END.sub("", request_id[start:]))
        if found is None or sum(request_id.count(mark) for mark in _MARKS) != 2:
            raise ValueError(
                "the request id is not of the form "
                "___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE"
            )
        transfer_id = _checked(found.group(0))
        prefill, decode = map(Address.parse, found.groups())
        if self.sends and self.receives and self.own not in (prefill, decode):
            raise ValueError(f"neither address in the request id is {self.own}, this instance")
        if self.receives and (not self.sends or self.own == decode):
            return Receive(transfer_id, prefill)
        return Send(transfer_id, answers=False)


def may_dial(host: str, hosts: tuple[str, ...]) -> bool:
    """``hosts``: names, addresses, ``*.SUFFIX``, or networks in CIDR form."""
    return any(_matches(host, allowed) for allowed in hosts)


def _matches(host: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return host.lower().endswith(allowed[1:].lower())
    if host.lower() == allowed.lower():
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(allowed, strict=False)
    except ValueError:  # a host name
        return False


def _checked(name: object) -> str:
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= MAX_TRANSFER_ID_BYTES:
            return name
    except UnicodeEncodeError:
        pass
    raise ValueError(f"the name of a KV transfer must have 1 to {MAX_TRANSFER_ID_BYTES} bytes")


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if not (value is None or isinstance(value, bool)):
        raise ValueError(f"{name} is not true or false")
    return bool(value)


def _object(params: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = params.get(name)
    if not (value is None or isinstance(value, Mapping)):
        raise ValueError(f"{name} is not an object")
    return value


def _address(params: Mapping[str, Any]) -> Address:
    host, port = params.get("remote_host"), params.get("remote_port")
    # Some routers pass the port as a string.
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int | str):
        raise ValueError("remote_host and remote_port must be a string and a number")
    return Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
