"""Speculative decoding and structured output: what is loaded changes neither how many drafts are
accepted nor what the grammar allows, and only accepted tokens are stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines.asks import Ask, ask_all, far_blocks, kv_at_first_token
from tests.support.engines.calls import check_integrity
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import BLOCK_SIZE, kv_transfer
from tests.support.prompts import random_prompt

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def engine(start: StartInstance) -> Iterator[VllmInstance]:
    with start(kv_transfer(), speculative_config=NGRAM) as instance:
        yield instance
        instance.call(check_integrity)


def test_a_stop_in_the_middle_of_accepted_drafts(engine: VllmInstance) -> None:
    """What lies in blocks beyond the stop is not stored under anybody's key."""
    for max_tokens in (63, 64, 65, 66, 67):
        prompt = random_prompt(100 + max_tokens, 450)
        answer = engine.call(ask_all, [Ask(prompt, max_tokens=max_tokens)]).answers[0].token_ids[0]
        assert len(answer) == max_tokens
        # What came after the stop is not what the next turn says there.
        next_turn = [*prompt, *answer, *random_prompt(200 + max_tokens, 200)]
        engine.reset_prefix_cache()
        served, loaded = engine.call(kv_at_first_token, Ask(next_turn))
        # The last token of an answer is never computed.
        assert loaded == (450 + max_tokens - 1) // 256 * 256
        fresh = {"skip_reading_prefix_cache": True}
        computed, nothing = engine.call(kv_at_first_token, Ask(next_turn, sampling=fresh))
        assert nothing == 0
        assert far_blocks(served, computed) == []


def test_structured_output(engine: VllmInstance) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    choices = ["w3w5w7w9", "w4w6w8w6"]
    structured = StructuredOutputsParams(choice=choices)
    ask = Ask(
        random_prompt(30, 700),
        max_tokens=10,
        sampling={"structured_outputs": structured, "ignore_eos": False},
    )
    cold = engine.call(ask_all, [ask])
    engine.reset_prefix_cache()
    hit = engine.call(ask_all, [ask])
    assert (cold.loaded_tokens, hit.loaded_tokens) == (0, 512)
    assert hit.answers[0].blocks[: 512 // BLOCK_SIZE] == cold.answers[0].blocks[:4] != ()
    assert cold.answers[0].texts[0].replace(" ", "") in choices
    assert hit.answers[0].texts == cold.answers[0].texts
