"""``check`` for ``LMCacheP2PConnector``: its settings, ports, peers and router."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_connector.cli.check import Finding, check_memory, check_versions
from lmcache_connector.cli.report import UNREACHABLE, size
from lmcache_connector.cli.target import p2p_config
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.sockets import listening_socket
from lmcache_connector.p2p.errors import AddressError, PeerError
from lmcache_connector.peers.heartbeat import Registration, tell
from lmcache_connector.threads import start_thread

_ANSWER_SECONDS = 5.0
_MAX_ANSWER_BYTES = 1024
_EVERY_INTERFACE = ("0.0.0.0", "::")
# No instance has this address, so that its farewell removes none.
_NOBODY = "lmcache-connector-check.invalid:1"


def findings(document: Mapping[str, Any], port: int | None) -> Iterator[Finding]:
    """Raises ``CliError`` for settings that the engine would refuse. ``port``: the ``kv_port``."""
    config = p2p_config(document)
    role = str(document.get("kv_role", "no kv_role"))
    yield Finding("settings", "ok", _settings(config, role, port))
    yield check_versions()
    buffers = config.kv_buffer_size + config.overflow_bytes
    yield check_memory("buffers", "kv_buffer_size and overflow_bytes together", buffers, 1)
    yield _check_reach(config)
    if port is not None:
        yield _check_ports(config, port, receives=role != "kv_producer")
    for host in config.peer_hosts:
        yield _check_peer(host)
    if config.router is not None and config.http_address is not None:
        own = PeerAddress(config.host, port or 1)
        yield _check_http_address(config.http_address)
        yield _check_router(config.router, role, own, config.secret_bytes)


def _settings(config: P2PConfig, role: str, port: int | None) -> str:
    address = PeerAddress(config.host, port) if port is not None else config.host
    is_local = PeerAddress(config.host, 1).is_loopback
    peers = " ".join(config.peer_hosts) or ("this host" if is_local else "any")
    parts = [
        f"{role} at {address}",
        f"{config.send_type} for request ids",
        f"buffers of {size(config.kv_buffer_size)} and {size(config.overflow_bytes)} more",
        f"transport {config.transport}",
        f"checksum {'on' if config.checksum else 'off'}",
        f"secret {'set' if config.secret else 'not set'}",
        f"peers: {peers}",
        f"namespace {config.namespace}",
    ]
    return ", ".join(parts)


def _check_reach(config: P2PConfig) -> Finding:
    """Who can reach this instance, and whether that can be meant."""
    if config.host in _EVERY_INTERFACE:
        detail = f"peers are told to come to {config.host}, which leads each of them to itself"
        hint = f'"host": an address of this machine, "bind_host": "{config.host}"'
        return Finding("address", "warning", detail, hint)
    is_local = PeerAddress(config.host, 1).is_loopback
    if is_local and any(not _is_loopback(host) for host in config.peer_hosts):
        detail = f"peer_hosts names other machines, which do not reach {config.host}"
        return Finding("address", "warning", detail, '"host": an address of this machine')
    if config.secret is None and not (is_local and _is_loopback(config.bind_host or config.host)):
        detail = "without a secret whoever reaches the ports can hand over and fetch KV"
        return Finding("address", "warning", detail, '"secret": the same one for all instances')
    detail = "reached from this host only" if is_local else f"peers come to {config.host}"
    return Finding("address", "ok", detail)


def _is_loopback(host: str) -> bool:
    try:
        return PeerAddress(host, 1).is_loopback
    except AddressError:
        return False


def _check_ports(config: P2PConfig, port: int, *, receives: bool) -> Finding:
    """Whether this host lets us listen on them. ``receives``: KV comes in at a port of its own."""
    host = config.bind_host or config.host
    data_port = config.data_port if receives else None
    if data_port == port:
        detail = f"kv_port and data_port are both {port}"
        return Finding("ports", "error", detail, "leave data_port out, or choose another")
    try:
        with contextlib.ExitStack() as stack:
            if data_port is not None:
                stack.enter_context(listening_socket(host, data_port))
            stack.enter_context(listening_socket(host, port))
    except (PeerError, AddressError) as error:
        hint = "stop what listens there or choose other ports; bind_host is an address of this host"
        return Finding("ports", "error", str(error), hint)
    detail = f"{host}: {port}, and one more for each further rank"
    if data_port:
        apart = abs(data_port - port)
        detail += f"; KV at {data_port}, and so on; from {apart + 1} ranks on the two meet"
    elif receives:
        detail += "; KV at any free port"
    return Finding("ports", "ok", detail)


def _check_peer(host: str) -> Finding:
    """Only its name: requests tell which port."""
    started = time.monotonic()
    if host.startswith("*.") or _is_network(host):
        return Finding("peer", "ok", f"{host} stands for many")
    try:
        PeerAddress(host, 1)
        _within(_ANSWER_SECONDS, lambda: socket.getaddrinfo(host, None))
    except AddressError as error:
        hint = "a host name or an IP address, as requests will name it, without a port"
        return Finding("peer", "error", f"peer_hosts: {error}", hint)
    except OSError as error:
        detail = f"{host} is not found: {error.strerror or error}"
        return Finding("peer", "error", detail, "look at peer_hosts and DNS", code=UNREACHABLE)
    return Finding("peer", "ok", f"{host} is found", seconds=time.monotonic() - started)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def _check_http_address(http_address: str) -> Finding:
    host, _, port = http_address.rpartition(":")
    try:
        if not port.isdecimal():
            raise AddressError(f"{http_address[:64]!r} has no port")
        PeerAddress(host.removeprefix("[").removesuffix("]"), int(port))
    except AddressError as error:
        hint = '"http_address": "HOST:PORT" of this instance\'s own API'
        return Finding("http_address", "error", f"the proxy will not take it: {error}", hint)
    return Finding("http_address", "ok", f"the proxy sends requests to {http_address}")


def _check_router(router: str, role: str, own: PeerAddress, secret: bytes) -> Finding:
    """Sends it a farewell, signed as a registration is: that registers nothing."""
    registration = Registration(role, _NOBODY, str(own), "lmcache-connector check")
    started = time.monotonic()
    try:
        _within(_ANSWER_SECONDS, lambda: tell(router, registration, secret, leaves=True))
    except urllib.error.HTTPError as error:
        hint = "give the proxy and all instances the same secret, or look at router"
        return Finding("router", "error", f"{router} refuses: {_words(error)}", hint)
    except (OSError, ValueError) as error:
        detail = f"{router} cannot be reached: {getattr(error, 'reason', None) or error}"
        hint = "start the proxy, or look at router; until it answers no request comes from there"
        return Finding("router", "error", detail, hint, code=UNREACHABLE)
    detail = f"{router} takes registrations"
    return Finding("router", "ok", detail, seconds=time.monotonic() - started)


def _words(error: urllib.error.HTTPError) -> str:
    try:
        said = json.loads(error.read(_MAX_ANSWER_BYTES))["error"]
    except (OSError, ValueError, KeyError, TypeError):
        said = error.reason
    return f"{said} (HTTP {error.code})"


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Raises what ``call`` does, or ``TimeoutError``: a resolver may wait for long."""
    failed: list[OSError | ValueError] = []

    def run() -> None:
        try:
            call()
        except (OSError, ValueError) as error:
            failed.append(error)

    thread = start_thread("lmc-check", run)
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if failed:
        raise failed[0]
