"""Nothing is stored but what its key names, whatever vLLM, other connectors and clients do.

One rule at a time; `test_random_lives` has all of them together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import ModelConfig

from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.lives import prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE, Image
from tests.support.doubles.shadow_worker import Faults

PROMPT = prompt(5, 4 * BLOCK_SIZE + 1)
CALM = Faults(slow=0.0, others_lie=True)


def num_stores(engine: ShadowEngine) -> int:
    engine.run_until_idle()
    engine.check_whole()
    return int(engine.adapter.tally.totals.total("store_jobs"))


@pytest.mark.parametrize("beside", [0, 1])
def test_a_client_that_leaves_while_another_connector_loads_leaves_nothing_to_store(
    model: Path, beside: int
) -> None:
    """vLLM counts the whole prompt as computed by then, and its blocks are not filled."""
    engine = ShadowEngine(model, Shape(beside=beside), 0, CALM)
    offer = Offer(4 * BLOCK_SIZE, True, Arrival.RIGHT)
    request_id = engine.add(PROMPT, 1, offer=offer, sends=True)
    engine.step()
    assert engine.is_loading(request_id)
    engine.abort(request_id)
    assert engine.requests[request_id].num_computed_tokens == 4 * BLOCK_SIZE
    assert num_stores(engine) == 0


@pytest.mark.parametrize("audited", [False, True])
def test_other_keys_do_not_close_the_gap_another_connector_left(model: Path, audited: bool) -> None:
    """vLLM computes again what was missing, but with asynchronous scheduling it has lost a token
    of it. ``audited``: the request goes on under other keys meanwhile."""
    engine = ShadowEngine(model, Shape(beside=1, depth=3), 0, CALM)
    tokens = PROMPT[: engine.shape.chunk_size - 1]
    request_id = engine.add(tokens, 1, offer=Offer(BLOCK_SIZE, False, Arrival.FAILED))
    engine.step()
    if audited:
        book = engine.adapter.book
        state = book.get(request_id)
        assert state is not None
        assert book.separate(state.keys.identity.kv_root) == [state]
    assert num_stores(engine) == 0


def test_blocks_that_a_bypassing_request_took_over_do_not_count_any_more(model: Path) -> None:
    engine = ShadowEngine(model, Shape(num_blocks=8), 0, CALM)
    engine.add(PROMPT, 1)
    assert num_stores(engine) == 1
    assert len(engine.adapter.witness._lineages) == 4
    engine.add(prompt(6, 7 * BLOCK_SIZE - 1), 1, bypasses=True)
    engine.run_until_idle()
    assert not engine.adapter.witness._lineages


def test_a_picture_that_has_the_name_of_another_does_not_inherit_blocks(model: Path) -> None:
    """vLLM knows it by the name that the client gives it."""
    engine = ShadowEngine(model, Shape(), 0, CALM)
    for content in ("cat", "dog"):
        engine.add(PROMPT, 1, images=[Image("a", content, 0, 3)])
        assert num_stores(engine) == 1


@pytest.mark.parametrize(("attends_both_ways", "num_stored"), [(False, 2), (True, 0)])
def test_a_step_that_ends_inside_a_picture_leaves_nothing_to_store(
    model: Path, monkeypatch: pytest.MonkeyPatch, attends_both_ways: bool, num_stored: int
) -> None:
    """Where tokens of a picture attend to later ones, those of a later step are missing."""
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", attends_both_ways)
    engine = ShadowEngine(model, Shape(max_batched_tokens=BLOCK_SIZE), 0, CALM)
    engine.add(PROMPT, 1, images=[Image("a", "cat", 0, BLOCK_SIZE + 2)])
    assert num_stores(engine) == num_stored
    engine.add(prompt(6, 4 * BLOCK_SIZE + 1), 1, images=[Image("b", "dog", 2, BLOCK_SIZE)])
    assert num_stores(engine) == num_stored + 2


def test_blocks_that_nothing_vouches_for_leave_vllms_cache_ever_less_often(model: Path) -> None:
    """While later requests hit them there, nothing of what follows can be stored; but requests
    that bypass the tiers bring them back, and must not lose their hits for good."""
    engine = ShadowEngine(model, Shape(num_blocks=400, tier_chunks=100), 0, CALM)

    def begin(seed: int, *, prefix: int = 5, bypasses: bool = False) -> int:
        """Returns how many of the first tokens vLLM's cache had."""
        tokens = [*prompt(prefix, num_hit), *prompt(seed, 4 * BLOCK_SIZE + 1)]
        request = engine.requests[engine.add(tokens, 1, bypasses=bypasses)]
        engine.step()
        num_computed: int = request.num_computed_tokens
        engine.run_until_idle()
        return num_computed - engine.shape.max_batched_tokens

    num_hit = 4 * BLOCK_SIZE
    assert begin(10, bypasses=True) == 0
    assert begin(11) == num_hit
    assert num_stores(engine) == 0
    assert begin(12) == 0
    num_stored = num_stores(engine)
    assert num_stored > 0
    assert begin(13) == num_hit
    assert num_stores(engine) > num_stored
    found = []
    for seed in range(14, 34, 2):
        found.append(begin(seed, prefix=6, bypasses=True))
        assert begin(seed + 1, prefix=6) == num_hit
    assert [bool(hit) for hit in found] == [n > 2 and n.bit_count() != 1 for n in range(10)]


