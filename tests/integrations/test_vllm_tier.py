"""vLLM's own managers over Redis: an instance loads another one's blocks, byte for byte."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from lmcache_connector.config.strict import parse
from lmcache_connector.errors import ConfigError
from lmcache_connector.integrations.vllm_tier import KEYS as SETTINGS
from lmcache_connector.integrations.vllm_tier import TierSettings
from tests.integrations.offloading import Instance, block_key, running_instance, tier_settings
from tests.support.redis.proxies import Fault, FaultProxy, Kind
from tests.support.redis.servers import Server, value_names

KEYS = [block_key(i) for i in range(8)]


def blocks_for(instance: Instance, keys: list[OffloadKey] = KEYS) -> dict[OffloadKey, bytes]:
    return {key: random.Random(key).randbytes(instance.block_bytes) for key in keys}


def test_an_instance_loads_anothers_blocks(valkey: Server, model: Path) -> None:
    tier = tier_settings(valkey.url)
    with running_instance(model, tier) as one, running_instance(model, tier) as other:
        blocks = blocks_for(one)
        one.store(blocks)
        assert other.load(KEYS) == list(blocks.values())
        assert other.tier._tier.stats().counts.chunks_hit == len(KEYS)
        assert other.load([block_key(99), KEYS[0]]) == [None, blocks[KEYS[0]]]


def test_a_load_that_fails_midway_keeps_the_rest(valkey: Server, model: Path) -> None:
    tier = tier_settings(valkey.url)
    with running_instance(model, tier) as one, running_instance(model, tier) as other:
        blocks = blocks_for(one)
        one.store(blocks)
        names = other.tier._keys(KEYS)
        gone = f"lmc:{{default:{names[5].hex()}}}".encode()
        with valkey.client() as client:
            victims = [name for name in value_names(valkey) if name.startswith(gone)]
            assert victims
            for name in victims:
                client.setrange(name, 1000, b"\xff\x00\xff\x00\xff")
        loaded = other.load(KEYS)
        assert loaded[:5] == [blocks[key] for key in KEYS[:5]]
        assert loaded[5] is None
        assert all(data in (None, blocks[key]) for key, data in zip(KEYS, loaded, strict=True))


def test_another_models_blocks_are_not_found(valkey: Server, model: Path, tmp_path: Path) -> None:
    changed = tmp_path / "model"
    shutil.copytree(model, changed)
    weights = next(changed.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    tier = tier_settings(valkey.url)
    with running_instance(changed, tier) as one:
        one.store(blocks_for(one))
        assert one.tier._tier.stats().counts.bytes_written > 0
    weights.write_bytes(data)
    with running_instance(changed, tier) as other:
        assert other.load(KEYS) == [None] * len(KEYS)
    with running_instance(changed, tier_settings(valkey.url, model_digest="ours")) as one:
        one.store(blocks_for(one))
    with running_instance(changed, tier_settings(valkey.url, model_digest="ours")) as other:
        assert None not in other.load(KEYS)


def test_a_name_on_the_hub_is_no_identity(
    valkey: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells a tier neither the revision nor the folder of downloads: the cached ``main`` may
    not be what it loads."""
    cached = tmp_path / "models--some--model"
    shutil.copytree(model, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def instance(**settings: str) -> AbstractContextManager[Instance]:
        return running_instance(model, tier_settings(valkey.url, **settings), name="some/model")

    with pytest.raises(ConfigError, match=r"'model_digest': .* 'some/model'"), instance():
        pass
    with instance(model_digest="v1") as one, instance(model_digest="v1") as same:
        blocks = blocks_for(one)
        one.store(blocks)
        assert same.load(KEYS) == list(blocks.values())
    with instance(model_digest="v2") as other:
        assert other.load(KEYS) == [None] * len(KEYS)


def test_a_folder_without_weights_is_no_identity(model: Path, tmp_path: Path) -> None:
    """vLLM keeps only the configuration here, if the weights are in an object store."""
    shutil.copy(model / "config.json", tmp_path)
    tier, name = tier_settings("redis://127.0.0.1:1"), str(tmp_path)
    wrong = pytest.raises(ConfigError, match="'model_digest'")
    with wrong, running_instance(model, tier, name=name):
        pass


@pytest.mark.parametrize("setting", [{"namespace": "theirs"}, {"hash_key": "a secret of 16 bytes"}])
def test_strangers_share_no_kv(valkey: Server, model: Path, setting: dict[str, str]) -> None:
    stranger = tier_settings(valkey.url, **setting)
    with (
        running_instance(model, tier_settings(valkey.url)) as one,
        running_instance(model, stranger) as other,
    ):
        one.store(blocks_for(one))
        assert one.tier._tier.stats().counts.bytes_written > 0
        assert other.load(KEYS) == [None] * len(KEYS)


def test_after_a_reset_old_blocks_miss(valkey: Server, model: Path) -> None:
    """vLLM resets after an update of the weights, and keeps the names of blocks."""
    tier = tier_settings(valkey.url)
    with running_instance(model, tier) as one, running_instance(model, tier) as other:
        blocks = blocks_for(one)
        one.store(blocks)
        one.manager.reset_cache()
        assert one.load(KEYS) == [None] * len(KEYS)
        one.store({key: data[::-1] for key, data in blocks.items()})
        assert other.load(KEYS) == list(blocks.values())


def test_forgeable_names_are_not_used(valkey: Server, model: Path) -> None:
    short = [block_key(i, num_bytes=16) for i in range(4)]
    with running_instance(model, tier_settings(valkey.url)) as one:
        one.store(blocks_for(one, short))
        assert value_names(valkey) == []
    with running_instance(model, tier_settings(valkey.url)) as other:
        assert other.load(short) == [None] * 4


@pytest.mark.parametrize("offset", [0, 1000])
def test_no_call_outlasts_a_silent_server(valkey: Server, model: Path, offset: int) -> None:
    """It falls silent at a lookup, or amid a block."""
    with FaultProxy(valkey.port) as proxy:
        tier = tier_settings(proxy.url, load_deadline_seconds=1.0, redis_timeout_seconds=0.5)
        with running_instance(model, tier) as one, running_instance(model, tier) as other:
            one.store(blocks_for(one))
            assert one.tier._tier.stats().counts.bytes_written > 0
            proxy.arm(Fault(Kind.STALL, offset, sticky=True))
            begun = time.monotonic()
            assert other.load(KEYS) == [None] * len(KEYS)
            assert proxy.num_struck
            other.store(blocks_for(other, [block_key(i) for i in range(20, 24)]))
            other.manager.reset_cache()
            assert time.monotonic() - begun < 1.0 + 30.0


def test_wrong_settings_stop_the_start(model: Path) -> None:
    tier = tier_settings("redis://127.0.0.1:1", namespce="x", redis_connections=0)
    wrong = r"(?s)'redis_connections' is no longer a setting.*did you mean 'namespace'"
    with pytest.raises(ConfigError, match=wrong), running_instance(model, tier):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu_gib": 4}, "'cpu_gib' is not a key: valid keys are redis_url, namespace"),
        ({"redis_url": None}, "'redis_url': field required"),
        ({}, "'namespace': field required"),
    ],
)
def test_settings_of_the_tiered_connector_alone_are_refused(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(TierSettings, {"redis_url": "redis://h", **settings}, "the tier", only=SETTINGS)
