"""``check`` of peers: the peer server's port, the host's folder, other instances, the proxy."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from lmcache_connector.cli.check import Finding
from lmcache_connector.cli.report import UNREACHABLE
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.heartbeat import DISCOVERY, Registration, register
from lmcache_connector.peers.host import HostFolder, default_folder, digest
from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    SMALL_BYTES,
    Dialer,
    ResponseError,
)
from lmcache_connector.threads import Background

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
_MAX_ANSWER_BYTES = 1024
_MAX_ASKED = 16  # instances behind one name
_EVERY_INTERFACE = ("0.0.0.0", "::")
# No instance has this address, so deregistering it removes none.
_NOBODY = "lmcache-connector-check.invalid:1"


def findings(config: ConnectorConfig, role: str) -> Iterator[Finding]:
    own = config.advertised_address(0)
    if config.peer_listen is not None and own is not None:
        yield _check_reach(own)
        yield _check_port(Address.parse(config.peer_listen))
    if config.host_sharing:
        yield _check_folder(config)
    for address in config.peer_addresses:
        yield _check_peer(config, address, own)
    for host in config.peer_hosts:
        yield _check_host(host)
    if config.router is not None:
        yield _check_router(config, role, str(own))


def _check_reach(own: Address) -> Finding:
    if own.host in _EVERY_INTERFACE:
        detail = f"peers are told to connect to {own.host}, which is each peer's own machine"
        return Finding("address", "warning", detail, "name an address of this machine")
    where = "reachable from this host only" if own.is_loopback else f"peers connect to {own.host}"
    return Finding("address", "ok", where)


def _check_port(listens: Address) -> Finding:
    """Whether this process can listen there."""
    if reason := listens.why_not_listen():
        detail = f"cannot listen on {listens}: {reason}"
        hint = "stop what listens there, or choose another port, or an address of this host"
        return Finding("ports", "error", detail, hint)
    return Finding("ports", "ok", f"{listens}; each further rank listens one port higher")


def _check_folder(config: ConnectorConfig) -> Finding:
    path = Path(config.host_folder) if config.host_folder else default_folder(os.geteuid())
    try:
        is_new = not path.exists()
        names = HostFolder(path).sockets()
        own = digest(config.namespace)
        engines = {each.engine for each in names if each.namespace == own}
    except OSError as error:
        hint = "remove it, set host_folder to one in a folder that exists, or host_sharing to false"
        verdict: Literal["error", "warning"] = "error" if config.host_folder else "warning"
        return Finding("host", verdict, str(error), hint)
    if is_new:
        with contextlib.suppress(OSError):  # an engine has come
            path.rmdir()  # this process may have another user
        return Finding("host", "ok", f"engines of this host will find each other in {path}")
    return Finding("host", "ok", f"engines of this namespace in {path}: {len(engines)}")


def _check_peer(config: ConnectorConfig, peer: Address, own: Address | None) -> Finding:
    """Check rank 0 of an instance, or of all instances behind a name."""
    started, hint = time.monotonic(), "start it, or check peers, its peer_listen, and firewalls"
    if peer == own:
        return Finding("peers", "ok", f"{peer} is this instance itself and is skipped")
    found = list[Greeting]()
    try:
        hosts = [peer.host]
        if peer.is_dns:
            places = _within(_ANSWER_SECONDS, lambda: socket.getaddrinfo(peer.host, peer.port))
            hosts = sorted({str(place[0]) for *_, place in places})[:_MAX_ASKED]
        errors = [_greet(config, Address(host, peer.port), found) for host in hosts]
    except OSError as error:
        errors = [error.strerror or str(error)]
    missing = [error for error in errors if error is not None]
    if not found:
        detail = f"cannot load from {peer}: {missing[0]}"
        return Finding("peers", "error", detail, hint, code=UNREACHABLE)
    ranks = " or ".join(sorted({str(each.num_ranks) for each in found}))
    count = f"{len(found)} of {len(errors)} instances answer" if peer.is_dns else "it answers"
    detail = f"{peer}: {count}, {ranks} rank(s) each; this instance must have as many to load"
    if missing:
        detail = f"{detail}. Cannot load from the others: {missing[0]}"
        return Finding("peers", "warning", detail, hint)
    return Finding("peers", "ok", detail, seconds=time.monotonic() - started)


def _greet(config: ConnectorConfig, address: Address, found: list[Greeting]) -> str | None:
    """Add the peer's greeting to ``found``, or return the problem."""
    tier = config.peer_tier_config()
    assert tier is not None
    seconds = tier.connect_timeout_seconds, tier.read_timeout_seconds
    try:
        dialer = Dialer(tier.address, *seconds, time.monotonic)
        with contextlib.closing(dialer.connect(address.host, address.port, SMALL_BYTES)) as client:
            found.append(Greeting.parse(client.execute_command("PEER")))
    except ResponseError:
        return "a Redis listens there, not a peer server"
    except CONNECTION_ERRORS as error:
        return str(error)
    return None


def _check_host(host: str) -> Finding:
    """Check the name only: requests name the port."""
    started = time.monotonic()
    if host.startswith("*.") or _is_network(host):
        return Finding("peer", "ok", f"{host} is a pattern and is not resolved")
    try:
        Address(host, 1).check()
        _within(_ANSWER_SECONDS, lambda: socket.getaddrinfo(host, None))
    except OSError as error:
        detail = f"{host} cannot be resolved: {error.strerror or error}"
        return Finding("peer", "error", detail, "check peer_hosts and DNS", code=UNREACHABLE)
    except ValueError as error:
        hint = "give a host name or an IP address without a port, as requests name it"
        return Finding("peer", "error", f"peer_hosts: {host[:64]!r} is {error}", hint)
    return Finding("peer", "ok", f"{host} resolves", seconds=time.monotonic() - started)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def _check_router(config: ConnectorConfig, role: str, own: str) -> Finding:
    """Send the router a signed deregistration, which registers nothing. vLLM's router has no such
    message and does not answer: only its port can be checked."""
    registration = Registration(role, _NOBODY, own, "lmcache-connector check")
    router, started = str(config.router), time.monotonic()

    def leave() -> None:
        if router.startswith(DISCOVERY):
            place = Address.parse(router.removeprefix(DISCOVERY))
            socket.create_connection((place.host, place.port), _ANSWER_SECONDS).close()
        register(router, registration, config.router_secret_bytes, leaves=True)

    try:
        _within(_ANSWER_SECONDS, leave)
    except urllib.error.HTTPError as error:
        hint = "set the same router_secret on the proxy and all instances, and check router"
        return Finding("router", "error", f"{router} refuses: {_words(error)}", hint)
    except (OSError, ValueError) as error:
        detail = f"{router} cannot be reached: {getattr(error, 'reason', None) or error}"
        hint = "start the proxy, or check router; until it answers, it routes no request here"
        return Finding("router", "error", detail, hint, code=UNREACHABLE)
    does = "listens" if router.startswith(DISCOVERY) else "takes registrations"
    detail = f"{router} {does}"
    return Finding("router", "ok", detail, seconds=time.monotonic() - started)


def _words(error: urllib.error.HTTPError) -> str:
    try:
        said = json.loads(error.read(_MAX_ANSWER_BYTES))["error"]
    except (OSError, ValueError, KeyError, TypeError):
        said = error.reason
    return f"{said} (HTTP {error.code})"


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of ``call``, or its exception, or ``TimeoutError``: resolvers may hang."""
    task = Background("lmc-check").submit(lambda: [call()])
    if not task.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.value is None:
        raise task.error or OSError("the call was abandoned")
    return task.value[0]
