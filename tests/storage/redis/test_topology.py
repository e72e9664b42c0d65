"""Cluster, Sentinel, TLS and ACL, each on real servers."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import Thread

import pytest
import redis

from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.admin import RedisAdmin, RedisAdminError
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.client.dial import (
    SMALL_BYTES,
    AuthenticationError,
    Client,
    UnreachableError,
    key_slot,
)
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.topology import SentinelTopology, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag, probe_key
from tests.support.clock import wait_until
from tests.support.redis.chunks import (
    PARTS,
    Ends,
    chunk_data,
    chunk_key,
    config,
    count_found,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.server_groups import (
    MASTER,
    NUM_SLOTS,
    Certificates,
    Cluster,
    Watched,
    certificates,
    running_cluster,
    running_left_behind,
    running_sentinels,
    running_tls_server,
)
from tests.support.redis.servers import Server, free_port, running_server

# A master waits five seconds for further replicas before it sends its content, by default.
AT_ONCE = {"repl-diskless-sync-delay": "0"}


def holds(tier: RedisTier, indices: range | list[int]) -> bool:
    """Whether all are hits; wrong bytes fail the test at once."""
    hits, data = get_all(tier, indices)
    for i, hit, found in zip(indices, hits, data, strict=True):
        assert not hit or found == chunk_data(i)
    return all(hits)


def slot_of(index: int) -> int:
    return int(key_slot(chunk_tag("default", chunk_key(index))))


@pytest.fixture(
    scope="module",
    params=["valkey", "oldest_redis", pytest.param("redis", marks=pytest.mark.redis_server)],
)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_path"))


class TestCluster:
    @pytest.fixture(scope="class")
    def shared_cluster(self, binary: str) -> Iterator[Cluster]:
        with running_cluster(binary) as cluster:
            yield cluster

    @pytest.fixture
    def cluster(self, shared_cluster: Cluster) -> Cluster:
        shared_cluster.wait_whole()
        shared_cluster.flush()
        return shared_cluster

    def test_a_slot_moves_in_the_middle_of_traffic(self, cluster: Cluster) -> None:
        slot = slot_of(0)
        with open_tier(cluster.url) as tier:
            put_all(tier, range(10))
            assert holds(tier, range(10))
            target = next(m for m in cluster.masters if m is not cluster.owner(slot))
            cluster.migrate(slot, target)
            try:
                wait_until(lambda: holds(tier, range(10)), "the tier did not follow the slot")
            finally:
                cluster.migrate(slot, cluster.owner(slot), target)
            wait_until(lambda: holds(tier, range(10)), "the tier did not follow the slot back")

    def test_a_tool_reads_a_value_that_moves_to_another_node_as_missing(
        self, cluster: Cluster
    ) -> None:
        with open_tier(cluster.url) as tier:
            assert all(put_all(tier, range(10)))
        slot = slot_of(0)
        home = cluster.owner(slot)
        away = next(m for m in cluster.masters if m is not home)
        with home.client() as old, away.client() as new:
            ids = [client.cluster("MYID").decode() for client in (old, new)]
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            key, *_ = old.execute_command("CLUSTER GETKEYSINSLOT", slot, 1)
            old.execute_command("MIGRATE", "127.0.0.1", away.port, key, 0, 5000)
        try:
            with RedisAdmin(config(cluster.url)) as admin:
                values = [value for *_, value in admin.payloads("default")]
            assert values.count(None) == 1
            assert len(values) == sum(map(num_values, cluster.masters))
        finally:
            cluster.migrate(slot, away)
            cluster.migrate(slot, home, away)

    @pytest.fixture
    def left_behind(self, binary: str, cluster: Cluster) -> Iterator[Server]:
        """A node cut off from the cluster, whose slot map is wrong for two thirds of the slots."""
        with running_left_behind(binary, cluster.masters[0]) as server:
            yield server

    def test_a_node_with_an_old_map_is_asked_once(
        self, cluster: Cluster, left_behind: Server
    ) -> None:
        """The node comes first in the URL; an owner missing from its map comes second."""
        url = f"redis+cluster://127.0.0.1:{left_behind.port},127.0.0.1:{cluster.masters[1].port}"
        with open_tier(url) as tier:
            wait_until(lambda: all(put_all(tier, range(30))), "chunks were not written")
            wait_until(lambda: holds(tier, range(30)), "chunks were not found")
        with open_tier(url) as tier:
            wait_until(lambda: holds(tier, range(30)), "chunks were not found")
        lookup = RedisLookup(config(url), [PARTS])
        keys = [chunk_key(i) for i in range(30)]
        wait_until(
            lambda: lookup.exists_prefix(keys, time.monotonic() + 5.0) == 30, "not looked up"
        )
        lookup.close()
        assert num_looks(left_behind) <= 4  # about once by each of two tiers and the lookup

    def test_a_lost_master_costs_look_ups_its_own_chunks_only(self, cluster: Cluster) -> None:
        """The master is silent, then gone. The connections to the others stay."""
        lost = cluster.masters[1]
        elsewhere = [i for i in range(40) if cluster.owner(slot_of(i)) is not lost]
        keys = [chunk_key(i) for i in elsewhere]
        a_lost_one = next(chunk_key(i) for i in range(40) if i not in elsewhere)
        with open_tier(cluster.url) as tier:
            put_all(tier, range(40))
        lookup = RedisLookup(config(cluster.url), [PARTS])

        def ask(keys: list[bytes]) -> int:
            return lookup.exists_prefix(keys, time.monotonic() + 1.0)

        wait_until(lambda: ask([*keys, a_lost_one]) == len(keys) + 1, "no answer at first")
        before = [connections(master) for master in cluster.masters if master is not lost]
        assert lost.process is not None
        try:
            lost.process.send_signal(signal.SIGSTOP)
            for _ in range(3):
                assert ask([*keys, a_lost_one]) == len(keys)
            lost.process.send_signal(signal.SIGCONT)
            lost.kill()
            for _ in range(3):
                assert ask([*keys, a_lost_one]) == len(keys)
        finally:
            lost.kill()
            lost.start()
        after = [connections(master) for master in cluster.masters if master is not lost]
        assert all(ids <= now for ids, now in zip(before, after, strict=True))
        lookup.close()

    def test_a_look_up_follows_a_redirected_slot(self, cluster: Cluster) -> None:
        """Only the redirection makes the lookup read the slot map again."""
        lookup = RedisLookup(config(cluster.url), [PARTS])
        slot = slot_of(7)
        away = next(master for master in cluster.masters if master is not cluster.owner(slot))

        def finds() -> bool:
            return lookup.exists_prefix([chunk_key(7)], time.monotonic() + 0.5) == 1

        with open_tier(cluster.url) as tier:
            put_all(tier, [7])
        wait_until(finds, "not found at first")
        cluster.migrate(slot, away)
        try:
            wait_until(finds, "the lookup goes on asking the old master")
        finally:
            cluster.migrate(slot, cluster.owner(slot), away)
            lookup.close()

    def test_a_silent_master_delays_no_writes_to_the_others(self, cluster: Cluster) -> None:
        """Each master has its own writer, even with one connection. Their time-out is long."""
        silent = cluster.masters[1]
        there = [i for i in range(40) if cluster.owner(slot_of(i)) is silent]
        elsewhere = [i for i in range(40) if i not in there]
        with open_tier(cluster.url, num_connections=1, write_timeout_seconds=600.0) as tier:
            wait_until(lambda: all(put_all(tier, [there[0], elsewhere[0]])), "not writable")
            assert silent.process is not None
            silent.process.send_signal(signal.SIGSTOP)
            try:
                ends = Ends()
                for i in there:
                    assert tier.put(chunk_key(i), memoryview(chunk_data(i)), ends, i)
                assert put_all(tier, elsewhere) == [True] * len(elsewhere)
                assert ends.results == []
            finally:
                silent.process.send_signal(signal.SIGCONT)
            assert ends.wait(len(there)) == [True] * len(there)

    def test_a_silent_master_delays_no_reads_of_the_others(self, cluster: Cluster) -> None:
        """The time-out is long, and several reads of its chunks come first."""
        silent = cluster.masters[1]
        there = [i for i in range(40) if cluster.owner(slot_of(i)) is silent]
        elsewhere = [i for i in range(40) if i not in there]
        with open_tier(cluster.url, read_timeout_seconds=600.0) as tier:
            assert put_all(tier, range(40)) == [True] * 40
            assert holds(tier, range(40))
            assert silent.process is not None
            silent.process.send_signal(signal.SIGSTOP)
            reads = [Thread(target=get_all, args=(tier, [*there, 0], 600.0)) for _ in range(4)]
            try:
                for read in reads:
                    read.start()
                for _ in range(10):
                    assert holds(tier, elsewhere)
            finally:
                silent.process.send_signal(signal.SIGCONT)
            for read in reads:
                read.join(60.0)
                assert not read.is_alive()

    @pytest.mark.parametrize("trouble", ["unmapped", "migrating"])
    @pytest.mark.parametrize("whose", ["a chunk's", "the probe's"])
    def test_a_slot_in_trouble_costs_its_own_chunks_only(
        self, cluster: Cluster, trouble: str, whose: str
    ) -> None:
        slot = slot_of(7) if whose == "a chunk's" else key_slot(probe_key("default"))
        others = [i for i in range(30) if slot_of(i) != slot]
        home = cluster.owner(slot)
        away = next(m for m in cluster.masters if m is not home)
        with home.client() as owner, away.client() as target:
            if trouble == "unmapped":
                owner.execute_command("CLUSTER DELSLOTS", slot)
            else:
                ids = [c.cluster("MYID").decode() for c in (owner, target)]
                target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
                owner.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            try:
                with open_tier(cluster.url) as tier:
                    ends = put_all(tier, [*others, 7])
                    assert ends.count(True) == len(others) + (slot_of(7) != slot)
                    wait_until(lambda: holds(tier, others), "the others are not readable")
                    for _ in range(10):  # no other chunk's success comes between
                        assert get_all(tier, [7])[0] == [slot_of(7) != slot]
                    assert holds(tier, others)
                    states = {state for _, state in tier.stats().servers}
                    assert states == {CircuitState.CLOSED}
                lookup = RedisLookup(config(cluster.url), [PARTS])
                keys = [chunk_key(i) for i in [*others, 7]]
                until = time.monotonic() + 5.0
                assert lookup.exists_prefix(keys, until) == len(others) + (slot_of(7) != slot)
                asked = AnyLookup({Tier.REDIS: lookup}, time.monotonic)
                assert len(asked.find(keys, until)) == len(others)
                assert asked.absent is None, "a node that has lost the slot knows nothing of it"
                lookup.close()
            finally:
                if trouble == "unmapped":
                    owner.execute_command("CLUSTER ADDSLOTS", slot)
                else:
                    owner.execute_command("CLUSTER SETSLOT", slot, "STABLE")
                    target.execute_command("CLUSTER SETSLOT", slot, "STABLE")

    def test_a_node_that_serves_no_key_is_blamed(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        down = cluster.owner(slot_of(0))
        slot = slot_without_chunks(cluster, down)
        there = [i for i in range(40) if cluster.owner(slot_of(i)) is down]
        elsewhere = [i for i in range(40) if i not in there]
        lookup = RedisLookup(config(cluster.url), [PARTS])

        def num_found(indices: list[int]) -> int:
            return lookup.exists_prefix([chunk_key(i) for i in indices], time.monotonic() + 1.0)

        def is_open(tier: RedisTier) -> bool:
            assert not any(get_all(tier, there)[0])
            assert num_found(there) == 0
            states = {node.rpartition(":")[2]: state for node, state in tier.stats().servers}
            is_closed = states.pop(str(down.port)) is CircuitState.CLOSED
            assert set(states.values()) == {CircuitState.CLOSED}
            return not is_closed

        def num_told() -> int:
            return sum("The cluster is down" in record.getMessage() for record in caplog.records)

        def num_dials() -> int:
            return int(client.info("stats")["total_connections_received"])

        quick = partial(open_tier, cluster.url, backoff_max_seconds=0.1)
        with quick() as tier, down.client() as client, caplog.at_level(logging.INFO):
            assert all(put_all(tier, range(40)))
            wait_until(lambda: num_found(elsewhere + there) == 40, "no answer at first")
            with lacking_an_owner(down, slot):
                wait_until(lambda: is_open(tier) and num_told() == 2, "nobody says why it is left")
                assert holds(tier, elsewhere)
                assert num_found(elsewhere) == len(elsewhere)
                before = num_dials()
                wait_until(lambda: num_dials() >= before + 5, "nobody looks whether it is back")
                assert is_open(tier), "a connection alone counts for success"
                assert num_told() == 2, "once by the tier, once by the lookup"
            wait_until(lambda: holds(tier, range(40)), "it is not read again")
            wait_until(lambda: num_found(elsewhere + there) == 40, "it is not asked again")
        lookup.close()

    @pytest.mark.parametrize("method", ["values", "payloads"])
    def test_a_tool_ends_with_the_words_of_a_node_that_serves_no_key(
        self, cluster: Cluster, method: str
    ) -> None:
        down = cluster.owner(slot_of(0))
        with open_tier(cluster.url) as tier:
            assert all(put_all(tier, [0]))
        with lacking_an_owner(down, slot_without_chunks(cluster, down)):
            admin = RedisAdmin(config(cluster.url))
            with admin, pytest.raises(RedisAdminError, match="The cluster is down"):
                list(getattr(admin, method)("default"))

    def test_writes_pause_at_a_node_that_serves_reads_alone(self, cluster: Cluster) -> None:
        down = cluster.owner(slot_of(0))
        slot = slot_without_chunks(cluster, down)
        *known, new = [i for i in range(40) if cluster.owner(slot_of(i)) is down]
        with open_tier(cluster.url, backoff_max_seconds=0.1) as tier:
            assert all(put_all(tier, known))
            with down.client() as client:
                client.config_set("cluster-allow-reads-when-down", "yes")
            with lacking_an_owner(down, slot):
                assert put_all(tier, [new]) == [False]
                assert tier.stats().writes_paused
                assert holds(tier, known)
                assert {state for _, state in tier.stats().servers} == {CircuitState.CLOSED}
            wait_until(lambda: put_all(tier, [new]) == [True], "writes do not resume")
            assert not tier.stats().writes_paused


def slot_without_chunks(cluster: Cluster, owner: Server) -> int:
    """A slot of ``owner`` without the first chunks, and without the probe's key."""
    taken = {*map(slot_of, range(40)), key_slot(probe_key("default"))}
    return next(s for s in range(NUM_SLOTS) if cluster.owner(s) is owner and s not in taken)


