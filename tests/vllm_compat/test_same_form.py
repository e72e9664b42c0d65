"""Versions that compute the same KV have the same keys, and those of 0.32 stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.vllm_compat.identity import configuration_digests, fingerprint
from lmcache_connector.vllm_compat.identity_tables import OTHERS_HAVE, OTHERS_LACK, same_form
from tests.support.vllm_configs import kv_cache, vllm_config

# Of the tiny model, in every version of vLLM that this release names. A change of these bytes is a
# change of format: nothing that was stored before is ever found again.
FINGERPRINT = "e93e616e6bd00196ad54c20d637999f87b1aacd3a512e38344f0eea1d7bcd0f4"
CHUNK_KEY = "fd4e76de825d63bcaa1cff7114519e425fe834c4aa310b0172a6efdf6959e47d"


def digests(model: Path) -> dict[str, str]:
    return configuration_digests(vllm_config(model), kv_cache(), ["a packing"])


def first_key(configuration: dict[str, str]) -> str:
    root = {"namespace": "default", "weights": "w", "configuration": configuration}
    return PrefixHasher(root, 128, None).root_key({}).hex()


def test_keys_are_what_they_were(model: Path) -> None:
    found = digests(model)
    assert (fingerprint(found), first_key(found)) == (FINGERPRINT, CHUNK_KEY)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", False),
        ("vllm.v1.kv_cache_interface.FullAttentionSpec", "is_draft", False),
        ("vllm.v1.kv_cache_interface.SlidingWindowSpec", "is_draft", False),
        ("vllm.model_executor.models.registry._ModelInfo", "supports_lora", True),
    ],
)
def test_a_field_that_changes_nothing_is_left_out(kind: str, field: str, value: object) -> None:
    assert same_form([{"is": kind, field: value}]) == same_form([{"is": kind}])


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", True),
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", 0),
        ("vllm.v1.kv_cache_interface.FullAttentionSpec", "is_draft", True),
        ("somebodys.CacheConfig", "user_specified_mamba_block_size", False),
        ("vllm.config.cache.CacheConfig", "something_new", False),
    ],
)
def test_any_other_keeps_versions_apart(kind: str, field: str, value: object) -> None:
    form = {"is": kind, field: value}
    assert same_form(form) == form


def test_the_tables_do_not_contradict_each_other() -> None:
    for name, fields in OTHERS_LACK.items():
        assert not fields.keys() & OTHERS_HAVE.get(name, {}).keys()
