"""The commands on a cluster, over TLS, and with no more rights than the documentation asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support import ROOT
from tests.support.command_line import Cli
from tests.support.redis.chunks import chunk_key, open_tier, put_all
from tests.support.redis.server_groups import Cluster, certificates, running_cluster
from tests.support.redis.servers import Server, redis_binary, running_server, valkey_binary

VALUES_PER_CHUNK = 4


def transfer(url: str) -> str:
    extra = {"cpu_gib": 0.1, "redis_url": url}
    document = {"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both"}
    return json.dumps({**document, "kv_connector_extra_config": extra})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(valkey_binary() or "valkey-server") as cluster:
        yield cluster


def test_a_cluster_is_one_cache_to_every_command(cli: Cli, cluster: Cluster) -> None:
    cluster.flush()
    assert cli("check", transfer(cluster.url)).code == 0
    with open_tier(cluster.url) as tier:
        assert all(put_all(tier, range(30)))
    url = ("--redis-url", cluster.url)
    listed = cli("ls", *url, "--json").document
    assert len(listed["servers"]) == len(cluster.masters) == 3
    (group,) = listed["groups"]
    assert (group["chunks"], group["values"]) == (30, 30 * VALUES_PER_CHUNK)
    verified = cli("verify", *url, "--json").document
    assert verified["values"] == {"sound": 30 * VALUES_PER_CHUNK}
    one = cli("inspect", chunk_key(7).hex()[:16], *url, "--json").document
    assert len(one["values"]) == VALUES_PER_CHUNK
    purged = cli("purge", *url, "--all", "--yes", "--json").document
    assert purged["removed_values"] == 30 * VALUES_PER_CHUNK
    assert cli("ls", *url, "--json").document["groups"] == []


def documented_rights(user: str) -> list[str]:
    text = (ROOT / "docs" / "security.md").read_text()
    found = re.search(rf"^ACL SETUSER {user} on >PASSWORD (.*)$", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


@pytest.fixture
def guarded() -> Iterator[Server]:
    settings = {"maxmemory": "512mb", "maxmemory-policy": "allkeys-lru"}
    with running_server(valkey_binary() or "valkey-server", settings) as server:
        with server.client() as client:
            for user in ("engine", "operator"):
                rights = documented_rights(user)
                client.execute_command("ACL", "SETUSER", user, "on", ">pass-word", *rights)
            client.execute_command("ACL", "SETUSER", "default", "off")
        yield server


def url_of(server: Server, user: str) -> str:
    return server.url.replace("//", f"//{user}:pass-word@")


def test_an_engines_user_may_not_list_or_remove(cli: Cli, guarded: Server) -> None:
    for command in (["ls"], ["purge", "--all", "--yes"]):
        outcome = cli(*command, "--redis-url", url_of(guarded, "engine"))
        assert outcome.code == 3
        assert "no permissions" in outcome.err.lower()
        assert "ACL SETUSER" in outcome.err
        assert "pass-word" not in outcome.err


def test_the_rights_of_the_hint_are_enough(cli: Cli) -> None:
    """An engine's own user may not run ``check``; what the hint adds is all that lacks."""
    settings = {"maxmemory": "512mb", "maxmemory-policy": "allkeys-lru"}
    with running_server(valkey_binary() or "valkey-server", settings) as server:
        url = url_of(server, "engine")
        with server.client() as client:
            rights = documented_rights("engine")
            client.execute_command("ACL", "SETUSER", "engine", "on", ">pass-word", *rights)
            refused = cli("check", transfer(url), "--json")
            assert refused.code == 3
            (hint,) = [f["hint"] for f in refused.document["findings"] if f["verdict"] == "error"]
            added = hint.partition("ACL SETUSER NAME ")[2].split()
            client.execute_command("ACL", "SETUSER", "engine", *added)
        assert cli("check", transfer(url)).code == 0
        assert cli("ls", "--redis-url", url).code == 0
    assert {*added, "resetchannels", "-@all"} == set(documented_rights("operator"))
    assert "+client|no-touch" in hint


@pytest.mark.redis_server
def test_tls_is_checked_and_what_is_wrong_with_it_said(cli: Cli) -> None:
    binary = redis_binary()
    if binary is None:
        pytest.skip("needs redis-server; .ci/run installs Debian's redis-server package")
    with certificates() as pem:
        settings = {
            "port": "0",
            "tls-cert-file": str(pem.certificate),
            "tls-key-file": str(pem.key),
            "tls-ca-cert-file": str(pem.ca),
            "tls-auth-clients": "no",
            "maxmemory": "512mb",
            "maxmemory-policy": "allkeys-lru",
        }
        with running_server(binary, settings, tls=pem) as server:
            url = f"rediss://127.0.0.1:{server.port}"
            assert cli("check", transfer(f"{url}?ssl_ca_certs={pem.ca}")).code == 0
            unknown = cli("check", transfer(url))
            assert unknown.code == 3
            assert "ssl_ca_certs" in unknown.out
            plain = cli("check", transfer(url.replace("rediss", "redis")))
            assert plain.code == 3
            assert "rediss://" in plain.out