@contextmanager
def lacking_an_owner(node: Server, slot: int) -> Iterator[None]:
    """The node hears that ``slot`` belongs to nobody, and so serves no slot, as by default."""
    with node.client() as client:
        client.config_set("cluster-require-full-coverage", "yes")
        client.execute_command("CLUSTER DELSLOTS", slot)
        try:
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == "fail", "it serves")
            yield
        finally:
            client.execute_command("CLUSTER ADDSLOTS", slot)
            client.config_set("cluster-require-full-coverage", "no")
            client.config_set("cluster-allow-reads-when-down", "no")


def num_values(server: Server) -> int:
    with server.client() as client:
        return len(client.keys("lmc:*-*"))


def num_looks(server: Server) -> int:
    """How often the server was asked for its slot map."""
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if name.startswith("cmdstat_cluster"))


def connections(server: Server) -> set[str]:
    """Ids of connections whose last command was EXISTS, or HELLO: the last check of new ones."""
    with server.client() as client:
        return {c["id"] for c in client.client_list() if c["cmd"] in ("exists", "hello")}


def are_asked(silent: list[socket.socket]) -> bool:
    """Whether anybody has connected since the last call."""
    num_accepted = 0
    for one in silent:
        one.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                one.accept()[0].close()
                num_accepted += 1
    return num_accepted > 0


