"""Windows that are lost, spoiled or too many: whatever is hit is what another process computed.

``writer`` fills Valkey; ``reader`` has only what it finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.engine.test_families import again, assert_loaded
from tests.support.engines.calls import check_integrity, forget_unseen, wait_for_writes
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.layer_digests import differences
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import tiered_transfer
from tests.support.engines.tiny_families import build_family
from tests.support.limits import PATIENT
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import value_names

LIMITS = PATIENT

pytestmark = pytest.mark.soak

CHUNK = 128
BORDER = 10 * CHUNK
FULL, WINDOWS = b"00", b"01"
"""Parts of the model, as the last byte of a chunk's name says."""
_MOST_LOADS = 4
"""Until all is well again: a load that fails may not have come to all that is spoiled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("gemma3 5:1", tmp_path_factory.mktemp("family"))


def transfer(valkey: Server, **extra: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "compute_or_load": "always",
        "audit_share": 0.0,
        "redis_url": valkey.url,
    }
    return tiered_transfer(**settings | extra)


def serving(start: StartInstance, folder: Path, config: dict[str, Any]) -> Iterator[VllmInstance]:
    with start(config, folder, max_num_batched_tokens=512) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def writer(start: StartInstance, folder: Path, valkey: Server) -> Iterator[VllmInstance]:
    yield from serving(start, folder, transfer(valkey, cpu_gib=0.25))


@pytest.fixture(scope="module")
def reader(start: StartInstance, folder: Path, valkey: Server) -> Iterator[VllmInstance]:
    yield from serving(start, folder, transfer(valkey, cpu_gib=0.25))


def settle(probe: EngineProbe) -> None:
    """All is stored, and Redis has it."""
    probe.drain()
    wait_for_writes(probe)


def assert_same_bytes(hit: Served, cold: Served) -> None:
    """As far as both runs still hold the blocks."""
    wrong = differences(hit.layer_digests, cold.layer_digests)
    assert [place for place in wrong if place.first_token < hit.cached_tokens] == []


def of_part(valkey: Server, part: bytes) -> list[bytes]:
    return [name for name in value_names(valkey) if name.split(b"}")[0].endswith(part)]


def gone(client: redis.Redis, name: bytes) -> None:
    """Evicted: by then nobody has claimed to write it for long."""
    tag = name.split(b"}")[0] + b"}"
    client.delete(name, *client.keys(tag.replace(b"{", b"?").replace(b"}", b"?") + b":claim:*"))


def flipped(client: redis.Redis, name: bytes) -> None:
    middle = client.strlen(name) // 2
    byte = client.getrange(name, middle, middle)
    client.setrange(name, middle, bytes([byte[0] ^ 1]))


def cut(client: redis.Redis, name: bytes) -> None:
    client.set(name, client.get(name)[:-64])


def of_another_type(client: redis.Redis, name: bytes) -> None:
    client.delete(name)
    client.rpush(name, b"x")


@pytest.mark.parametrize("spoil", [gone, flipped, cut, of_another_type])
@pytest.mark.parametrize("part", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("which", ["one", "all"])
def test_spoiled_values_are_a_miss_and_heal(
    writer: VllmInstance,
    reader: VllmInstance,
    valkey: Server,
    spoil: Callable[[redis.Redis, bytes], None],
    part: bytes,
    which: str,
) -> None:
    prompt = random_prompt(sum(f"{spoil.__name__} {part!r} {which}".encode()), BORDER + 5)
    with valkey.client() as client:
        client.flushall()
        cold = writer.serve(prompt, 3)
        writer.call(settle)
        names = of_part(valkey, part)
        for name in names if which == "all" else names[len(names) // 2 :][:1]:
            spoil(client, name)
    hit = reader.serve(prompt, 3)
    assert hit.external_hit_tokens <= BORDER
    assert_same_bytes(hit, cold)
    for _ in range(_MOST_LOADS):
        reader.call(settle)
        reader.call(forget_unseen)
        reader.serve(random_prompt(99, 10))
        healed = reader.serve(prompt, 3)
        assert_same_bytes(healed, hit)
        if healed.external_hit_tokens == BORDER:
            return
    pytest.fail(f"not healed after {_MOST_LOADS} loads")


def test_an_answer_longer_than_the_window(writer: VllmInstance, reader: VllmInstance) -> None:
    prompt = random_prompt(20, 600)
    first = writer.serve(prompt, 1300)
    turn = [*prompt, *first.token_ids[:-1], *random_prompt(21, 70)]
    cold = writer.serve(turn, 3)  # goes on where vLLM's own hit ends
    hit = again(writer, turn)
    end = (len(turn) - 1) // CHUNK * CHUNK
    assert_loaded(hit, cold, end)
    writer.call(settle)
    elsewhere = reader.serve(turn, 3)
    assert elsewhere.external_hit_tokens == end
    assert_same_bytes(elsewhere, hit)


@pytest.fixture(scope="module")
def small(start: StartInstance, folder: Path, valkey: Server) -> Iterator[VllmInstance]:
    """Its 6 MiB hold fifteen windows, or ninety chunks of the rest."""
    yield from serving(start, folder, transfer(valkey, cpu_gib=6 / 1024))


def test_a_prompt_larger_than_the_memory_between(writer: VllmInstance, small: VllmInstance) -> None:
    prompt = random_prompt(200, 7000)
    cold = writer.serve(prompt, 2)
    writer.call(settle)
    hit = small.serve(prompt, 2)
    assert small.counts().total("failed_loads") == 0
    assert hit.external_hit_tokens == 6999 // CHUNK * CHUNK
    assert_same_bytes(hit, cold)


@pytest.fixture(scope="module")
def thrifty(start: StartInstance, folder: Path, valkey: Server) -> Iterator[VllmInstance]:
    """Writes to Valkey what is wanted twice."""
    yield from serving(start, folder, transfer(valkey, cpu_gib=0.25, redis_admission="reused"))


@pytest.mark.parametrize(("own", "beyond"), [(False, 0), (True, 0), (False, 900)])
def test_what_is_wanted_twice_is_found_whole(
    thrifty: VllmInstance, reader: VllmInstance, valkey: Server, own: bool, beyond: int
) -> None:
    prompt = random_prompt(300 + beyond + own, BORDER + 1)
    with valkey.client() as client:
        client.flushall()
    thrifty.serve(prompt, 3)
    if not own:
        thrifty.reset_prefix_cache()
    thrifty.serve([*prompt, *random_prompt(400 + beyond, beyond)], 3)
    thrifty.call(settle)
    assert reader.serve(prompt, 2).external_hit_tokens == BORDER
