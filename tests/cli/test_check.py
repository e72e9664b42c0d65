"""``check`` finds what would go wrong, says how to mend it, and keeps secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.command_line import Cli, CliResult
from tests.support.redis.servers import Server, running_server, valkey_binary


def transfer(**extra: Any) -> str:
    return json.dumps(
        {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_gib": 0.1, **extra},
        }
    )


def verdicts(outcome: CliResult) -> dict[str, str]:
    return {f["name"]: f["verdict"] for f in outcome.document["findings"]}


def test_a_sound_configuration_goes_through_every_tier(cli: Cli, valkey: Server) -> None:
    outcome = cli("check", transfer(redis_url=valkey.url), "--json")
    assert outcome.code == 0
    assert set(verdicts(outcome).values()) == {"ok"}
    assert {"redis write", "redis look up", "redis read and compare"} <= verdicts(outcome).keys()
    with valkey.client() as client:
        assert client.dbsize() == 0  # its chunks are gone again


def test_every_wrong_setting_is_named(cli: Cli) -> None:
    outcome = cli("check", transfer(cpu_gb=4, chunk_size="256", hash_key="hunter2-short"))
    assert outcome.code == 2
    assert "did you mean 'cpu_gib'?" in outcome.out
    assert "'chunk_size'" in outcome.out
    assert "would refuse to start" in outcome.out
    assert "hunter2" not in outcome.out + outcome.err


def test_a_secret_is_judged_beside_all_else(cli: Cli) -> None:
    """With a Redis or without, and whatever else is wrong."""
    for settings in ({}, {"redis_url": "env:NO_SUCH_URL"}, {"redis_url": "htp://h", "cpu_gib": 0}):
        outcome = cli("check", transfer(hash_key="hunter2-short", **settings))
        assert outcome.code == 2
        assert "'hash_key': needs at least 16 bytes" in outcome.out
        assert all(f"'{name}': " in outcome.out for name in settings)
        assert "hunter2" not in outcome.out + outcome.err


def test_lmcache_is_asked_about_its_own_settings(cli: Cli) -> None:
    outcome = cli("check", transfer(**{"lmcache.chunk_siz": 5}))
    assert outcome.code == 2
    assert "lmcache.chunk_siz: 'chunk_siz' is not a key: did you mean 'chunk_size'?" in outcome.out
    outcome = cli("check", transfer(**{"lmcache.save_unfull_chunk": True}))
    assert outcome.code == 2
    assert "lmcache.save_unfull_chunk is set by the connector itself; leave it out" in outcome.out
    assert cli("check", transfer(**{"lmcache.blocking_timeout_secs": 5})).code == 0


@pytest.mark.parametrize(
    "text",
    [
        *('{"kv_connector": ', "[]", "/no/such/file", "redis://u:hunter2@h"),
        *('"redis://u:hunter2@h"', '{"a":' * 100_000),
    ],
)
def test_what_is_no_configuration_is_said_in_words(cli: Cli, text: str) -> None:
    outcome = cli("check", text)
    assert outcome.code == 2
    assert "Error: " in outcome.err
    assert "Try: " in outcome.err
    assert "hunter2" not in outcome.err
    assert cli("check", text, "--json").document["ok"] is False


def test_too_much_memory_is_an_error(cli: Cli) -> None:
    outcome = cli("check", transfer(cpu_gib=60000.0), "--json")
    assert outcome.code == 1
    assert verdicts(outcome)["cpu tier"] == "error"


def test_wrong_credentials_are_told_from_a_server_that_is_away(cli: Cli) -> None:
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


def test_a_server_that_may_not_be_written_is_found(cli: Cli) -> None:
    with running_server(valkey_binary() or "", {"maxmemory": "1mb"}) as server:
        outcome = cli("check", transfer(redis_url=server.url), "--json")
    assert outcome.code == 1
    assert verdicts(outcome)["redis write"] == "error"
    assert verdicts(outcome)["redis server"] == "warning"  # noeviction
