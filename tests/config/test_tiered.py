"""Configuration: all problems are named at once, no secret is shown."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.config import limits
from lmcache_connector.config.limits import user_cache_folder
from lmcache_connector.config.strict import read_weights_label, resolve_secret
from lmcache_connector.config.tiered import (
    _NOT_IN_P2P,
    ConnectorConfig,
    check_settings,
    parse_config,
    parse_p2p_config,
)
from lmcache_connector.errors import ConfigError
from lmcache_connector.plans import Tier
from tests.support import ROOT

FIELDS = [field.alias or name for name, field in ConnectorConfig.model_fields.items()]
SECRET = "hunter2-very-secret"


def problems(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(settings)
    return str(raised.value).splitlines()[1:]


def test_every_problem_is_named_at_once() -> None:
    lines = problems(
        chunk_sise=256,
        cpu_gib="8",
        chunk_size=0,
        compute_or_load="sometimes",
        store_generated=1,
        namespace="a b",
        load_deadline_seconds=float("inf"),
        qqqqqq=1,
    )
    text = "\n".join(lines)
    assert len(lines) == 8
    assert "'chunk_sise' is not a key: did you mean 'chunk_size'?" in text
    assert "'qqqqqq' is not a key: valid keys are chunk_size, cpu_gib" in text
    for name in ("cpu_gib", "chunk_size", "compute_or_load", "store_generated", "namespace"):
        assert any(line.startswith(f"  - '{name}': ") for line in lines), name


def test_keys_of_vllm_and_of_the_other_connector_are_named_as_such() -> None:
    assert problems(kv_port=1, bind_host="0.0.0.0", qqqqqq=1, xxxxxx=1) == [
        "  - 'kv_port' is vLLM's own setting: put it beside 'kv_connector'",
        "  - 'bind_host' is a setting of LMCacheP2PConnector: here it is 'peer_listen'",
        f"  - 'qqqqqq', 'xxxxxx' are not keys: valid keys are {', '.join(FIELDS)}",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_size": True},
        {"chunk_size": 256.0},
        {"chunk_size": "256"},
        {"cpu_gib": 0},
        {"cpu_gib": float("nan")},
        {"redis_url": 6379},
        {"redis_url": ""},
        {"hash_key": ""},
        {"hash_key": None, "store_generated": "yes"},
        {"namespace": ""},
        {"namespace": "a/b"},
        {"namespace": "x" * 65},
        {"model_digest": ""},
        {"redis_ttl_seconds": 0},
        {"redis_ttl_seconds": 10**400},
        {"window_interval": 10**400},
        {"lmcache": {"a": 1}},
        {"host_folder": "/a\0b"},
        {"peers": "host:7450"},
    ],
    ids=str,
)
def test_a_wrong_value_is_one_problem(settings: dict[str, Any]) -> None:
    assert len(problems(**settings)) == 1


ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1e-320,
        10**400,
        float("inf"),
        "",
        "\ud800",
        "a" * 100_000,
        b"x",
        object(),
    ),
    *([], {}, [None], [[]], {"a": 1}, ["h:1"] * 300, ["dns::1"], ["*."], ["10.0.0.0/99"], ["\0"]),
    *("tcp://:1", "http://a:b:c", "file:", "file:\0", "env:=", "dns:a:1", "[::1]:5", "*."),
]


@pytest.mark.parametrize("name", [*FIELDS, "host", "bind_host", "insecure", "lmcache.remote_url"])
def test_odd_values_are_refused_or_usable(name: str) -> None:
    for value, parse in product(ODD, (parse_config, parse_p2p_config)):
        with suppress(ConfigError):
            config = parse({name: value})
            config.redis_tier_config()
            config.peer_tier_config()
            config.advertised_address(0)


def test_settings_of_lmcache_that_work_are_passed_on() -> None:
    settings = {"lmcache.numa_mode": "auto", "lmcache.local_cpu_use_hugepages": True}
    assert parse_config(settings).lmcache == {"numa_mode": "auto", "local_cpu_use_hugepages": True}
    assert parse_config({}).lmcache == {}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lmcache.remote_url", "'redis_url'"),  # with a dead server, LMCache never closes
        ("lmcache.enable_kv_events", "--kv-events-config"),
        ("lmcache.storage_plugins", "'cpu_gib', 'peers' and 'redis_url'"),
        ("lmcache.enable_p2p", "'peers'"),
        ("lmcache.pd_role", "LMCacheP2PConnector"),
        ("lmcache.lmcache_worker_ids", "'peers'"),
        ("lmcache.cache_policy", "leave it out"),
        ("lmcache.extra_config", "leave it out"),
        ("lmcache.", "leave it out"),
        ("lmcache.numa_mod", "did you mean 'lmcache.numa_mode'?"),
        ("lmcache", "is not a key"),
    ],
)
def test_other_settings_of_lmcache_are_refused_with_a_replacement(key: str, words: str) -> None:
    (problem,) = problems(**{key: True})
    assert key in problem
    assert words in problem


def test_numbers_are_no_keys() -> None:
    with pytest.raises(ConfigError, match="'1' is not a key"):
        parse_config({1: 2})  # type: ignore[dict-item]


def test_no_secret_is_ever_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    url = f"redis://user:{SECRET}@host:6379"
    config = parse_config({"redis_url": url, "hash_key": "env:MY_KEY"})
    shown = [repr(config), str(config), repr(config.model_dump()), config.model_dump_json()]
    for settings in (
        {"redis_url": url, "hash_key": SECRET, "chunk_size": 0},
        {"redis_url": f"redis://user:{SECRET}@host:not-a-port"},
        {"redis_url": f"nonsense://user:{SECRET}@host"},
        {"redis_url": [url]},
        {"hash_key": {"key": SECRET}},
    ):
        shown += problems(**settings)
    assert not [line for line in shown if SECRET in line]


def test_ranks_share_the_cpu_tier_of_their_host() -> None:
    config = parse_config({"cpu_gib": 4.0, "redis_url": "redis://h"})
    assert config.rank_gib == 4.0
    of_eight = config.fitted(256, 8)
    assert (of_eight.cpu_gib, of_eight.rank_gib) == (4.0, 0.5)
    redis = of_eight.redis_tier_config()
    assert redis is not None
    assert redis.write_queue_bytes == 128 << 20


def test_a_secret_is_text() -> None:
    for name in ("router_secret", "hash_key", "redis_url"):
        with pytest.raises(ConfigError, match=f"'{name}': must be UTF-8 text"):
            parse_config({name: "\udcff" * 32})


def transfer_of(connector: Any, extra: Any, **beside: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_connector_extra_config": extra, **beside}


_ELSEWHERE = {"host": "10.0.0.7", "insecure": True}


@pytest.mark.parametrize(
    ("transfer", "problem"),
    [
        (transfer_of("LMCacheTieredConnector", {"cpu_gb": 1}), "did you mean 'cpu_gib'"),
        (transfer_of("LMCacheP2PConnector", {"cpu_gb": 1}), "did you mean 'cpu_gib'"),
        (transfer_of("LMCacheP2PConnector", {}, kv_port=0), "'kv_port'"),
        (transfer_of("LMCacheP2PConnector", _ELSEWHERE, kv_role="kv_consumer"), "'peer_hosts'"),
        (transfer_of("LMCacheP2PConnector", {"chunk_size": 100}), "not a multiple"),
        (transfer_of("LMCacheTieredConnector", {"chunk_size": 100}), "not a multiple"),
    ],
)
def test_settings_are_checked_before_an_engine_is_built(
    transfer: dict[str, Any], problem: str
) -> None:
    among = [{"kv_connector": "NixlConnector"}, transfer]
    for each in (transfer, transfer_of("MultiConnector", {"connectors": among})):
        with pytest.raises(ConfigError, match=problem):
            check_settings(each, 16)
    check_settings(transfer_of("NixlConnector", {"cpu_gb": 1}), 16)


def test_what_is_unknown_or_refused_by_vllm_is_not_checked() -> None:
    check_settings(transfer_of("LMCacheP2PConnector", _ELSEWHERE))  # may be a producer's
    for extra, block_size in (({"chunk_size": 96}, 16), ({"chunk_size": 100}, None), ({}, 200)):
        check_settings(transfer_of("LMCacheTieredConnector", extra), block_size)
    malformed: tuple[Any, ...] = (None, 5, [None, 5, "x"], [{"kv_connector": []}])
    for children in malformed:
        check_settings(transfer_of("MultiConnector", {"connectors": children}), 16)
    unfit: tuple[Any, ...] = (None, [1], "x")
    for each in unfit:
        child = transfer_of("LMCacheTieredConnector", each)
        check_settings(transfer_of("MultiConnector", {"connectors": [child]}), 16)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peer_listen": "10.0.0.1:7450"}, "'peer_listen'.*hash_key"),
        ({"peer_listen": "peers.example:7450"}, "'peer_listen'.*hash_key"),
        ({"peer_listen": "7450"}, "HOST:PORT"),
        ({"peers": ["dns:a:70000"]}, "HOST:PORT"),
        ({"peers": "127.0.0.1:7450"}, "'peers'"),
    ],
)
def test_unsafe_or_malformed_peer_settings_are_refused(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"peer_listen": "127.0.0.1:7450"},
        {"peer_listen": "10.0.0.1:7450", "hash_key": "a secret of enough bytes"},
        {"peer_listen": "[::]:7450", "peer_insecure": True, "peers": ["dns:peers:7450", "[::1]:1"]},
    ],
)
def test_allowed_peers(settings: dict[str, Any]) -> None:
    config = parse_config({**settings, "host_sharing": False})
    assert (config.peer_tier_config() is not None) == bool(config.peers)
    assert config.remote_tiers == ((Tier.PEER,) if config.peers else ())
    assert parse_config(settings).remote_tiers == (Tier.PEER,)


def test_an_unused_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has no effect without 'host_sharing'"):
        parse_config({"host_folder": "/x", "host_sharing": False})
    with pytest.raises(ConfigError, match="host_folder"):
        parse_config({"host_folder": "relative"})


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_by_value_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    environ = {"NAME": "from env", "EMPTY": ""}
    assert resolve_secret("plain", environ) == "plain"
    assert resolve_secret("env:NAME", environ) == "from env"
    assert resolve_secret(f"file:{file}", environ) == "from file"
    assert resolve_secret("redis://u:p@h", environ) == "redis://u:p@h"
    for reference in ("env:MISSING", "env:EMPTY", "file:/no/such/file"):
        with pytest.raises(ValueError, match=reference.split(":", 1)[1]):
            resolve_secret(reference, environ)
    for content in (b"", b"  \n", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=str(file)):
            resolve_secret(f"file:{file}", environ)


# -- removed settings and values -------------------------------------------------------------------


UPGRADING = (ROOT / "docs" / "upgrading.md").read_text()


@pytest.mark.parametrize("name", limits.GONE)
def test_a_removed_setting_is_refused_with_its_replacement(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({name: 1})
    (line,) = str(raised.value).splitlines()[1:]
    assert line == f"  - {name!r} is {limits.GONE[name]}"
    assert name not in ConnectorConfig.model_fields
    assert f"| `{name}`" in UPGRADING


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ({"redis_codec": "auto"}, "use 'blosc2' or 'none'"),
        ({"redis_admission": "worth"}, "use 'reused', or 'all'"),
        ({"model_digest": "sampled"}, "leave model_digest out"),
    ],
)
def test_a_removed_value_is_refused_with_its_replacement(
    setting: dict[str, Any], instead: str
) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError) as raised:
        parse_config(setting)
    (line,) = str(raised.value).splitlines()[1:]
    assert line.startswith(f"  - {name!r}: {value!r} was removed")
    assert instead in line
    assert f"| `{name}: {value}` |" in UPGRADING


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/fast", "HOME": "/home/me"}, "/fast/lmcache-connector"),
        ({"XDG_CACHE_HOME": "fast", "HOME": "/home/me"}, "/home/me/.cache/lmcache-connector"),
        ({"HOME": "/home/me"}, "/home/me/.cache/lmcache-connector"),
        ({}, "/.cache/lmcache-connector"),
    ],
)
def test_the_folder_of_the_users_caches(environ: dict[str, str], folder: str) -> None:
    assert user_cache_folder(environ) == Path(folder)


# -- of LMCacheP2PConnector ------------------------------------------------------------------------


KEY = "a key of enough bytes"


def test_loopback_needs_no_setting() -> None:
    config = parse_p2p_config({}, 7000)
    assert config.peer_listen == "127.0.0.1:7000"
    assert "127.0.0.0/8" in config.peer_hosts
    assert config.peer_tier_config() is not None


def test_a_p2p_host_beyond_loopback_is_accepted_with_hosts_and_key() -> None:
    config = parse_p2p_config(
        {"host": "10.0.0.7", "bind_host": "::", "hash_key": KEY, "peer_hosts": ["10.0.0.0/24"]},
        7000,
    )
    assert config.peer_listen == "[::]:7000"
    assert str(config.advertised_address(2)) == "10.0.0.7:7002"
    assert parse_p2p_config({"host": "10.0.0.7", "insecure": True}, 1).peer_insecure


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "10.0.0.7", "hash_key": KEY}, ["peer_hosts"]),
        ({"host": "10.0.0.7", "peer_hosts": ["*.x"]}, ["hash_key", "'insecure'"]),
        ({"bind_host": "10.0.0.7"}, ["hash_key", "'insecure'"]),
        ({"host": "a b"}, ["'host': must be HOST:PORT"]),
        ({"host": 7}, ["'host': input should be a valid string"]),
        ({"bind_host": [1]}, ["'bind_host': input should be a valid string"]),
        ({"peer_hosts": "10.0.0.0/8"}, ["'peer_hosts': must be a list"]),
        ({"router": "tcp://a:1", "http_address": "b:2"}, ["does not support kv_role 'kv_both'"]),
        ({"insecure": "yes"}, ["'insecure'"]),
        ({"cpu_gb": 1}, ["cpu_gib"]),
        *(({name: 1}, [name, why[:20]]) for name, why in _NOT_IN_P2P.items()),
        ({"secret": KEY}, ["hash_key", "router_secret"]),
        ({"kv_buffer_size": 1}, ["cpu_gib"]),
        ({"router": "http://a:1"}, ["http_address"]),
    ],
)
def test_refusals_say_what_to_do(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_p2p_config(settings, 7000, "kv_both")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert KEY not in str(caught.value)


# -- the name of updated weights: a text, or a file that is read at each reset ---------------------


def test_text_is_the_label() -> None:
    assert read_weights_label(None) == ""
    assert read_weights_label("step 7") == "step 7"
    assert read_weights_label("files: many") == "files: many"


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "label"
    for label in ("step 1", "step 2"):
        path.write_text(f"{label}\n")
        assert read_weights_label(f"file:{path}") == label


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b" \n", "holds no label"),
        (b"x" * 4097, "more than 4096 bytes"),
    ],
)
def test_a_file_without_a_label_is_an_error(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "label"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as raised:
        read_weights_label(f"file:{path}")
    assert str(raised.value).count(str(path)) == 1
    with pytest.raises(ConfigError, match=f"'weights_label': .*{why}"):
        parse_config({"weights_label": f"file:{path}"})


def test_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer, and the engine's step would wait, too."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, why in (("fifo", "not a regular file"), ("folder", "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot be read .*{why}"):
            read_weights_label(f"file:{tmp_path / name}")
