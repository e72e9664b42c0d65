"""Settings of ``LMCacheP2PConnector``: what became of its own."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.config.tiered import _GONE, parse_p2p_config
from lmcache_connector.errors import ConfigError

KEY = "a key of enough bytes"


def test_on_loopback_nothing_has_to_be_set() -> None:
    config = parse_p2p_config({}, 7000)
    assert config.peer_listen == "127.0.0.1:7000"
    assert "127.0.0.0/8" in config.peer_hosts
    assert config.peer_tier_config() is not None


def test_beyond_it_hosts_and_a_key_have_to_be() -> None:
    config = parse_p2p_config(
        {"host": "10.0.0.7", "bind_host": "::", "hash_key": KEY, "peer_hosts": ["10.0.0.0/24"]},
        7000,
    )
    assert config.peer_listen == "[::]:7000"
    assert str(config.told_address(2)) == "10.0.0.7:7002"
    assert parse_p2p_config({"host": "10.0.0.7", "insecure": True}, 1, loads=False).peer_insecure


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "10.0.0.7", "hash_key": KEY}, ["peer_hosts"]),
        ({"host": "10.0.0.7", "peer_hosts": ["*.x"]}, ["hash_key", "'insecure'"]),
        ({"bind_host": "10.0.0.7"}, ["hash_key", "'insecure'"]),
        ({"host": "a b"}, ["peer_listen"]),
        ({"host": 7}, ["peer_host"]),
        ({"insecure": "yes"}, ["'insecure'"]),
        ({"cpu_gb": 1}, ["cpu_gib"]),
        *(({name: 1}, [name, why[:20]]) for name, why in _GONE.items()),
        ({"secret": KEY}, ["hash_key", "router_secret"]),
        ({"kv_buffer_size": 1}, ["cpu_gib"]),
        ({"router": "http://a:1"}, ["http_address"]),
    ],
)
def test_what_is_refused_says_what_to_do(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_p2p_config(settings, 7000)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert KEY not in str(caught.value)