def test_a_request_that_ignores_prefix_caches_is_stored_though_the_weights_were_doubted(
    model: Path,
) -> None:
    """As one with ``prompt_logprobs``; while it waits for the steps of another request."""
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, CALM)
    engine.add(prompt(6, 4 * engine.shape.max_batched_tokens), 1)
    engine.step()
    engine.requests[engine.add(PROMPT, 1)].skip_reading_prefix_cache = True
    engine.adapter.reset_cache()
    before = engine.adapter.tally.totals.total("store_jobs")
    assert num_stores(engine) == before + 1


def test_all_copies_of_a_block_that_nothing_vouches_for_leave_vllms_cache(model: Path) -> None:
    """vLLM keeps one for each request that computed it, or loaded it at the same time."""
    engine = ShadowEngine(model, Shape(num_blocks=200, tier_chunks=100), 0, CALM)
    for seed in range(3):
        request_id = engine.add([*PROMPT[:BLOCK_SIZE], *prompt(seed, 4)], 1, bypasses=True)
        engine.requests[request_id].skip_reading_prefix_cache = True
    engine.run_until_idle()
    for seed in (10, 11):
        engine.add([*PROMPT[:BLOCK_SIZE], *prompt(seed, 4 * BLOCK_SIZE)], 1)
        assert num_stores(engine) == (seed == 11)


def test_turns_of_a_conversation_are_stored_after_its_blocks_lost_their_lineages(
    model: Path,
) -> None:
    """Lineages: their recorded inputs. Turns end inside a chunk, and the next continues there."""
    engine = ShadowEngine(model, Shape(chunk_size=4 * BLOCK_SIZE, num_blocks=200), 0, CALM)
    turns = [prompt(5, num_tokens) for num_tokens in range(20, 201, 20)]
    for tokens in turns[:3]:
        engine.add(tokens, 1)
        engine.run_until_idle()
    engine.adapter.witness.forget()
    for tokens in turns[3:]:
        engine.add(tokens, 1)
        engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 200 // engine.shape.chunk_size


def test_blocks_of_a_running_request_whose_prefix_was_evicted_hinder_no_store(
    model: Path,
) -> None:
    engine = ShadowEngine(model, Shape(chunk_size=4 * BLOCK_SIZE, num_blocks=200), 0, CALM)
    engine.add(prompt(5, 40), 1)
    engine.run_until_idle()
    engine.adapter.witness.forget()
    first = engine.add(prompt(5, 120), 100)
    for num_tokens in (120, 200):
        request_id = engine.add(prompt(5, num_tokens), 1)
        while request_id in engine.live:
            engine.step()
    assert first in engine.live
    engine.abort(first)
    engine.run_until_idle()
    engine.add(prompt(5, 260), 1)
    engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 260 // engine.shape.chunk_size


