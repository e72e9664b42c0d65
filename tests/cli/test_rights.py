"""The ACL lines of docs/security.md, with each form of URL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import pytest

from lmcache_connector.storage.redis import admin
from tests.cli.conftest import Cli, transfer
from tests.support import ROOT
from tests.support.clock import wait_until
from tests.support.redis.chunks import chunk_data, chunk_key, config, get_all, open_tier, put_all
from tests.support.redis.proxies import Fault, FaultProxy, Kind
from tests.support.redis.server_groups import (
    certificates,
    running_cluster,
    running_sentinels,
    running_tls_server,
)
from tests.support.redis.servers import (
    CACHE,
    Server,
    oldest_binary,
    redis_binary,
    running_server,
    running_valkey,
    valkey_binary,
)

PASSWORD = "pass-word"
VALUES_PER_CHUNK = 4
VALKEY = valkey_binary() or "valkey-server"


def grant(server: Server, user: str, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Give the user its documented rights, without lines that hold a rule of ``leave_out``."""
    text = (ROOT / "docs" / "security.md").read_text()
    lines = re.findall(rf"^ACL SETUSER {user} (.*)$", text, re.MULTILINE)
    assert lines
    with server.client() as client:
        for line in lines:
            rules = line.replace("PASSWORD", PASSWORD).split()
            if leave_out.isdisjoint(rules):
                client.execute_command("ACL", "SETUSER", user, *rules)


@dataclass
class Guarded:
    """Servers whose users have the documented rights. ``url`` has ``USER`` in the user's place."""

    servers: list[Server]
    url: str

    def url_of(self, user: str) -> str:
        return self.url.replace("USER", f"{user}:{PASSWORD}")

    def allow(self, *, in_cluster: bool = False) -> None:
        for server in self.servers:
            with server.client() as client:
                is_old = client.info("server")["redis_version"] < "7.2"
            left_out = {"+client|no-touch"} if is_old else set()
            left_out |= set() if in_cluster else {"+cluster|slots"}
            for user in ("engine", "operator"):
                grant(server, user, leave_out=frozenset(left_out))


@contextmanager
def one(form: Callable[[Server], str]) -> Iterator[Guarded]:
    with running_valkey(CACHE) as server:
        guarded = Guarded([server], form(server))
        guarded.allow()
        yield guarded


@contextmanager
def oldest() -> Iterator[Guarded]:
    binary = oldest_binary()
    assert binary is not None
    with running_server(binary, CACHE) as server:
        guarded = Guarded([server], f"redis://USER@127.0.0.1:{server.port}/5")
        guarded.allow()
        yield guarded


@contextmanager
def tls() -> Iterator[Guarded]:
    binary = redis_binary()
    assert binary is not None
    with (
        certificates() as pem,
        running_tls_server(binary, pem, CACHE, asks_clients=False) as server,
    ):
        url = f"rediss://USER@127.0.0.1:{server.port}/1?ssl_ca_certs={pem.ca}"
        guarded = Guarded([server], url)
        guarded.allow()
        yield guarded


@contextmanager
def cluster() -> Iterator[Guarded]:
    with running_cluster(VALKEY) as group:
        guarded = Guarded(group.masters, group.url.replace("//", "//USER@"))
        guarded.allow(in_cluster=True)
        for master in group.masters:
            with master.client() as client:
                client.config_set(*chain(*CACHE.items()))
        yield guarded


@contextmanager
def sentinels() -> Iterator[Guarded]:
    with running_sentinels(VALKEY) as watched:
        for sentinel in watched.sentinels:
            grant(sentinel, "finder")
        login = f"?sentinel_username=finder&sentinel_password={PASSWORD}"
        url = watched.url.replace("//", "//USER@") + "/2" + login
        guarded = Guarded([watched.master], url)
        with watched.master.client() as client:
            client.config_set(*chain(*CACHE.items()))
        guarded.allow()
        yield guarded


FORMS = {
    "redis": lambda: one(lambda s: f"redis://USER@127.0.0.1:{s.port}"),
    "redis with db": lambda: one(lambda s: f"redis://USER@127.0.0.1:{s.port}/5"),
    "redis 6.2 with db": oldest,
    "unix": lambda: one(lambda s: f"unix://USER@{s.socket_path}"),
    "unix with db": lambda: one(lambda s: f"unix://USER@{s.socket_path}?db=7"),
    "rediss with db": tls,
    "cluster": cluster,
    "sentinel with db": sentinels,
}


@pytest.fixture(scope="module", params=FORMS, ids=str)
def guarded(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    if FORMS[request.param] is tls:
        request.getfixturevalue("redis_path")  # skips without one
    if FORMS[request.param] is oldest:
        request.getfixturevalue("oldest_redis_path")
    with FORMS[request.param]() as guarded:
        yield guarded


def test_an_engines_rights_are_enough(guarded: Guarded) -> None:
    url = guarded.url_of("engine")
    lifetime = {"ttl_seconds": 600.0, "refresh_ttl": True}
    with open_tier(url, **lifetime) as tier:  # type: ignore[arg-type]
        wait_until(lambda: put_all(tier, range(3)) == [True] * 3, "not writable")
        assert put_all(tier, range(3)) == [True] * 3
        assert get_all(tier, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])
        spoil(guarded, 1)
        assert get_all(tier, range(3))[0][:2] == [True, False]
        assert put_all(tier, range(3)) == [True] * 3
        assert get_all(tier, range(3))[0] == [True] * 3


