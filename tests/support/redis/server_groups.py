"""Starts several real servers together: a cluster, or a master that sentinels watch.

It also makes certificates for servers with TLS.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis

from tests.support.clock import wait_until
from tests.support.redis.servers import PORTS_END, Server, free_port, oldest_binary, running_server

NUM_SLOTS = 16384
MASTER = "cache"
# From a node's port to that of the cluster's bus, unless it is told another.
_BUS_OFFSET = 10_000


@dataclass(frozen=True)
class Cluster:
    """Masters without replicas, which share the slots evenly and in order."""

    masters: list[Server]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{m.port}" for m in self.masters)

    def flush(self) -> None:
        """Empty all masters."""
        for master in self.masters:
            with master.client() as client:
                client.flushall()

    def wait_whole(self) -> None:
        """Wait until all masters serve: one that came back keeps the others waiting a while."""
        for master in self.masters:
            with master.client() as client:
                wait_until(
                    partial(_is_whole, client, len(self.masters)), "the cluster is not whole"
                )

    def owner(self, slot: int) -> Server:
        """The master that a slot belonged to at first."""
        return self.masters[min(slot * len(self.masters) // NUM_SLOTS, len(self.masters) - 1)]

    def migrate(self, slot: int, target: Server, source: Server | None = None) -> None:
        """Move a slot with all its keys from ``source``, or its first owner, to ``target``, keys
        first, as redis-cli does."""
        source = source or self.owner(slot)
        with source.client() as old, target.client() as new:
            ids = {"old": old.cluster("MYID").decode(), "new": new.cluster("MYID").decode()}
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids["old"])
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids["new"])
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids["new"])


@contextmanager
def running_cluster(binary: str, num_masters: int = 3) -> Iterator[Cluster]:
    """A cluster that serves all slots, stopped afterwards."""
    settings = {
        "cluster-enabled": "yes",
        # On a busy machine nodes that hear nothing of two others for a second would serve nobody.
        "cluster-node-timeout": "15000",
        # What is left of a cluster that lost a master must go on serving its slots.
        "cluster-require-full-coverage": "no",
    }
    is_old = binary == oldest_binary()  # before Redis 7 nobody could name the bus's port
    with ExitStack() as stack:
        masters = []
        for _ in range(num_masters):
            port = _port_with_bus() if is_old else free_port()
            bus = {} if is_old else {"cluster-port": str(free_port())}
            server = running_server(binary, {**settings, **bus}, port=port)
            masters.append(stack.enter_context(server))
        _join(masters)
        yield Cluster(masters)


@contextmanager
def running_left_behind(binary: str, owner: Server) -> Iterator[Server]:
    """A node that hears nothing of its cluster, as one with an old ``nodes.conf`` on a new network:
    by its map ``owner`` has all slots."""
    node = f"127.0.0.1:{owner.port}@1"  # a bus port that nobody answers on
    lines = [
        f"{'a' * 40} 127.0.0.1:0@0 myself,master - 0 0 0 connected",
        f"{'b' * 40} {node} master - 0 0 1 connected 0-{NUM_SLOTS - 1}",
        "vars currentEpoch 1 lastVoteEpoch 0",
    ]
    nodes = owner.folder / "left-behind.conf"
    nodes.write_text("\n".join(lines) + "\n")
    settings = {"cluster-enabled": "yes", "cluster-config-file": str(nodes)}
    with running_server(binary, settings, port=_port_with_bus()) as server:
        yield server


def _port_with_bus() -> int:
    """A free port whose cluster bus has a free port too."""
    while True:
        bus = (port := free_port()) + _BUS_OFFSET
        with socket.socket() as probe, contextlib.suppress(OSError):  # in use
            if bus < PORTS_END:
                probe.bind(("127.0.0.1", bus))
                return port


def _join(masters: list[Server]) -> None:
    cluster = Cluster(masters)
    slots: dict[int, list[int]] = {master.port: [] for master in masters}
    for slot in range(NUM_SLOTS):
        slots[cluster.owner(slot).port].append(slot)
    first = masters[0]
    for epoch, master in enumerate(masters, start=1):
        with master.client() as client:
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
            client.execute_command("CLUSTER ADDSLOTS", *slots[master.port])
            if master is not first:
                bus = first.settings.get("cluster-port", first.port + _BUS_OFFSET)
                client.execute_command("CLUSTER MEET", "127.0.0.1", first.port, bus)
    cluster.wait_whole()


def _is_whole(client: redis.Redis, size: int) -> bool:
    info = client.cluster("INFO")
    wanted = {"state": "ok", "slots_ok": str(NUM_SLOTS), "known_nodes": str(size)}
    return all(info[f"cluster_{name}"] == value for name, value in wanted.items())


@dataclass(frozen=True)
class Watched:
    """A master, its replica, and the sentinels that watch both under the name ``MASTER``."""

    master: Server
    replica: Server
    sentinels: list[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://{hosts}/{MASTER}"

    def master_port(self) -> int:
        """The port of the server that the sentinels name as master now."""
        with self.sentinels[0].client() as client:
            address = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER)
        return int(address[1])


@contextmanager
def running_sentinels(binary: str, num_sentinels: int = 3) -> Iterator[Watched]:
    """A master, a replica in step with it, and sentinels that know each other."""
    quorum = num_sentinels // 2 + 1
    with ExitStack() as stack:
        master = stack.enter_context(running_server(binary, {"repl-diskless-sync-delay": "0"}))
        replica = stack.enter_context(
            running_server(binary, {"replicaof": f"127.0.0.1 {master.port}"})
        )
        with replica.client() as client:
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up", "no replica"
            )
        watch = {
            "sentinel monitor": f"{MASTER} 127.0.0.1 {master.port} {quorum}",
            "sentinel down-after-milliseconds": f"{MASTER} 500",
            "sentinel failover-timeout": f"{MASTER} 2000",
        }
        sentinels = [
            stack.enter_context(running_server(binary, watch, arguments=("--sentinel",)))
            for _ in range(num_sentinels)
        ]
        watched = Watched(master, replica, sentinels)
        for sentinel in sentinels:
            with sentinel.client() as client:
                wait_until(partial(_sees_all, client, num_sentinels), "sentinels did not meet")
        yield watched


def _sees_all(client: redis.Redis, num_sentinels: int) -> bool:
    try:
        state = client.execute_command("SENTINEL MASTER", MASTER)
    except redis.TimeoutError:
        return False  # starved
    fields = dict(zip(state[::2], state[1::2], strict=True)) if isinstance(state, list) else state
    named = {k.decode() if isinstance(k, bytes) else k: v for k, v in fields.items()}
    others, replicas = named["num-other-sentinels"], named["num-slaves"]
    return int(others) == num_sentinels - 1 and int(replicas) == 1


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and a certificate that it signed, for server and client alike."""

    ca: Path
    certificate: Path
    key: Path
    # Self-signed: no peer trusts it.
    stranger_certificate: Path