Change = Callable[[Server, Server, ExitStack], None]


def make_replica(former: Server, master: Server, stack: ExitStack) -> None:
    with former.client() as client:
        client.replicaof("127.0.0.1", master.port)


def hang(former: Server, master: Server, stack: ExitStack) -> None:
    """It still accepts connections, but answers nothing."""
    assert former.process is not None
    former.process.send_signal(signal.SIGSTOP)
    stack.callback(former.process.send_signal, signal.SIGCONT)


def die(former: Server, master: Server, stack: ExitStack) -> None:
    former.kill()


def load_for_long(former: Server, master: Server, stack: ExitStack) -> None:
    with former.client() as client:
        client.mset({f"key {i}": b"x" * 100 for i in range(10_000)})
        client.save()
    former.kill()
    path = former.folder / "server.conf"
    slowly = "key-load-delay 10000\nloading-process-events-interval-bytes 1024\n"
    path.write_text(path.read_text() + slowly)
    former.process = subprocess.Popen([former.binary, str(path)], stdout=subprocess.DEVNULL)
    stack.callback(former.kill)
    wait_until(partial(is_loading, former), "it has loaded its data already")


def is_loading(server: Server) -> bool:
    try:
        with server.client() as client:
            client.ping()
    except redis.ConnectionError as error:
        return isinstance(error, redis.BusyLoadingError)
    return False


