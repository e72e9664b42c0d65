"""``check`` finds problems, says how to fix them, and shows no secret."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.cli import check, check_redis
from lmcache_connector.peers.host import HostFolder, SocketName, digest
from lmcache_connector.storage.redis.admin import ServerFacts
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.vllm_compat.api import versions
from tests.cli.conftest import Cli, CliResult, transfer
from tests.support.peers import HeldChunks, serving
from tests.support.redis.chunks import PARTS
from tests.support.redis.servers import Server, free_ports, running_server, valkey_binary


def verdicts(outcome: CliResult) -> dict[str, str]:
    return {f["name"]: f["verdict"] for f in outcome.document["findings"]}


def test_a_sound_configuration_passes_in_every_tier(cli: Cli, valkey: Server) -> None:
    outcome = cli("check", transfer(redis_url=valkey.url), "--json")
    assert outcome.code == 0
    assert set(verdicts(outcome).values()) == {"ok"}
    assert {"redis write", "redis look up", "redis read and compare"} <= verdicts(outcome).keys()
    with valkey.client() as client:
        assert client.dbsize() == 0  # its chunks are removed


def test_every_wrong_setting_is_named(cli: Cli) -> None:
    outcome = cli("check", transfer(cpu_gb=4, chunk_size="256", hash_key="hunter2-short"))
    assert outcome.code == 2
    assert "did you mean 'cpu_gib'?" in outcome.out
    assert "'chunk_size'" in outcome.out
    assert "would refuse this configuration" in outcome.out
    assert "hunter2" not in outcome.out + outcome.err


def test_the_connector_is_found_in_a_multiconnector(cli: Cli) -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}

    def check(*connectors: object, **more: object) -> CliResult:
        settings = {"kv_connector_extra_config": {"connectors": connectors}, **more}
        document = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **settings}
        return cli("check", json.dumps(document), "--json")

    outcome = check(nixl, json.loads(transfer(chunk_size=192)))
    assert outcome.code == 0
    assert "chunks of 192 tokens" in found(outcome)["settings"]["detail"]
    misspelt = check(nixl, json.loads(transfer(cpu_gb=4)))
    assert "did you mean 'cpu_gib'?" in found(misspelt)["settings"]["detail"]
    assert check(nixl, json.loads(transfer()), kv_rolle="x").code == 2
    assert check(nixl).code == check(None, 3).code == 2


@pytest.mark.parametrize(
    "text",
    [
        *('{"kv_connector": ', "[]", "-", "/no/such/file", "redis://u:hunter2@h"),
        *('"redis://u:hunter2@h"', '{"a":' * 100_000, '{"kv_port": 1' + "0" * 5000 + "}", "", "/"),
    ],
)
def test_bad_configurations_get_an_error(cli: Cli, text: str) -> None:
    outcome = cli("check", text)
    assert outcome.code == 2
    assert "Error: " in outcome.err
    assert "Try: " in outcome.err
    assert "hunter2" not in outcome.err
    assert ("configuration is empty" in outcome.err) == (text in ("", "-"))  # stdin is empty
    assert cli("check", text, "--json").document["ok"] is False


def test_too_much_memory_is_an_error(cli: Cli) -> None:
    outcome = cli("check", transfer(cpu_gib=60000.0), "--json")
    assert outcome.code == 1
    assert verdicts(outcome)["cpu tier"] == "error"


def test_wrong_credentials_and_an_absent_server_differ(cli: Cli) -> None:
    with running_server(valkey_binary() or "", {"requirepass": "open-sesame"}) as server:
        right = server.url.replace("//", "//:open-sesame@")
        wrong = server.url.replace("//", "//:hunter2@")
        assert cli("check", transfer(redis_url=right)).code == 0
        for url in (wrong, server.url):
            outcome = cli("check", transfer(redis_url=url))
            assert outcome.code == 3
            assert "set the password in the URL" in outcome.out
            assert "hunter2" not in outcome.out + outcome.err
    away = cli("check", transfer(redis_url=right))
    assert away.code == 3
    assert "refused" in away.out
    assert "open-sesame" not in away.out + away.err


def test_a_server_without_room_is_found(cli: Cli) -> None:
    with running_server(valkey_binary() or "", {"maxmemory": "1mb"}) as server:
        outcome = cli("check", transfer(redis_url=server.url), "--json")
    assert outcome.code == 1
    assert verdicts(outcome)["redis write"] == "error"
    assert verdicts(outcome)["redis server"] == "warning"  # noeviction


@pytest.mark.parametrize(
    ("max_bytes", "policy", "ttl_seconds", "hint"),
    [
        (0, "noeviction", None, "or redis_ttl_seconds"),
        (0, "noeviction", 60.0, ""),
        (1 << 30, "noeviction", 60.0, "set maxmemory-policy allkeys-lru"),
        (1 << 30, "allkeys-lru", None, ""),
    ],
)
def test_only_a_missing_setting_is_advised(
    max_bytes: int, policy: str, ttl_seconds: float | None, hint: str
) -> None:
    facts = ServerFacts(Node("a"), "9.0", 0, max_bytes, policy, 0)
    tier = RedisTierConfig("redis://a", ttl_seconds=ttl_seconds)
    finding = check_redis._judge_server(facts, tier)
    assert finding.verdict == ("warning" if hint else "ok")
    assert hint in finding.hint
    assert "redis_ttl_seconds" not in finding.hint or ttl_seconds is None


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vllm", "status", "words"),
    [
        ("0.32.0", "ok", ""),
        ("0.34.0", "warning", "not tested"),
        ("0.30.2", "error", "0.30.2 is installed"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, vllm: str, status: str, words: str) -> None:
    def version(name: str) -> str:
        return "0.5.6" if name == "lmcache" else vllm

    monkeypatch.setattr(versions, "version", version)
    finding = check.check_versions()
    assert finding.verdict == status
    assert words in finding.hint
    assert vllm in finding.detail


# -- KV transfers: settings, ports, peers ----------------------------------------------------------


SECRET = "open-sesame-open-sesame"


def p2p(role: str = "kv_both", port: object = None, **extra: Any) -> str:
    document = {
        "kv_connector": "LMCacheP2PConnector",
        "kv_role": role,
        "kv_port": free_ports(1) if port is None else port,
        "kv_connector_extra_config": {"cpu_gib": 0.01, **extra},
    }
    return json.dumps(document)


def found(outcome: CliResult) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in outcome.document["findings"]}


def test_the_host_folder_is_checked(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "host"

    def check() -> CliResult:
        return cli("check", p2p("kv_producer", host_folder=str(path)), "--json")

    assert "will find each other" in found(check())["host"]["detail"]
    assert not path.exists()
    folder = HostFolder(path)
    with folder.listen(SocketName(digest("default"), digest("engine"), 0, 1)):
        assert found(check())["host"]["detail"] == f"engines of this namespace in {path}: 1"
    path.chmod(0o755)
    outcome = check()
    assert outcome.code == 1
    assert "with mode 0700" in found(outcome)["host"]["detail"]
    path = Path("/proc/x")
    outcome = check()
    assert (outcome.code, found(outcome)["host"]["verdict"]) == (1, "error")
    assert "the folder /proc/x cannot be used" in found(outcome)["host"]["detail"]
    off = cli("check", p2p("kv_producer", host_sharing=False), "--json")
    assert "host" not in found(off)


def test_the_port_is_tried_and_freed(cli: Cli) -> None:
    port = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        outcome = cli("check", p2p(port=port), "--json")
    assert outcome.code == 1
    taken = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert found(outcome)["ports"]["detail"] == taken
    for _ in range(2):
        assert cli("check", p2p(port=port)).code == 0
    socket.create_server(("127.0.0.1", port)).close()
    outcome = cli("check", p2p(bind_host="192.0.2.1", hash_key=SECRET), "--json")
    assert (outcome.code, found(outcome)["ports"]["verdict"]) == (1, "error")


@pytest.mark.parametrize("port", [0, 65536, "x", 1.5])
def test_an_invalid_port_is_refused(cli: Cli, port: object) -> None:
    outcome = cli("check", p2p(port=port))
    assert outcome.code == 2
    assert "'kv_port': must be a port from 1 to 65535" in outcome.out


def test_settings_of_the_p2p_connector_name_the_redis(cli: Cli) -> None:
    settings = p2p(host="127.0.0.1", redis_url=f"redis://127.0.0.1:{free_ports(1)}")
    outcome = cli("ls", "--kv-config", settings)
    assert outcome.code == 3
    assert "refused" in outcome.err


def test_a_wildcard_address_is_warned_of(cli: Cli) -> None:
    text = p2p(host="0.0.0.0", hash_key=SECRET, peer_hosts=["10.0.0.0/8"])
    outcome = cli("check", text, "--json")
    address = found(outcome)["address"]
    assert (outcome.code, address["verdict"]) == (0, "warning")
    assert "which is each peer's own machine" in address["detail"]
    refused = cli("check", p2p(bind_host="0.0.0.0"))
    assert refused.code == 2
    assert "it needs a 'hash_key'; or set 'insecure'" in refused.out


def check_peers(cli: Cli, *peers: str, **more: Any) -> tuple[int, list[tuple[str, str]]]:
    outcome = cli("check", p2p("kv_consumer", peers=peers, host_sharing=False, **more), "--json")
    found = [each for each in outcome.document["findings"] if each["name"] == "peers"]
    return outcome.code, [(each["verdict"], each["detail"]) for each in found]


def test_peers_are_asked_for_ranks(cli: Cli) -> None:
    with (
        serving(HeldChunks([])) as one,
        serving(HeldChunks([]), ranks=[PARTS, PARTS]) as two,
    ):
        more = {"bind_host": "127.0.0.1", "peer_hosts": ["127.0.0.1"]}
        peers = f"127.0.0.1:{one.port}", f"localhost:{two.port}", f"dns:localhost:{one.port}"
        code, found = check_peers(cli, *peers, **more)
    (_, first), (_, second), (_, third) = found
    assert (code, {verdict for verdict, _ in found}) == (0, {"ok"})
    assert "it answers, 1 rank(s) each" in first
    assert "it answers, 2 rank(s) each; this instance must have as many" in second
    assert "1 of 1 instances answer, 1 rank(s) each" in third or "1 of 2 instances" in third


def test_peers_that_cannot_serve_are_named(cli: Cli, valkey: Server) -> None:
    nobody, redis = free_ports(1), f"127.0.0.1:{valkey.port}"
    peers = [f"127.0.0.1:{nobody}", redis, "dns:nobody.invalid:7450"]
    code, found = check_peers(cli, *peers, peer_hosts=["127.0.0.1"])
    assert (code, [verdict for verdict, _ in found]) == (3, ["error"] * 3)
    assert "refused" in found[0][1]
    assert f"cannot load from {redis}: a Redis listens there" in found[1][1]
    assert "cannot load from dns:nobody.invalid:7450" in found[2][1]
