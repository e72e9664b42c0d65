"""``check`` for hand-overs: settings as the engine reads them, ports it can have, a real proxy."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.peers.host import HostFolder, SocketName, digest
from tests.support.command_line import Cli, CliResult
from tests.support.engines.ports import free_ports
from tests.support.peers.chunks import HeldChunks, serving
from tests.support.redis.chunks import PARTS
from tests.support.redis.servers import Server

SECRET = "open-sesame-open-sesame"


def transfer(role: str = "kv_both", port: object = None, **extra: Any) -> str:
    document = {
        "kv_connector": "LMCacheP2PConnector",
        "kv_role": role,
        "kv_port": free_ports(1) if port is None else port,
        "kv_connector_extra_config": {"cpu_gib": 0.01, **extra},
    }
    return json.dumps(document)


def found(outcome: CliResult) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in outcome.document["findings"]}


def test_the_folder_of_the_host_is_looked_into(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "host"

    def check() -> CliResult:
        return cli("check", transfer("kv_producer", host_folder=str(path)), "--json")

    assert "will find each other" in found(check())["host"]["detail"]
    assert not path.exists()
    folder = HostFolder(path)
    with folder.listen(SocketName(digest("default"), digest("engine"), 0, 1)):
        assert found(check())["host"]["detail"] == f"1 engines of this namespace are in {path}"
    path.chmod(0o755)
    outcome = check()
    assert outcome.code == 1
    assert "with mode 0700" in found(outcome)["host"]["detail"]
    off = cli("check", transfer("kv_producer", host_sharing=False), "--json")
    assert "host" not in found(off)


@pytest.mark.parametrize("port", [0, 70000, "here", None, True])
def test_only_what_vllm_takes_for_a_port_is_one(cli: Cli, port: object) -> None:
    outcome = cli("check", json.dumps(json.loads(transfer()) | {"kv_port": port}), "--json")
    finding = found(outcome)["kv-transfer-config"]
    if port is True:  # vLLM reads it as 1
        assert finding["verdict"] == "ok"
    else:
        assert outcome.code == 2
        assert finding["detail"] == "kv_port must be a port between 1 and 65535"


def test_a_key_in_the_wrong_place_is_told_where_it_belongs(cli: Cli) -> None:
    document = json.loads(transfer(kv_port=1, cpu_gb=1, secret=SECRET))
    outcome = cli("check", json.dumps({**document, "hash_key": SECRET, "kv_rol": "kv_both"}))
    assert outcome.code == 2
    for sentence in (
        "'hash_key' belongs inside kv_connector_extra_config",
        "'kv_rol' is not a key: did you mean 'kv_role'?",
        "'kv_port' is vLLM's own: put it beside 'kv_connector'",
        "'cpu_gb' is not a key: did you mean 'cpu_gib'?",
        "'secret' is not a key: did you mean",
        "would refuse to start",
    ):
        assert sentence in outcome.out
    assert SECRET not in outcome.out


def test_the_port_is_tried_and_let_go(cli: Cli) -> None:
    port = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        outcome = cli("check", transfer(port=port), "--json")
    assert outcome.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in found(outcome)["ports"]["detail"]
    for _ in range(2):
        assert cli("check", transfer(port=port)).code == 0
    socket.create_server(("127.0.0.1", port)).close()
    outcome = cli("check", transfer(bind_host="192.0.2.1", hash_key=SECRET), "--json")
    assert (outcome.code, found(outcome)["ports"]["verdict"]) == (1, "error")


def test_an_address_that_leads_nowhere_is_warned_of(cli: Cli) -> None:
    text = transfer(host="0.0.0.0", hash_key=SECRET, peer_hosts=["10.0.0.0/8"])
    outcome = cli("check", text, "--json")
    address = found(outcome)["address"]
    assert (outcome.code, address["verdict"]) == (0, "warning")
    assert "leads each of them to itself" in address["detail"]
    refused = cli("check", transfer(bind_host="0.0.0.0"))
    assert refused.code == 2
    assert "it needs a 'hash_key', or 'insecure'" in refused.out


def check_peers(cli: Cli, *peers: str, **more: Any) -> tuple[int, list[tuple[str, str]]]:
    outcome = cli(
        "check", transfer("kv_consumer", peers=peers, host_sharing=False, **more), "--json"
    )
    found = [each for each in outcome.document["findings"] if each["name"] == "peers"]
    return outcome.code, [(each["verdict"], each["detail"]) for each in found]


def test_peers_are_asked_who_they_are(cli: Cli) -> None:
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
    assert "it answers, 2 rank(s) each; ours needs as many" in second
    assert "1 of 1 instances answer, 1 rank(s) each" in third or "1 of 2 instances" in third


def test_peers_that_cannot_be_loaded_from_are_named(cli: Cli, valkey: Server) -> None:
    nobody, redis = free_ports(1), f"127.0.0.1:{valkey.port}"
    peers = [f"127.0.0.1:{nobody}", redis, "dns:nobody.invalid:7450"]
    code, found = check_peers(cli, *peers, peer_hosts=["127.0.0.1"])
    assert (code, [verdict for verdict, _ in found]) == (3, ["error"] * 3)
    assert "refused" in found[0][1]
    assert f"{redis} cannot be loaded from: a Redis listens there" in found[1][1]
    assert "dns:nobody.invalid:7450 cannot be loaded from" in found[2][1]