@contextmanager
def sentinels_of(binary: str, *servers: Server) -> Iterator[str]:
    """The addresses of sentinels, one per server: each names its own as the master, for good."""
    with ExitStack() as stack:
        ports = []
        for server in servers:
            watch = {"sentinel monitor": f"{MASTER} 127.0.0.1 {server.port} 9"}
            sentinel = running_server(binary, watch, arguments=("--sentinel",))
            ports.append(stack.enter_context(sentinel).port)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


def dial_by_sentinel(hosts: str) -> None:
    url = f"redis+sentinel://{hosts}/{MASTER}"
    topology = SentinelTopology(config(url, read_timeout_seconds=2.0), time.monotonic)
    topology.connect(topology.nodes()[0], SMALL_BYTES).close()


def has_another(server: Server, than: set[str]) -> bool:
    return not connections(server) <= than


def expect_another_master(binary: str, happens: Change) -> None:
    """The sentinel asked first goes on naming ``former``, the server that ``happens`` changes."""
    with ExitStack() as stack:
        former, master = (stack.enter_context(running_server(binary, AT_ONCE)) for _ in range(2))
        hosts = stack.enter_context(sentinels_of(binary, former, master))
        url = f"redis+sentinel://{hosts}/{MASTER}"
        short = partial(open_tier, url, read_timeout_seconds=2.0, write_timeout_seconds=2.0)
        with short(backoff_max_seconds=0.2) as tier:
            assert put_all(tier, [0]) == [True]
            assert holds(tier, [0])
            happens(former, master, stack)
            wait_until(lambda: put_all(tier, [1]) == [True], "writes do not resume")
            wait_until(lambda: holds(tier, [1]), "reads do not resume")
        with short(connect_timeout_seconds=5.0) as later:
            assert put_all(later, [2]) == [True], "its first connection is to the master"


