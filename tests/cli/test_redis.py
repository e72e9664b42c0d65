"""``ls``, ``verify`` and ``purge`` on chunks that the real tier has written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_connector.peers.host import HostFolder, HostSocket, SocketName, digest
from lmcache_connector.storage.redis.value_names import parse_value_name
from tests.cli.conftest import Cli
from tests.support.peers import HeldChunks, serving
from tests.support.redis.chunks import GEOMETRY, chunk_key, open_tier, put_all
from tests.support.redis.servers import CACHE, Server, running_valkey

HASH_KEY = "a secret of enough bytes"
VALUES_PER_CHUNK = 2 * 2  # heads, values per head


def fill(server: Server, num_chunks: int, **settings: object) -> None:
    with open_tier(server.url, **settings) as tier:  # type: ignore[arg-type]
        assert all(put_all(tier, range(num_chunks)))


def commands_seen(server: Server) -> dict[str, int]:
    with server.client() as client:
        stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(fields["calls"]) for name, fields in stats.items()}


def test_ls_counts_namespaces_chunks_and_bytes(cli: Cli, valkey: Server) -> None:
    fill(valkey, 5, namespace="one")
    fill(valkey, 3, namespace="two", ttl_seconds=600)
    with valkey.client() as client:
        client.set("someone-elses", b"x")
        client.set("lmc:{one:nonsense}:0-1:0", b"x")
        client.config_resetstat()
    groups = cli("ls", "--redis-url", valkey.url, "--json").document["groups"]
    assert [(g["namespace"], g["chunks"], g["values"]) for g in groups] == [
        ("one", 5, 5 * VALUES_PER_CHUNK),
        ("two", 3, 3 * VALUES_PER_CHUNK),
    ]
    assert groups[0]["bytes"] == 5 * (GEOMETRY.chunk_bytes + VALUES_PER_CHUNK * 128)
    assert groups[0]["tokens"] == 5 * GEOMETRY.num_tokens
    assert (groups[0]["layers"], groups[0]["kv_heads"], groups[0]["dtype"]) == (4, 2, "bfloat16")
    assert groups[0]["ttl_seconds"] == [None, None]
    assert 0 < groups[1]["ttl_seconds"][0] <= groups[1]["ttl_seconds"][1] <= 600
    only = cli("ls", "--redis-url", valkey.url, "-n", "two", "--json").document["groups"]
    assert [g["namespace"] for g in only] == ["two"]
    seen = commands_seen(valkey)
    assert seen["scan"] >= 2
    assert not {"keys", "get", "flushall", "del"} & seen.keys()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="lmc-") as folder:
        yield Path(folder) / "host"


def test_a_peer_is_listed_by_its_socket_on_this_host(cli: Cli, short_path: Path) -> None:
    name, chunks = SocketName(digest("default"), digest("engine"), 0, 1), HeldChunks(range(3))
    with serving(chunks, host_socket=HostSocket(HostFolder(short_path), name)):
        url = f"unix://{short_path / str(name)}"
        (group,) = cli("ls", "--redis-url", url, "--json").document["groups"]
        assert (group["namespace"], group["chunks"]) == ("default", 3)
        assert group["bytes"] == 3 * (GEOMETRY.chunk_bytes + VALUES_PER_CHUNK * 128)
        shown = cli("ls", chunk_key(1).hex(), "--redis-url", url, "--json")
        assert shown.code == 0
        verified = cli("verify", "--redis-url", url, "--json").document
        assert (verified["ok"], verified["values"]) == (True, {"sound": 3 * VALUES_PER_CHUNK})
        refused = cli("purge", "--redis-url", url, "--all", "--yes", "--json")
        assert refused.code != 0
        assert len(chunks.data) == 3
    with serving(chunks) as server:
        refused = cli("ls", "--redis-url", f"redis://127.0.0.1:{server.port}", "--json")
        assert (refused.code, "unix://" in refused.document["hint"]) == (3, True)


def test_ls_does_not_make_values_recently_used(cli: Cli, valkey: Server) -> None:
    fill(valkey, 1)
    with valkey.client() as client:
        name = next(iter(client.scan_iter("lmc:*:0-*:0")))
        # RESTORE can set the idle time: an hour.
        dump = client.dump(name)
        client.restore(name, 0, dump, replace=True, idletime=3600)
        first = cli("ls", "--redis-url", valkey.url, "--json").document["groups"][0]
        again = cli("ls", "--redis-url", valkey.url, "--json").document["groups"][0]
    assert first["idle_seconds"][1] >= 3600
    assert again["idle_seconds"][1] >= 3600


@pytest.mark.parametrize("namespace", ["team[/prod]", "[prod]", "a\x1b[31mb"])
def test_names_are_printed_without_control_characters(
    cli: Cli, valkey: Server, namespace: str
) -> None:
    """Anyone who may write to the server chooses names."""
    with valkey.client() as client:
        client.set(f"lmc:{{{namespace}:{'ab' * 32}}}:0-1:0", b"x" * 300)
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in namespace)
    for command in ("ls", "verify"):
        result = cli(command, "--redis-url", valkey.url)
        assert shown in result.out
        assert result.out.replace("\n", "").isprintable()


def damage(server: Server, index: int, change: Callable[[bytes], bytes]) -> str:
    """Change one value of a chunk. Returns its name."""
    with server.client() as client:
        name = sorted(client.scan_iter(f"lmc:*{chunk_key(index).hex()}*"))[index]
        client.set(name, change(client.get(name)))
    assert parse_value_name(name) is not None
    return str(name.decode())


def test_verify_finds_exactly_the_damage(cli: Cli, valkey: Server) -> None:
    fill(valkey, 4)
    none = cli("verify", "--redis-url", valkey.url, "-n", "other")
    assert "no values in namespace other" in none.out
    good = cli("verify", "--redis-url", valkey.url, "--json")
    assert good.code == 0
    assert good.document["values"] == {"sound": 4 * VALUES_PER_CHUNK}
    flipped = damage(valkey, 1, lambda v: v[:-1] + bytes([v[-1] ^ 1]))
    cut = damage(valkey, 2, lambda v: v[:100])
    other = damage(valkey, 3, lambda v: v[:44] + bytes(32) + v[76:])
    bad = cli("verify", "--redis-url", valkey.url, "--json")
    assert bad.code == 1
    assert {v["name"]: v["problem"] for v in bad.document["unsound"]} == {
        flipped: "bad_checksum",
        cut: "truncated_header",
        other: "foreign",
    }
    people = cli("verify", "--redis-url", valkey.url)
    assert f"{4 * VALUES_PER_CHUNK - 3} of {4 * VALUES_PER_CHUNK} values sound" in people.out
    limited = cli("verify", "--redis-url", valkey.url, "--limit", "5", "--json").document
    assert sum(limited["values"].values()) == 5


def test_verify_of_keyed_values_needs_the_key(cli: Cli, valkey: Server) -> None:
    fill(valkey, 2, hash_key=HASH_KEY.encode())
    without = cli("verify", "--redis-url", valkey.url, "--json").document
    assert without["values"] == {"needs_hash_key": 2 * VALUES_PER_CHUNK}
    config = json.dumps(
        {"kv_connector_extra_config": {"redis_url": valkey.url, "hash_key": HASH_KEY}}
    )
    own = {"kv_connector": "LMCacheTieredConnector", **json.loads(config)}
    together = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, own]},
    }
    for given in (config, json.dumps(together)):
        keyed = cli("verify", "--kv-config", given, "--json").document
        assert keyed["values"] == {"sound": 2 * VALUES_PER_CHUNK}
    wrong = config.replace(HASH_KEY, "another secret of enough bytes")
    outcome = cli("verify", "--kv-config", wrong, "--json")
    assert outcome.code == 1
    assert {v["problem"] for v in outcome.document["unsound"]} == {"forged_tag"}
    assert "another secret" not in outcome.out + outcome.err


def test_purge_asks_and_removes_only_one_namespace(cli: Cli, valkey: Server) -> None:
    fill(valkey, 80, namespace="go")
    fill(valkey, 2, namespace="stay")
    purge = ("purge", "--redis-url", valkey.url, "--namespace", "go")
    with valkey.client() as client:
        client.set("someone-elses", b"x")
        total = client.dbsize()
        dry = cli(*purge, "--dry-run", "--json").document
        assert (dry["matching_values"], dry["removed_values"]) == (80 * VALUES_PER_CHUNK, 0)
        assert "--yes" in cli(*purge, typed="").err  # no terminal
        refused = cli(*purge, typed="n\n")
        assert refused.code == 1
        assert "Remove 320 values" in refused.err
        assert cli(*purge, "--json").code == 2  # no one to ask
        assert client.dbsize() == total
        client.config_resetstat()
        done = cli(*purge, typed="y\n")
        assert done.code == 0
        assert "320 of 320 values, " in done.out
        assert not list(client.scan_iter("lmc:{go:*}:*-*"))
        assert len(list(client.scan_iter("lmc:{stay:*}:*-*"))) == 2 * VALUES_PER_CHUNK
        assert client.exists("someone-elses")
    assert not {"del", "flushall", "flushdb", "keys"} & commands_seen(valkey).keys()


def test_purge_leaves_namespaces_with_its_prefix(cli: Cli, valkey: Server) -> None:
    fill(valkey, 2, namespace="prod")
    fill(valkey, 3, namespace="prod:v2")
    assert cli("purge", "--redis-url", valkey.url, "-n", "prod", "--yes").code == 0
    (group,) = cli("ls", "--redis-url", valkey.url, "--json").document["groups"]
    assert (group["namespace"], group["chunks"]) == ("prod:v2", 3)


def test_purge_of_idle_values_leaves_the_others(cli: Cli, valkey: Server) -> None:
    fill(valkey, 2)
    with valkey.client() as client:
        name = next(iter(client.scan_iter("lmc:*:0-*:0")))
        client.restore(name, 0, client.dump(name), replace=True, idletime=7200)
        purge = ("purge", "--redis-url", valkey.url, "--all", "--yes", "--json")
        gone = cli(*purge, "--idle", "1h").document
        assert gone["removed_values"] == 1
        assert not client.exists(name)
        assert cli(*purge).document["removed_values"] == 2 * VALUES_PER_CHUNK - 1
    assert cli(*purge, "--idle", "soon").code == 2


def test_purge_of_idle_values_needs_a_server_that_knows_them(cli: Cli) -> None:
    with running_valkey({**CACHE, "maxmemory-policy": "allkeys-lfu"}) as server:
        purge = ("purge", "--redis-url", server.url, "--all", "--yes")
        assert cli(*purge, "--idle", "1s").code == 0  # nothing there
        fill(server, 1)
        outcome = cli(*purge, "--idle", "1s")
        assert (outcome.code, "LFU" in outcome.err) == (2, True)
        assert cli(*purge, "--json").document["removed_values"] == VALUES_PER_CHUNK
