"""The peers to ask: all engines on this host and all configured ones, since each may hold any
chunk. Instances that requests name (guests) are asked only for these requests, then forgotten."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.host import HostFolder, SocketName, digest
from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    Check,
    Client,
    Dialer,
    disable_reconnect,
)
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Endpoint, Node, Topology

_SECONDS_BETWEEN_LOOKS = 10.0
_DISTRUST_SECONDS = 60.0
MAX_PEERS = 1024
HOST_PREFIX = "host "
"""Prefix of node names of engines on this host."""
_RANK = " rank "
"""In node names: precedes a rank other than the asking one."""
_GUEST_SECONDS = 60.0
_MAX_GUESTS = 256


class PeerTopology(Topology):
    """``share``: of the asking rank. It asks each peer's same rank, or the rank that owns a chunk.
    ``greeting``: of this engine's own server; peers have as many ranks and another engine id.
    ``host``: the folder of engines on this host."""

    def __init__(
        self,
        config: RedisTierConfig,
        addresses: Sequence[Address],
        greeting: Greeting,
        share: Share,
        clock: Callable[[], float],
        host: HostFolder | None = None,
    ) -> None:
        super().__init__(config, clock, "peers")
        self.share = share
        self._ranks = (share.rank, *sorted(share.others))
        self._config = config
        self._host = host
        self._host_sockets: dict[Node, SocketName] = {}
        self._clock = clock
        self._addresses = addresses
        self._greeting = greeting
        self._own: set[Node] = set()  # configured addresses of this engine itself
        self._distrusted: dict[Node, float] = {}  # until when
        self._endpoints: dict[Node, Endpoint] = {}
        self._admitting = threading.Lock()
        self._guests: dict[Node, tuple[Endpoint, float]] = {}  # endpoint, until when
        self._next_look = float("-inf")
        names, num_ranks = (
            (digest(config.namespace), digest(greeting.engine_id)),
            greeting.num_ranks,
        )
        self._own_ranks = {
            self.own_rank(rank): SocketName(*names, rank, num_ranks) for rank in self._ranks[1:]
        }

    def of_rank(self, node: Node, rank: int) -> Node:
        return node if rank == self.share.rank else Node(f"{node}{_RANK}{rank}")

    def own_rank(self, rank: int) -> Node:
        return self.of_rank(Node(f"{HOST_PREFIX}{digest(self._greeting.engine_id)}"), rank)

    def admit(self, host: str, port: int) -> Node:
        """A node for one rank of an instance that a request names. Thread-safe."""
        node, now = Node(f"guest {Address(host, port)}"), self._clock()
        with self._admitting:
            known = {n: guest for n, guest in self._guests.items() if guest[1] > now and n != node}
            while len(known) >= _MAX_GUESTS:
                del known[next(iter(known))]
            self._guests = known | {node: ((host, port), now + _GUEST_SECONDS)}
        return node

    def node_on_host(self, engine_id: str) -> Node | None:
        """The engine with that id, if it is on this host."""
        node = Node(f"{HOST_PREFIX}{digest(engine_id)}") if engine_id else None
        return node if node in self._host_sockets else None

    def socket_path(self, node: str) -> str | None:
        """Path of the socket of a peer on this host, else ``None``."""
        name = self._host_sockets.get(Node(node)) or self._own_ranks.get(Node(node))
        return self._host.address(name) if name is not None and self._host is not None else None

    @property
    def num_ranks(self) -> int:
        return self._greeting.num_ranks

    def prepare(self) -> None:
        """Scan the folder and resolve names. A name that does not resolve is skipped."""
        if not self._is_looked_up:
            self._resolve_names()
        self._scan_folder()

    def _resolve_names(self) -> None:
        self._next_look = self._clock() + _SECONDS_BETWEEN_LOOKS
        found: dict[Node, Endpoint] = {}
        for address in self._addresses:
            for host in _hosts(address):
                found[Node(str(Address(host, address.port)))] = host, address.port
        self._endpoints = {
            self.of_rank(node, rank): (host, port + rank)
            for node, (host, port) in sorted(found.items())[:MAX_PEERS]
            for rank in self._ranks
        }

    def is_current(self) -> bool:
        return self._is_looked_up and (self._host is None or self._host.is_as_seen)

    @property
    def _is_looked_up(self) -> bool:
        is_fixed = self._endpoints or not self._addresses
        if is_fixed and not any(address.is_dns for address in self._addresses):
            return True
        return self._clock() < self._next_look

    def _scan_folder(self) -> None:
        if self._host is None:
            return
        own = digest(self._greeting.engine_id)
        wanted = digest(self._config.namespace), self.share.rank, self._greeting.num_ranks
        found = [name for name in self._host.engines(*wanted) if name.engine != own]
        self._host_sockets = {
            self.of_rank(Node(f"{HOST_PREFIX}{name.engine}"), rank): replace(name, rank=rank)
            for name in found
            for rank in self._ranks
        }

    def node_of(self, key: bytes) -> Node | None:
        """The owner of ``key`` at the only peer; ``None`` if there are several peers or none."""
        nodes = self.peers()
        return self.of_rank(nodes[0], self.share.owner(key)) if len(nodes) == 1 else None

    def peers(self) -> tuple[Node, ...]:
        """Peers on this host and configured peers, without distrusted ones."""
        now = self._clock()
        return tuple(
            node
            for node in (*self._host_sockets, *self._endpoints)
            if _RANK not in node
            and node not in self._own
            and self._distrusted.get(node, now) <= now
        )

    def distrust(self, node: Node) -> None:
        """``node`` sent spoiled values: exclude it for a while. Thread-safe."""
        engine = Node(node.partition(_RANK)[0])
        self._distrusted[engine] = self._clock() + _DISTRUST_SECONDS

    def nodes(self) -> tuple[Node, ...]:
        now, peers = self._clock(), self.peers()
        ranks = (self.of_rank(node, rank) for node in peers for rank in self._ranks[1:])
        guests = (node for node, (_, until) in self._guests.items() if until > now)
        return (*peers, *ranks, *guests)

    def connect(self, node: Node, max_bytes: int, *checks: Check) -> Client:
        if (guest := self._guests.get(node)) is not None:
            return self._dialer.connect(*guest[0], max_bytes, *checks)
        checks = partial(self._greet, node), *checks
        name = self._host_sockets.get(node) or self._own_ranks.get(node)
        if name is not None and self._host is not None:
            return self._connect_on_host(self._host, name, max_bytes, *checks)
        if (endpoint := self._endpoints.get(node)) is not None:
            return self._dialer.connect(*endpoint, max_bytes, *checks)
        raise OSError("it is no longer a peer")

    def _greet(self, node: Node, client: Client) -> None:
        disable_reconnect(client)  # a redialled connection would not be greeted
        found = Greeting.parse(client.execute_command("PEER"))
        if found.engine_id == self._greeting.engine_id and node not in self._own_ranks:
            self._own.add(node)
            raise ValueError("it is this engine itself")
        if found.num_ranks != self._greeting.num_ranks:
            ranks = f"{found.num_ranks} ranks, this instance has {self._greeting.num_ranks}"
            raise ValueError(f"it has {ranks}: share through Redis instead")

    def _connect_on_host(
        self, host: HostFolder, name: SocketName, max_bytes: int, *checks: Check
    ) -> Client:
        address = replace(self._config.address, path=host.address(name))
        seconds = self._config.connect_timeout_seconds, self._config.read_timeout_seconds
        try:
            return Dialer(address, *seconds, self._clock).connect("", 0, max_bytes, *checks)
        except CONNECTION_ERRORS:
            host.remove_if_dead(name)
            raise


def _hosts(address: Address) -> list[str]:
    if not address.is_dns:
        return [address.host]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(place[0]) for *_, place in found})
