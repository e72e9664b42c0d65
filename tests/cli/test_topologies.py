"""The commands on a cluster, over TLS, and with no more rights than the documentation asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lmcache_connector.storage.redis import admin
from tests.support.command_line import Cli
from tests.support.redis.chunks import config
from tests.support.redis.fault_proxy import Fault, Kind, fault_proxy
from tests.support.redis.rights import PASSWORD, documented_rules, grant
from tests.support.redis.server_groups import (
    certificates,
    running_tls_server,
)
from tests.support.redis.servers import CACHE, Server, running_valkey

# For clusters, and for what `ls` can do without.
ELSEWHERE = frozenset({"+cluster|slots", "+client|no-touch"})


def transfer(url: str) -> str:
    extra = {"cpu_gib": 0.1, "redis_url": url}
    document = {"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both"}
    return json.dumps({**document, "kv_connector_extra_config": extra})


@pytest.fixture
def guarded() -> Iterator[Server]:
    with running_valkey(CACHE) as server:
        for user in ("engine", "operator"):
            grant(server, user, leave_out=ELSEWHERE)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
        yield server


def url_of(server: Server, user: str) -> str:
    return server.url.replace("//", f"//{user}:{PASSWORD}@")


def test_an_engines_user_may_not_list_or_remove(cli: Cli, guarded: Server) -> None:
    for command in (["ls"], ["purge", "--all", "--yes"]):
        outcome = cli(*command, "--redis-url", url_of(guarded, "engine"))
        assert outcome.code == 3
        assert "no permissions" in outcome.err.lower()
        assert "ACL SETUSER" in outcome.err
        assert PASSWORD not in outcome.err


def test_the_rights_of_the_hint_are_enough(cli: Cli) -> None:
    """An engine's own user may not run ``check``; what the hint adds is all that lacks."""
    rules, *_ = documented_rules("operator")
    with running_valkey(CACHE) as server:
        url = url_of(server, "engine")
        grant(server, "engine", leave_out=ELSEWHERE)
        with server.client() as client:
            refused = cli("check", transfer(url), "--json")
            assert refused.code == 3
            (hint,) = [f["hint"] for f in refused.document["findings"] if f["verdict"] == "error"]
            added = hint.partition("ACL SETUSER NAME ")[2].split()
            client.execute_command("ACL", "SETUSER", "engine", *added)
        assert cli("check", transfer(url)).code == 0
        assert cli("ls", "--redis-url", url).code == 0
    assert {*added, "on", f">{PASSWORD}", "resetchannels", "-@all"} == set(rules)
    assert "+client|no-touch" in hint


@pytest.mark.redis_server
def test_tls_is_checked_and_what_is_wrong_with_it_said(cli: Cli, redis_path: str) -> None:
    with (
        certificates() as pem,
        running_tls_server(redis_path, pem, CACHE, asks_clients=False) as server,
    ):
        url = f"rediss://127.0.0.1:{server.port}"
        assert cli("check", transfer(f"{url}?ssl_ca_certs={pem.ca}")).code == 0
        unknown = cli("check", transfer(url))
        assert unknown.code == 3
        assert "ssl_ca_certs" in unknown.out
        plain = cli("check", transfer(url.replace("rediss", "redis")))
        assert plain.code == 3
        assert "rediss://" in plain.out


@pytest.mark.parametrize(("scheme", "what"), [("rediss", "speaks no TLS"), ("redis", "firewalls")])
def test_a_server_that_says_nothing_is_told_in_a_moment(
    cli: Cli, valkey: Server, monkeypatch: pytest.MonkeyPatch, scheme: str, what: str
) -> None:
    """A Redis waits for more of what begins a TLS handshake. Answers after the greeting may take
    as long as they need: here an hour."""
    monkeypatch.setattr(admin, "_ANSWER_SECONDS", 3600.0)
    monkeypatch.setattr(admin, "_GREETING_SECONDS", 0.5)
    with fault_proxy(valkey.port) as proxy:
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
    with fault_proxy(valkey.port) as proxy, admin.RedisAdmin(config(proxy.url)) as opened:
        opened.nodes()
        proxy.arm(Fault(Kind.DELAY, seconds=1.0))
        assert opened.num_keys() == 0
        assert proxy.num_struck == 1
