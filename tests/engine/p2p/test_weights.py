"""Real engines hand over between equal weights, whatever happened to either side, and else not."""

from __future__ import annotations

import pytest

from tests.support.engines.handover import Answer, Ask, ask, at_rest
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import Engines
from tests.support.engines.updates import load_rows, move_weights
from tests.support.prompts import random_prompt

NUM_TOKENS = 700


@pytest.fixture
def pair(engines: Engines) -> tuple[VllmInstance, VllmInstance]:
    """With nothing in vLLM's own caches."""
    found = engines.prefill[0][0], engines.decode[0][0]
    for each in found:
        each.call(at_rest)
        each.reset_prefix_cache()
    return found


def check(cold: Answer, served: Answer) -> None:
    """All of the prompt was handed over, and is the same."""
    assert served.served.external_hit_tokens == NUM_TOKENS
    assert () != served.served.block_digests == cold.served.block_digests


def check_computed(engines: Engines, decode: VllmInstance, seed: int) -> None:
    """Nothing is handed over, though the prefill engine computes other KV for the prompt."""
    prompt = random_prompt(seed, NUM_TOKENS)
    own = decode.call(ask, Ask(f"own-{seed}", prompt))
    decode.reset_prefix_cache()
    for hand_over in (engines.hand_over, engines.hand_over_by_params):
        cold, served = hand_over(prompt)
        assert served.served.external_hit_tokens == 0
        assert () != served.served.block_digests == own.served.block_digests
        assert cold.served.block_digests != own.served.block_digests
        decode.reset_prefix_cache()


@pytest.mark.parametrize("resets", [(2, 0), (0, 2), (1, 2)])
def test_equal_weights_hand_over_however_often_each_was_reset(
    engines: Engines, pair: tuple[VllmInstance, VllmInstance], resets: tuple[int, int]
) -> None:
    for number, (each, num_resets) in enumerate(zip(pair, resets, strict=True)):
        for _ in range(num_resets):
            each.reset_prefix_cache()
            each.serve(random_prompt(90 + number, 50))
    for seed, hand_over in enumerate((engines.hand_over, engines.hand_over_by_params)):
        check(*hand_over(random_prompt(100 * sum(resets) + 10 * resets[0] + seed, NUM_TOKENS)))


def test_an_update_of_both_hands_over_and_of_one_does_not(
    engines: Engines, pair: tuple[VllmInstance, VllmInstance]
) -> None:
    """In place, which nobody tells of, and vLLM's own reset with its defaults."""
    prefill, decode = pair
    assert prefill.call(move_weights, 0.02) > 0
    prefill.reset_prefix_cache()
    check_computed(engines, decode, 1)
    assert decode.call(move_weights, 0.02) > 0
    decode.reset_prefix_cache()
    check(*engines.hand_over(random_prompt(2, NUM_TOKENS)))


def test_an_update_without_a_reset_hands_over_nothing(
    engines: Engines, pair: tuple[VllmInstance, VllmInstance]
) -> None:
    """The prefill engine has KV of before in vLLM's own cache, the decode engine none."""
    prefill, decode = pair
    prompt = random_prompt(3, NUM_TOKENS)
    old = prefill.serve(prompt)
    for each in pair:
        each.call(load_rows, 0.5)
    decode.reset_prefix_cache()
    own = decode.call(ask, Ask("own-3", prompt))
    decode.reset_prefix_cache()
    assert old.block_digests[:5] != own.served.block_digests[:5]
    for _ in range(2):  # by then the weights are read
        cold, served = engines.hand_over(prompt)
        assert cold.served.cached_tokens > 0
        assert served.served.external_hit_tokens == 0
        assert served.served.block_digests == own.served.block_digests
        decode.reset_prefix_cache()
    prefill.reset_prefix_cache()
    check(*engines.hand_over(prompt))