class TestSentinel:
    @pytest.fixture
    def watched(self, binary: str) -> Iterator[Watched]:
        with running_sentinels(binary) as watched:
            yield watched

    def test_a_failover_in_the_middle_of_traffic(self, watched: Watched) -> None:
        with open_tier(watched.url) as tier:
            put_all(tier, range(10))
            assert holds(tier, range(10))
            with watched.master.client() as client:
                assert client.wait(1, 5000) == 1
            watched.master.kill()
            wait_until(lambda: holds(tier, range(10)), "the tier did not find the new master")
            # The tier may have asked another sentinel; this one learns of the failover by gossip.
            wait_until(
                lambda: watched.master_port() == watched.replica.port, "another master was named"
            )
            wait_until(lambda: put_all(tier, [20]) == [True], "no writes to the new master")
            with watched.replica.client() as client:
                assert client.exists(*client.keys(f"*{chunk_key(20).hex()}*-*"))

    def test_a_silent_sentinel_is_asked_once(self, binary: str) -> None:
        """If asked again, it would delay each new connection, as those made after late reads."""
        with ExitStack() as stack:
            master = stack.enter_context(running_server(binary))
            host = stack.enter_context(sentinels_of(binary, master))
            silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
            first, last = (f"127.0.0.1:{one.getsockname()[1]}" for one in silent)
            url = f"redis+sentinel://{first},{host},{last}/{MASTER}"
            with open_tier(url, read_timeout_seconds=0.5) as tier, master.client() as client:
                wait_until(lambda: put_all(tier, [0]) == [True] and holds(tier, [0]), "no hit")
                assert are_asked(silent)
                for _ in range(2):
                    wait_until(lambda: holds(tier, [0]), "reads do not resume")
                    before = connections(master)
                    client.client_pause(200)
                    assert get_all(tier, [0], 0.05)[0] == [False]
                    wait_until(partial(has_another, master, before), "nothing connects again")
            assert not are_asked(silent)

    @pytest.mark.parametrize("misled_by", [make_replica, hang])
    def test_a_sentinel_that_has_missed_a_failover_is_not_believed(
        self, binary: str, misled_by: Change
    ) -> None:
        expect_another_master(binary, misled_by)

    def test_a_sentinel_that_names_a_loading_server_is_not_believed(self, valkey_path: str) -> None:
        expect_another_master(valkey_path, load_for_long)

    @pytest.mark.parametrize("is_master_first", [True, False])
    @pytest.mark.parametrize("trouble", [die, hang])
    def test_a_masters_refusal_counts_most(
        self, binary: str, trouble: Change, is_master_first: bool
    ) -> None:
        """It leaves the circuit closed, so existing connections go on, and it says what to fix."""
        with ExitStack() as stack:
            master = stack.enter_context(running_server(binary, {"requirepass": "secret"}))
            former = stack.enter_context(running_server(binary))
            trouble(former, master, stack)
            both = (master, former) if is_master_first else (former, master)
            hosts = stack.enter_context(sentinels_of(binary, *both))
            with pytest.raises(AuthenticationError):
                dial_by_sentinel(f"{hosts},127.0.0.1:{free_port()}")

    def test_what_happens_to_the_server_counts_more_than_sentinels(self, binary: str) -> None:
        """A dead server opens the circuit at once."""
        with ExitStack() as stack:
            dead = stack.enter_context(running_server(binary))
            dead.kill()
            hosts = stack.enter_context(sentinels_of(binary, dead))
            watch = {"sentinel monitor": f"{MASTER} 127.0.0.1 {dead.port} 9"}
            locked = running_server(binary, watch | {"requirepass": "x"}, arguments=("--sentinel",))
            closed = stack.enter_context(locked)
            with pytest.raises(AuthenticationError):
                dial_by_sentinel(f"127.0.0.1:{closed.port}")
            with pytest.raises(UnreachableError):
                dial_by_sentinel(f"{hosts},127.0.0.1:{closed.port}")

    def test_what_a_sentinel_says_counts_more_than_that_another_is_away(self, binary: str) -> None:
        away = f"127.0.0.1:{free_port()}"
        with (
            running_server(binary, arguments=("--sentinel",)) as sentinel,
            pytest.raises(ValueError, match="names no master"),
        ):
            dial_by_sentinel(f"{away},127.0.0.1:{sentinel.port}")

    def test_the_master_is_greeted_and_no_replica(self, binary: str) -> None:
        greeted: list[int] = []

        def greet(client: Client) -> None:
            greeted.append(client.info("server")["tcp_port"])

        with ExitStack() as stack:
            master = stack.enter_context(running_server(binary, AT_ONCE))
            follows = {"replicaof": f"127.0.0.1 {master.port}"}
            replica = stack.enter_context(running_server(binary, follows))
            hosts = stack.enter_context(sentinels_of(binary, replica, master))
            settings = config(f"redis+sentinel://{hosts}/{MASTER}")
            topology = make_topology(settings, time.monotonic)
            servers = Servers(settings, topology, time.monotonic, greet=greet)
            for _ in range(2):
                servers.connect(topology.nodes()[0]).close()
        assert greeted == [master.port]

    def test_a_replica_serves_reads_while_nobody_names_a_master(self, binary: str) -> None:
        with ExitStack() as stack:
            master = stack.enter_context(running_server(binary, AT_ONCE))
            follows = {"replicaof": f"127.0.0.1 {master.port}"}
            replica = stack.enter_context(running_server(binary, follows))
            with open_tier(master.url) as tier:
                assert put_all(tier, [0]) == [True]
            hosts = stack.enter_context(sentinels_of(binary, replica, replica))
            url = f"redis+sentinel://{hosts}/{MASTER}"
            with open_tier(url) as tier:
                wait_until(lambda: holds(tier, [0]), "no hit")
                assert put_all(tier, [1]) == [False]


