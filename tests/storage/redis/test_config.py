"""Settings of the tier, and the names of its values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.geometry import Stripe
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_names import (
    ValueName,
    chunk_tag,
    parse_value_name,
    probe_key,
    scan_pattern,
    stripe_suffix,
)


def test_config_lists_every_problem() -> None:
    with pytest.raises(ValueError, match="namespace") as error:
        RedisTierConfig(
            url="nonsense",
            namespace="a{b}",
            refresh_ttl=True,
            hash_key=b"short",
        )
    message = str(error.value)
    for name in ("redis_ttl_seconds", "hash_key", "redis_url"):
        assert name in message


# -- names of values -------------------------------------------------------------------------------


KEY = bytes(range(CHUNK_KEY_BYTES))
STRIPE = Stripe(layer_start=2, layer_end=14, shard=7, offset=0, num_bytes=1)


def test_the_names_of_values_never_change() -> None:
    """Golden names: with others, an instance finds no value that was stored before."""
    hexadecimal = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    tag = f"lmc:{{team a:{hexadecimal}}}".encode()
    assert chunk_tag("team a", KEY) == tag
    assert tag + stripe_suffix(STRIPE) == tag + b":2-14:7"
    assert probe_key("team a") == b"lmc:{team a:}:probe"


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="{}"), min_size=1),
    st.binary(min_size=CHUNK_KEY_BYTES, max_size=CHUNK_KEY_BYTES),
    *[st.integers(0, 1 << 29)] * 3,
)
def test_a_name_is_parsed_into_its_parts(
    namespace: str, key: bytes, first: int, end: int, shard: int
) -> None:
    name = chunk_tag(namespace, key) + stripe_suffix(Stripe(first, end, shard, 0, 0))
    assert parse_value_name(name) == ValueName(namespace, key, first, end, shard)


def test_other_keys_name_no_value() -> None:
    tag = chunk_tag("n", KEY)
    for other in (tag, tag + b":0-4:" + b"1" * 5000, probe_key("n"), b"somebody's key", b""):
        assert parse_value_name(other) is None


def test_a_scan_finds_one_namespace_or_all() -> None:
    assert scan_pattern(None) == b"lmc:{*:*"
    assert scan_pattern("n", "00ff") == b"lmc:{n:00ff*"
    assert scan_pattern("a*[b]?\\") == rb"lmc:{a\*\[b\]\?\\:*"