def test_blocks_of_an_answer_are_stored_again_for_a_head(model: Path) -> None:
    """While they were computed the token after each was not known yet. They are in vLLM's cache
    when the tier has let go of them, and the conversation goes on."""
    engine = ShadowEngine(model, Shape(lookahead=1, num_blocks=60), 0, CALM)
    request = engine.requests[engine.add(prompt(5, 4 * BLOCK_SIZE), max_tokens=4 * BLOCK_SIZE + 2)]
    engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 4
    engine.ranks[0].evict(100)
    engine.step()
    again = engine.requests[engine.add([*request.all_token_ids, 1, 2], max_tokens=1)]
    engine.step()
    assert again.num_computed_tokens > 8 * BLOCK_SIZE > again.num_tokens - BLOCK_SIZE
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == 4 + 4


def test_steps_without_the_drafter_leave_nothing_to_store(model: Path) -> None:
    """vLLM runs it for all requests of a step, or for none."""
    shape = Shape(lookahead=1, drafted_len=100, num_blocks=60, tier_chunks=30)
    engine = ShadowEngine(model, shape, 0, CALM)
    for seed, length in ((1, 200), (2, 90)):  # the step budget is 64
        engine.add(prompt(seed, length), max_tokens=1)
    engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 2 + 0


@pytest.mark.parametrize("bypasses", [False, True])
def test_kv_into_which_an_adapter_leaks_is_not_stored(
    model: Path, monkeypatch: pytest.MonkeyPatch, bypasses: bool
) -> None:
    """Of another request in the same step. KV of the adapter's own request is stored."""
    monkeypatch.setattr("lmcache_connector.scheduler.build.adapters_leak", lambda config: True)
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, CALM)
    adapted = engine.add(prompt(6, 4 * BLOCK_SIZE), 5, adapter="lora-a", bypasses=bypasses)
    engine.step()
    engine.step()
    engine.add(PROMPT, 1)
    engine.step()
    assert not engine.requests[adapted].is_finished()
    num_adapted = 0 if bypasses else 1
    assert num_stores(engine) == num_adapted
    engine.add(prompt(7, 4 * BLOCK_SIZE + 1), 1)
    assert num_stores(engine) == num_adapted + 1


def test_an_adapter_that_leaks_inside_a_block_ends_what_is_stored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_connector.scheduler.build.adapters_leak", lambda config: True)
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, CALM)
    engine.add(PROMPT, 4 * BLOCK_SIZE)
    engine.step()
    engine.step()
    adapted = engine.add(prompt(6, 5), 1, adapter="lora-a")
    while not engine.requests[adapted].is_finished():
        engine.step()
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == len(PROMPT) // engine.shape.chunk_size


def test_a_step_that_a_failure_lost_hides_no_adapter(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request with the adapter began in it, and runs on."""
    monkeypatch.setattr("lmcache_connector.scheduler.build.adapters_leak", lambda config: True)
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, CALM)
    engine.add(PROMPT, 1)
    assert num_stores(engine) == 1
    adapted = engine.add(prompt(6, 5), 60, adapter="lora-a")
    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter, "build_plan", lambda _: 1 / 0)
        while not engine.requests[adapted].num_computed_tokens:
            engine.step()
    plain = engine.add(prompt(7, 4 * BLOCK_SIZE + 1), 1)
    while not engine.requests[plain].is_finished():
        engine.step()
    assert not engine.requests[adapted].is_finished()
    assert num_stores(engine) == 1
    engine.add(prompt(8, 4 * BLOCK_SIZE + 1), 1)
    assert num_stores(engine) == 2