class UnusableError(Exception):
    """What a check says of a connection."""


@contextmanager
def urls_by_kind(binary: str, kind: str) -> Iterator[str]:
    with ExitStack() as stack:
        if kind == "cluster":
            yield stack.enter_context(running_cluster(binary)).url
            return
        server = stack.enter_context(running_server(binary, AT_ONCE))
        if kind == "one":
            yield server.url
            return
        if kind == "replica":
            follows = {"replicaof": f"127.0.0.1 {server.port}"}
            server = stack.enter_context(running_server(binary, follows))
        yield f"redis+sentinel://{stack.enter_context(sentinels_of(binary, server))}/{MASTER}"


@pytest.mark.parametrize("kind", ["one", "master", "replica", "cluster"])
def test_a_connection_that_fails_a_check_is_closed(valkey_path: str, kind: str) -> None:
    """Each is checked; where there is only a replica, it is connected to twice."""
    clients: list[Client] = []  # kept: redis-py closes what nobody refers to
    sockets: list[socket.socket] = []
    num_connections = 2 if kind == "replica" else 1

    def check(client: Client) -> None:
        client.ping()
        clients.append(client)
        (connection,) = client.connection_pool._available_connections
        sockets.append(connection._sock.sock)
        if len(sockets) == num_connections:
            raise UnusableError

    with urls_by_kind(valkey_path, kind) as url:
        topology = make_topology(config(url), time.monotonic)
        topology.prepare()
        with pytest.raises(UnusableError):
            topology.connect(topology.nodes()[0], SMALL_BYTES, check)
    assert [sock.fileno() for sock in sockets] == [-1] * num_connections