def test_an_operators_rights_are_enough(cli: Cli, guarded: Guarded) -> None:
    url = guarded.url_of("operator")
    with open_tier(guarded.url_of("engine")) as tier:
        wait_until(lambda: all(put_all(tier, range(3))), "not writable")
    assert cli("check", transfer(redis_url=url)).code == 0
    (group,) = cli("ls", "--redis-url", url, "--json").document["groups"]
    assert group["values"] == 3 * VALUES_PER_CHUNK
    assert group["idle_seconds"][0] is not None
    assert cli("verify", "--redis-url", url, "--json").document["ok"]
    assert cli("ls", chunk_key(1).hex(), "--redis-url", url).code == 0
    purged = cli("purge", "--redis-url", url, "--all", "--yes", "--json").document
    assert purged["removed_values"] == 3 * VALUES_PER_CHUNK


def spoil(guarded: Guarded, index: int) -> None:
    """Change bytes of a chunk."""
    db = re.search(r"(?:/|db=)(\d)(?:\?|$)", guarded.url)
    for server in guarded.servers:
        with server.client(db=int(db[1]) if db else 0) as client:
            for name in client.keys(f"lmc:*{chunk_key(index).hex()}*-*")[:1]:
                client.setrange(name, 1000, b"\xff\x00\xff\x00")


# -- missing rights, TLS, and silent servers ------------------------------------------------------


# Rules that only clusters need, and an optional part of `ls`.
ELSEWHERE = frozenset({"+cluster|slots", "+client|no-touch"})


@pytest.fixture
def guarded_valkey() -> Iterator[Server]:
    with running_valkey(CACHE) as server:
        for user in ("engine", "operator"):
            grant(server, user, leave_out=ELSEWHERE)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
        yield server


def url_of(server: Server, user: str) -> str:
    return server.url.replace("//", f"//{user}:{PASSWORD}@")


def test_an_engines_user_is_enough_for_check(cli: Cli, guarded_valkey: Server) -> None:
    outcome = cli("check", transfer(redis_url=url_of(guarded_valkey, "engine")))
    assert (outcome.code, "+info" in outcome.out) == (0, False)
    assert "`lmcache-connector ls --redis-url` with an operator's user" in outcome.out
    listed = cli("ls", "--redis-url", url_of(guarded_valkey, "operator"), "--json")
    (group,) = listed.document["groups"]
    assert 0 < group["ttl_seconds"][1] <= 60


def test_an_engines_user_may_not_list_or_remove(cli: Cli, guarded_valkey: Server) -> None:
    for command in (["ls"], ["purge", "--all", "--yes"]):
        outcome = cli(*command, "--redis-url", url_of(guarded_valkey, "engine"))
        assert outcome.code == 3
        assert "no permissions" in outcome.err.lower()
        assert "give --redis-url with a user that has these rights" in outcome.err
        assert PASSWORD not in outcome.err


@pytest.mark.redis_server
def test_errors_of_tls_say_what_is_wrong(cli: Cli, redis_path: str) -> None:
    with (
        certificates() as pem,
        running_tls_server(redis_path, pem, CACHE, asks_clients=False) as server,
    ):
        url = f"rediss://127.0.0.1:{server.port}"
        assert cli("check", transfer(redis_url=f"{url}?ssl_ca_certs={pem.ca}")).code == 0
        unknown = cli("check", transfer(redis_url=url))
        assert unknown.code == 3
        assert "ssl_ca_certs" in unknown.out
        plain = cli("check", transfer(redis_url=url.replace("rediss", "redis")))
        assert plain.code == 3
        assert "rediss://" in plain.out


@pytest.mark.parametrize(("scheme", "what"), [("rediss", "speaks no TLS"), ("redis", "firewalls")])
def test_a_silent_server_is_reported_at_once(
    cli: Cli, valkey: Server, monkeypatch: pytest.MonkeyPatch, scheme: str, what: str
) -> None:
    """A Redis without TLS waits for the rest of a handshake. Replies after the greeting have
    another time-out, here an hour."""
    monkeypatch.setattr(admin, "_ANSWER_SECONDS", 3600.0)
    monkeypatch.setattr(admin, "_GREETING_SECONDS", 0.5)
    with FaultProxy(valkey.port) as proxy:
        if scheme == "redis":
            proxy.arm(Fault(Kind.STALL, sticky=True))
        for command in (["ls"], ["verify"], ["purge", "--all", "--yes"]):
            outcome = cli(*command, "--redis-url", proxy.url.replace("redis", scheme))
            assert outcome.code == 3
            assert what in outcome.err


def test_an_answer_may_take_longer_than_the_greeting(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_GREETING_SECONDS", 0.5)
    with FaultProxy(valkey.port) as proxy, admin.RedisAdmin(config(proxy.url)) as opened:
        opened.nodes()
        proxy.arm(Fault(Kind.DELAY, seconds=1.0))
        assert opened.num_keys() == 0
        assert proxy.num_struck == 1


def test_values_of_a_server_without_pttl_are_listed() -> None:
    with running_valkey({"rename-command": 'PTTL ""'}) as server:
        with open_tier(server.url) as tier:
            assert all(put_all(tier, range(3)))
        with admin.RedisAdmin(config(server.url)) as opened:
            values = list(opened.values("default"))
    assert len(values) == 3 * VALUES_PER_CHUNK
    assert {value.ttl_seconds for value in values} == {None}