@contextmanager
def certificates() -> Iterator[Certificates]:
    """Certificates made with the openssl program, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lmc-tls-"))
    try:
        ca, ca_key = _self_signed(folder, "ca")
        request, key = folder / "peer.csr", folder / "peer.key"
        _openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1",
                 "-keyout", key, "-out", request)  # fmt: skip
        extensions = folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial",
                 "-days", "1", "-extfile", extensions, "-out", folder / "peer.crt")  # fmt: skip
        stranger, _ = _self_signed(folder, "stranger")
        yield Certificates(ca, folder / "peer.crt", key, stranger)
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_tls_server(
    binary: str, pem: Certificates, settings: Mapping[str, str] | None = None, *, asks_clients: bool
) -> Iterator[Server]:
    """A server that speaks TLS only. ``asks_clients``: for a certificate of theirs."""
    tls = {
        "port": "0",
        "tls-cert-file": str(pem.certificate),
        "tls-key-file": str(pem.key),
        "tls-ca-cert-file": str(pem.ca),
        "tls-auth-clients": "yes" if asks_clients else "no",
    }
    with running_server(binary, {**tls, **(settings or {})}, tls=pem) as server:
        yield server


def _self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
             f"/CN={name}", "-keyout", key, "-out", certificate)  # fmt: skip
    return certificate, key


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
