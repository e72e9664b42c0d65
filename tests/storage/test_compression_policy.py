"""Values are compressed where that makes loads quicker, and only there."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.storage.compression_policy import CompressionPolicy, Measured, pays
from tests.support.kv_bytes import bfloat16_bytes

# Of bfloat16 KV on one core of a server.
USUAL = Measured(link=100e6, decompress=1.5e9, ratio=0.7, core_share=1.0)
KV = bfloat16_bytes(1, 64 << 10)


def at(link: float) -> Measured:
    return replace(USUAL, link=link)


def test_compression_pays_on_slow_links() -> None:
    assert pays(at(1e6), is_on=False)
    assert pays(at(250e6), is_on=False)
    assert not pays(at(350e6), is_on=False)
    assert not pays(at(10e9), is_on=False)


def test_once_on_it_stays_until_it_costs() -> None:
    assert pays(at(400e6), is_on=True)
    assert not pays(at(500e6), is_on=True)


def test_a_full_server_makes_it_worth_more() -> None:
    assert pays(at(500e6), is_on=False, memory_is_full=True)
    assert not pays(at(2e9), is_on=False, memory_is_full=True)
    assert not pays(replace(USUAL, ratio=0.95), is_on=True, memory_is_full=True)


def test_where_cores_are_what_lacks_it_ends() -> None:
    assert not pays(replace(USUAL, core_share=0.5), is_on=True)


def test_what_hardly_shrinks_is_left_alone() -> None:
    assert not pays(replace(USUAL, link=1e6, ratio=0.95), is_on=False)
    assert not pays(replace(USUAL, link=1e6, ratio=1.0), is_on=True)


@given(st.floats(1e5, 1e11), st.floats(1e7, 1e11), st.floats(0.05, 1.0), st.booleans())
def test_it_never_makes_a_load_slower(
    link: float, decompress: float, ratio: float, is_on: bool
) -> None:
    if pays(Measured(link, decompress, ratio, 1.0), is_on=is_on):
        assert ratio / link + 1 / decompress <= 1 / link


def policy(codec: str, ticks: float = 1e-4, cpu_ticks: float = 1e-4) -> CompressionPolicy:
    """Every look at a clock takes ``ticks``: 64 KiB decompress at 650 MB/s."""
    clock, cpu_clock = count(0.0, ticks), count(0.0, cpu_ticks)
    return CompressionPolicy(codec, 2, 8, lambda: next(clock), lambda: next(cpu_clock))  # type: ignore[arg-type]


def share_compressed(policy: CompressionPolicy, payload: bytes = KV, num: int = 64) -> float:
    return sum(policy.compress(payload, "bfloat16") is not None for _ in range(num)) / num


@pytest.mark.parametrize(("codec", "share"), [("none", 0.0), ("blosc2", 1.0)])
@pytest.mark.parametrize("link", [1e6, 1e10])
def test_it_does_what_it_is_told(codec: str, share: float, link: float) -> None:
    told = policy(codec)
    told.received(1 << 20, (1 << 20) / link)
    assert share_compressed(told) == share


def test_auto_waits_until_the_link_is_known() -> None:
    auto = policy("auto")
    assert share_compressed(auto) == 0.0
    auto.received(1 << 20, 0.1)
    assert share_compressed(auto) == 1.0


def test_auto_follows_the_link() -> None:
    auto = policy("auto")
    for link, share in ((10e6, 1.0), (10e9, 0.0), (10e6, 1.0)):
        for _ in range(100):
            auto.received(1 << 20, (1 << 20) / link)
        share_compressed(auto, num=16)
        assert share_compressed(auto) == share


def test_auto_leaves_noise_alone_and_learns_that_kv_is_none() -> None:
    auto, noise = policy("auto"), random.Random(1).randbytes(len(KV))
    auto.received(1 << 20, 0.1)
    assert share_compressed(auto, noise) == 0.0
    share_compressed(auto)
    assert share_compressed(auto) == 1.0


def test_auto_stops_where_threads_wait_for_a_core() -> None:
    starved = policy("auto", cpu_ticks=2e-5)
    starved.received(1 << 20, 0.1)
    assert share_compressed(starved) == 0.0
