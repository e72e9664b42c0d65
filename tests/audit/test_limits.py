"""What is noise and what is wrong."""

from __future__ import annotations

import pytest

from lmcache_connector.audit.compare import DECODERS, OPAQUE
from lmcache_connector.audit.verdicts import (
    KEPT_SAMPLES,
    ChunkError,
    NoiseGauge,
    Verdict,
    combine,
)
from lmcache_connector.plans import LayerDifference

FORMATS = [*DECODERS, OPAQUE]


def uniform(error: float) -> ChunkError:
    return ChunkError(tuple((layer, error) for layer in range(30)))


def one_layer(error: float, others: float = 0.0) -> ChunkError:
    return ChunkError(((0, error), *((layer, others) for layer in range(1, 30))))


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
def test_what_arithmetic_does_between_instances_is_no_mismatch(name: str) -> None:
    gauge = NoiseGauge([name])
    for _ in range(2):  # unmeasured, and where an instance repeats itself bit for bit
        assert judge(gauge, uniform(0.006)) is Verdict.MATCH
        judge(gauge, uniform(0.0), is_own=True)


def test_an_instance_that_repeated_itself_bit_for_bit_may_compute_in_another_batch() -> None:
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


def test_a_single_layer_of_small_values_may_be_noisier_than_the_others() -> None:
    gauge = NoiseGauge(["bfloat16"])
    assert judge(gauge, one_layer(0.3, 0.004)) is Verdict.MATCH
    assert judge(gauge, one_layer(0.9, 0.004)) is Verdict.MISMATCH


def test_what_is_wrong_is_no_noise() -> None:
    gauge = NoiseGauge(["bfloat16"])
    judge(gauge, uniform(0.5), is_own=True)
    judge(gauge, uniform(0.01))  # another instance's
    assert gauge.num_samples == 0


def test_the_latest_samples_count() -> None:
    gauge = NoiseGauge(["bfloat16"])
    judge(gauge, uniform(0.02), is_own=True)
    for _ in range(KEPT_SAMPLES):
        judge(gauge, uniform(0.0), is_own=True)
    assert gauge.num_samples == KEPT_SAMPLES
    assert gauge.limit() < 0.08


def test_zeros_in_one_chunk_are_an_error_of_one() -> None:
    error = combine([LayerDifference(0, 0, 4.0, 4.0, 0.0), LayerDifference(0, 1, 0.0, 0.0, 0.0)])
    assert error.layers == ((0, 1.0),)


def test_nothing_is_no_answer() -> None:
    with pytest.raises(ValueError, match="nothing was compared"):
        combine([])


def test_the_words_say_which_layer() -> None:
    assert str(one_layer(0.9, 0.01)) == (
        "relative error 0.01 (median of 30 layers), at most 0.9 (layer 0)"
    )
