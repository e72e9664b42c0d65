"""Whether a difference is rounding noise or wrong KV."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.audit.compare import DTYPES, OPAQUE, compare_chunks
from lmcache_connector.audit.verdicts import (
    KEPT_SAMPLES,
    MAX_FIRST_TRIES,
    MAX_ROOTS,
    AuditSampler,
    ChunkError,
    NoiseGauge,
    RootEpochs,
    Verdict,
    combine,
)
from lmcache_connector.plans import LayerDifference
from lmcache_connector.storage.geometry import ChunkGeometry

FORMATS = [*DTYPES, OPAQUE]


def uniform(error: float) -> ChunkError:
    return ChunkError(tuple((layer, error) for layer in range(30)))


def judge(gauge: NoiseGauge, error: ChunkError, is_own: bool = False) -> Verdict:
    return gauge.judge(error, is_own=is_own)


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_settings_are_found_before_and_after_noise_is_measured(name: str) -> None:
    gauge = NoiseGauge([name])
    for is_own in (True, False):
        assert judge(gauge, uniform(0.75), is_own) is Verdict.MISMATCH
    judge(gauge, uniform(0.0), is_own=True)
    assert gauge.num_samples == 1
    for is_own in (True, False):
        assert judge(gauge, uniform(0.75), is_own) is Verdict.MISMATCH


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rounding_between_instances_is_no_mismatch(name: str) -> None:
    gauge = NoiseGauge([name])
    for _ in range(2):  # without samples, and with one of 0
        assert judge(gauge, uniform(0.006)) is Verdict.MATCH
        judge(gauge, uniform(0.0), is_own=True)


def test_samples_of_0_leave_room_for_another_batch() -> None:
    """Measured on a trained model of 30 layers: 0 alone, 0.016 beside another prompt."""
    gauge = NoiseGauge(["bfloat16"])
    for _ in range(KEPT_SAMPLES):
        judge(gauge, uniform(0.0), is_own=True)
    assert judge(gauge, uniform(0.02), is_own=True) is Verdict.MATCH


def test_a_noisy_machine_widens_the_limit_but_never_beyond_the_prior() -> None:
    gauge = NoiseGauge(["bfloat16"])
    judge(gauge, uniform(0.02), is_own=True)
    assert gauge.limit() == pytest.approx(0.08)
    judge(gauge, uniform(0.09), is_own=True)
    assert gauge.limit() <= 0.1


def test_only_own_matches_count() -> None:
    gauge = NoiseGauge(["bfloat16"])
    judge(gauge, uniform(0.5), is_own=True)
    judge(gauge, uniform(0.01))  # from another instance
    assert gauge.num_samples == 0


def sampler(share: float, numbers: Iterator[float] = repeat(0.99)) -> AuditSampler:  # noqa: B008
    return AuditSampler(share, lambda: next(numbers))


def test_the_first_of_each_subject_and_then_a_share_is_audited() -> None:
    chances = iter([0.5, 0.0009, 0.001])
    one = sampler(0.001, chances)
    for subject in ("plain", "image"):
        assert one.wants(subject)
        one.begin(subject)
        one.end(subject, is_answered=True)
    assert [one.wants("plain") for _ in range(3)] == [False, True, False]


def test_one_first_audit_at_a_time_per_subject() -> None:
    one = sampler(0.001)
    one.begin("plain")
    assert not one.wants("plain")
    assert one.wants("image")


def test_an_unanswered_first_audit_is_repeated() -> None:
    one = sampler(0.001)
    for _ in range(MAX_FIRST_TRIES):
        assert one.wants("plain")
        one.begin("plain")
        one.end("plain", is_answered=False)
    assert not one.wants("plain")


def test_after_a_reset_every_subject_is_new() -> None:
    one = sampler(0.001)
    one.begin("plain")
    one.end("plain", is_answered=True)
    one.forget()
    assert one.wants("plain")


ROOT, OTHER = b"plain", b"adapter"


def epochs() -> RootEpochs:
    numbers = count()
    one = RootEpochs(lambda: f"nonce {next(numbers)}")
    one.rename("weights")
    return one


def test_each_mismatch_gives_a_root_new_keys() -> None:
    one, seen = epochs(), {"weights"}
    for _ in range(3):
        one.separate(ROOT)
        assert one.epoch(ROOT) not in seen
        seen.add(one.epoch(ROOT))
    assert one.epoch(OTHER) == "weights"
    assert one.num_apart() == 1


def test_too_many_roots_separate_all() -> None:
    one = epochs()
    for root in range(MAX_ROOTS + 1):
        one.separate(str(root).encode())
    assert one.epoch(b"new") == one.epoch(b"0") != "weights"
    assert one.num_apart() == 1


@given(st.lists(st.sampled_from([ROOT, OTHER, None])))
def test_a_root_is_shared_unless_an_audit_failed(history: list[bytes | None]) -> None:
    apart: set[bytes] = set()
    one = epochs()
    for number, root in enumerate(history):
        if root is None:
            one.rename(f"weights {number}")
            apart.clear()
        else:
            one.separate(root)
            apart.add(root)
        for each in (ROOT, OTHER):
            assert (one.epoch(each) == one.name) == (each not in apart)


# -- comparison of chunks --------------------------------------------------------------------------


TOKENS, HEADS, LAYERS, WIDTH = 4, 3, 2, 8  # elements of K and V of one token and head


def geometry(item_bytes: int, heads: tuple[int, ...] = tuple(range(HEADS))) -> ChunkGeometry:
    return ChunkGeometry(TOKENS, 5, (WIDTH * item_bytes,) * LAYERS, heads, HEADS, "x")


def chunk(seed: int, name: str) -> torch.Tensor:
    """[heads][layers][tokens][width]."""
    numbers = torch.randn(
        HEADS, LAYERS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)
    )
    return (numbers * 20).to(DTYPES[name])


def as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy().tobytes())


def compare(name: str, one: torch.Tensor, other: torch.Tensor) -> tuple[LayerDifference, ...]:
    shape = geometry(one.element_size(), tuple(range(len(one))))
    return compare_chunks(as_bytes(one), as_bytes(other), shape, (name,) * LAYERS)


@pytest.mark.parametrize("name", DTYPES)
def test_every_format_is_read_as_numbers(name: str) -> None:
    one, other = chunk(1, name), chunk(2, name)
    for found in compare(name, one, other):
        half = slice(found.half * WIDTH // 2, (found.half + 1) * WIDTH // 2)
        ours, theirs = (side.double()[:, found.layer - 5, :, half] for side in (one, other))
        assert found.difference == pytest.approx(float((ours - theirs).square().sum()))
        assert found.computed == pytest.approx(float(ours.square().sum()))
        assert found.stored == pytest.approx(float(theirs.square().sum()))


def test_planes_keep_k_and_v_apart() -> None:
    one = chunk(1, "float32")
    other = one.clone()
    flat = other.view(HEADS, LAYERS, -1)
    flat[:, :, flat.shape[2] // 2 :] += 1  # V
    shape = geometry(4)
    found = compare_chunks(
        as_bytes(one), as_bytes(other), shape, ("float32",) * LAYERS, planar=True
    )
    assert [difference.difference > 0 for difference in found] == [False, True] * LAYERS


def test_opaque_bytes_count_by_equality() -> None:
    one = torch.zeros(HEADS, LAYERS, TOKENS, WIDTH, dtype=torch.uint8)
    other = one.clone()
    other[:, 1, :, : WIDTH // 4] = 7
    error = combine(compare(OPAQUE, one, other))
    assert [layer for layer, _ in error.layers] == [5, 6]
    assert [error for _, error in error.layers] == [0.0, pytest.approx(0.5**0.5)]


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_an_infinite_number_on_one_side_is_an_infinite_difference(strange: float) -> None:
    one = chunk(1, "bfloat16")
    one[0, 0, 0, 0] = strange
    assert combine(compare("bfloat16", one, one)).largest == 0
    assert combine(compare("bfloat16", one, chunk(1, "bfloat16"))).largest == float("inf")
    other = one.clone()
    other[0, 0, 0, 1] += 1
    assert 0 < combine(compare("bfloat16", one, other)).largest < 0.1


@given(st.integers(0, 99), st.sampled_from(sorted(DTYPES)))
def test_ranks_add_up(seed: int, name: str) -> None:
    one, other = chunk(seed, name), chunk(seed + 100, name)
    whole = combine(compare(name, one, other))
    parts = [compare(name, one[i : i + 1], other[i : i + 1]) for i in range(HEADS)]
    summed = combine(found for part in parts for found in part)
    assert [layer for layer, _ in summed.layers] == [layer for layer, _ in whole.layers]
    for (_, error), (_, expected) in zip(summed.layers, whole.layers, strict=True):
        assert error == pytest.approx(expected)