@pytest.mark.redis_server
class TestTls:
    @pytest.fixture(scope="class")
    def pem(self) -> Iterator[Certificates]:
        with certificates() as pem:
            yield pem

    @pytest.fixture(scope="class")
    def server(self, redis_path: str, pem: Certificates) -> Iterator[Server]:
        settings = {"bind": "127.0.0.1 127.0.0.2"}
        with running_tls_server(redis_path, pem, settings, asks_clients=True) as server:
            yield server

    def url(self, server: Server, pem: Certificates, **changes: object) -> str:
        options = {"ssl_ca_certs": pem.ca, "ssl_certfile": pem.certificate, "ssl_keyfile": pem.key}
        query = "&".join(f"{k}={v}" for k, v in (options | changes).items())
        return f"rediss://127.0.0.1:{server.port}?{query}"

    def test_chunks_are_read_over_tls(self, server: Server, pem: Certificates) -> None:
        with open_tier(self.url(server, pem)) as tier:
            assert put_all(tier, range(10)) == [True] * 10
            assert holds(tier, range(10))
            assert get_all(tier, [99])[0] == [False]
            assert holds(tier, range(10))
        assert count_found(self.url(server, pem), 12) == 10

    def test_a_client_without_a_certificate_gets_nothing(
        self, server: Server, pem: Certificates
    ) -> None:
        url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={pem.ca}"
        with open_tier(url) as tier:
            assert put_all(tier, [0]) == [False]
            assert get_all(tier, [0], seconds=1.0)[0] == [False]

    def test_a_server_with_an_unknown_certificate_is_refused(
        self, server: Server, pem: Certificates
    ) -> None:
        with open_tier(self.url(server, pem, ssl_ca_certs=pem.stranger_certificate)) as tier:
            assert put_all(tier, [0]) == [False]

    def test_a_server_with_another_hosts_certificate_is_not_trusted(
        self, server: Server, pem: Certificates
    ) -> None:
        """The user may switch the host name check off."""
        for changes, is_trusted in (({}, False), ({"ssl_check_hostname": "false"}, True)):
            url = self.url(server, pem, **changes).replace("127.0.0.1", "127.0.0.2")
            with open_tier(url) as tier:
                assert put_all(tier, [20]) == [is_trusted]


class TestAcl:
    @pytest.fixture(scope="class")
    def server(self, binary: str) -> Iterator[Server]:
        with running_server(binary) as server:
            yield server

    def test_a_user_without_read_rights_still_writes(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        with server.client() as client:
            rights = ("~*", "+@all", "-get", "-getex")
            client.execute_command("ACL SETUSER", "writer", "on", ">hunter2", *rights)
            url = f"redis://writer:hunter2@127.0.0.1:{server.port}"
            with caplog.at_level(logging.INFO), open_tier(url) as tier:
                for first in range(0, 20, 4):
                    assert put_all(tier, range(first, first + 4)) == [True] * 4
                    buffer = memoryview(bytearray(PARTS.largest.chunk_bytes))
                    read = tier.read([chunk_key(first)], [buffer], time.monotonic() + 5.0)
                    assert (read.hits, read.cut_off) == ([False], True), "a refused read is cut off"
                    assert tier.stats().servers[0][1] is CircuitState.CLOSED
            client.acl_deluser("writer")
        told = [record.getMessage() for record in caplog.records]
        assert sum("NOPERM" in text for text in told) == 1
        assert not any("connected again" in text or "writer" in text for text in told)
