"""Models whose KV follows several rules, under vLLM's real scheduler.

Every pass of a shadow rank reads what its layers attend to, and every job's bytes are compared: see
:mod:`tests.support.doubles.shadow_worker`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.plans import Outcome
from tests.support.doubles.lives import CHUNK, calm, prompt, serve
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import Faults
from tests.support.engine_core import evict_group

GEMMA = ("w40", "full", "w40")


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "groups", [("w40",), GEMMA, ("full", "w24", "w70"), ("c64", "full"), ("r8", "w40", "full")]
)
def test_the_same_prompt_is_loaded_but_for_its_last_chunk(
    model: Path, groups: tuple[str, ...], prefix_caching: bool
) -> None:
    shape = Shape(groups=groups, prefix_caching=prefix_caching, num_blocks=90, tier_chunks=60)
    engine = calm(model, shape)
    tokens = prompt(1, 8 * CHUNK)
    for length, hit in ((8 * CHUNK, 7), (8 * CHUNK - 1, 7), (7 * CHUNK + 1, 7), (7 * CHUNK, 6)):
        first = engine.add(tokens[:length], max_tokens=2)
        engine.run_until_idle()
        engine.forget_prefixes()
        before = engine.adapter.tally.totals.total("hit_tokens")
        again = engine.add(tokens[:length], max_tokens=2)
        engine.run_until_idle()
        assert engine.adapter.tally.totals.total("hit_tokens") - before == hit * CHUNK, length
        engine.forget_prefixes()
        for request_id in (first, again):
            engine.check_answer(request_id)
    engine.check_whole()


# -- what is stored --------------------------------------------------------------------------------

WIDE = Shape(groups=GEMMA, num_blocks=200, tier_chunks=200)


def stored(engine: ShadowEngine, part: int) -> list[int]:
    """The chunks whose values of one part were stored, in order."""
    jobs = [job for plan in engine.plans for job in plan.stores]
    return [i for job in jobs for run in job.runs if run.part == part for i in run.chunks]


def test_windows_are_stored_where_hits_are_likely_to_end(model: Path) -> None:
    """A window of 40 tokens reaches into two chunks of 32. Hits may end every four windows, and at
    the end of the prompt. Where a second prompt diverges, only a third one finds a window."""
    engine = calm(model, WIDE)
    tokens = prompt(1, 10 * CHUNK + 3)
    assert serve(engine, tokens) == 0
    assert stored(engine, 0) == list(range(10))
    assert stored(engine, 1) == [3, 4, 7, 8, 9]
    shared = tokens[: 7 * CHUNK + 1]
    assert serve(engine, shared + prompt(2, 2 * CHUNK)) == 5 * CHUNK
    assert serve(engine, shared + prompt(3, 2 * CHUNK)) == 7 * CHUNK


def test_of_an_answer_every_window_is_stored(model: Path) -> None:
    """The next turn continues wherever the answer ended."""
    engine = calm(model, WIDE)
    serve(engine, prompt(0, 6 * CHUNK + 3), max_tokens=3 * CHUNK)
    (first,) = engine.requests.values()
    assert first.num_tokens == 9 * CHUNK + 3, "it did not stop early"
    for length in (7 * CHUNK + 1, 8 * CHUNK + 1):
        assert serve(engine, [*first.all_token_ids[:length], 1]) == length - 1


def test_windows_are_stored_although_vllm_frees_their_blocks_with_the_next_step(
    model: Path,
) -> None:
    shape = replace(WIDE, num_blocks=400, prefix_caching=False, max_batched_tokens=CHUNK)
    num_dropped = []
    for has_pins in (True, False):
        engine = ShadowEngine(model, shape, 0, Faults(slow=0.95))
        if not has_pins:
            vars(engine.adapter.held).update(_pin=lambda *_: None)
        for seed in range(8):
            engine.add(prompt(seed, 12 * CHUNK + 1), 1)
        engine.run_until_idle()
        engine.check_whole()
        assert len(stored(engine, 1)) == 8 * 6
        num_dropped.append(engine.adapter.tally.totals.total("dropped_stores"))
    assert num_dropped[0] == 0 < num_dropped[1]


def test_states_are_stored_where_vllm_offers_them(model: Path) -> None:
    """Where a prompt ends, of both groups: without either there is no hit."""
    shape = replace(WIDE, groups=("s", "full", "s"), chunk_size=BLOCK_SIZE)
    engine = calm(model, shape)
    tokens = prompt(1, 10 * BLOCK_SIZE + 3)
    assert serve(engine, tokens) == 0
    assert serve(engine, tokens) == 10 * BLOCK_SIZE
    assert serve(engine, [*tokens, 1, 2, 3]) == 10 * BLOCK_SIZE
    assert 9 in stored(engine, 1)


def test_where_prompts_part_the_next_one_finds_a_state(model: Path) -> None:
    """vLLM's own cache has forgotten what they share."""
    shape = replace(WIDE, groups=("s", "full"), chunk_size=BLOCK_SIZE, max_batched_tokens=256)
    engine = calm(model, shape)
    shared = prompt(1, 6 * BLOCK_SIZE + 3)
    assert serve(engine, shared + prompt(2, 4 * BLOCK_SIZE)) == 0
    assert serve(engine, shared + prompt(3, 4 * BLOCK_SIZE)) == 0
    assert serve(engine, shared + prompt(4, 4 * BLOCK_SIZE)) == 6 * BLOCK_SIZE


@pytest.mark.parametrize("groups", [("s", "full"), ("s", "full", "s"), ("w40", "s", "full")])
@pytest.mark.parametrize("is_held", [True, False], ids=["hit", "miss"])
def test_vllms_groups_may_have_kept_different_tokens(
    model: Path, groups: tuple[str, ...], is_held: bool
) -> None:
    """Of one group vLLM has evicted all blocks, or all but the first four: vllm#46453."""
    shape = replace(WIDE, groups=groups, chunk_size=BLOCK_SIZE, max_batched_tokens=BLOCK_SIZE)
    engine = calm(model, shape)
    tokens = prompt(1, 10 * BLOCK_SIZE + 3)
    for group, code in enumerate(groups):
        serve(engine, tokens)
        if not is_held:
            engine.ranks[0].evict(len(engine.ranks[0].tier))
        assert evict_group(engine.scheduler, group, 4 if code == "full" else 0) > 0
        request = engine.requests[engine.add(tokens, 1)]
        engine.step()
        assert (request.num_computed_tokens == 10 * BLOCK_SIZE) is is_held
        engine.run_until_idle()
        engine.check_answer(request.request_id)
        engine.check_whole()


HEAD = Shape(
    groups=("s", "full", "s"),
    chunk_size=BLOCK_SIZE,
    lookahead=1,
    drafts=2,
    num_blocks=200,
    tier_chunks=200,
    max_batched_tokens=256,
)


@pytest.mark.parametrize(("length", "hit"), [(163, 10), (161, 10), (160, 9)])
def test_beside_a_head_a_prompt_has_a_state_at_its_last_border(
    model: Path, length: int, hit: int
) -> None:
    """vLLM itself would keep the one a block before, as it drops the last block of its own hits."""
    engine = calm(model, HEAD)
    tokens = prompt(1, length)
    assert serve(engine, tokens) == 0
    assert serve(engine, tokens) == hit * BLOCK_SIZE


def test_beside_a_head_a_prompt_has_this_state_without_a_look_for_hits(model: Path) -> None:
    """An instance that only stores looks for no hits. One that only loads needs no such state."""
    writer = calm(model, replace(HEAD, role="kv_producer", redis=True))
    serve(writer, prompt(1, 163))
    reader = calm(model, replace(HEAD, role="kv_consumer", redis=True))
    reader.share_redis_of(writer)
    assert serve(reader, prompt(1, 163)) == 10 * BLOCK_SIZE
    assert serve(reader, prompt(2, 163)) == 0
    (_, other) = reader.requests.values()
    assert not other.shared_prefix_boundary
    engine = calm(model, HEAD)
    request_id = engine.add(prompt(1, 163), 1)
    engine.requests[request_id].skip_reading_prefix_cache = True
    engine.run_until_idle()
    assert serve(engine, prompt(1, 163)) == 10 * BLOCK_SIZE
    request_id = engine.add(prompt(3, 163), 1)
    with pytest.MonkeyPatch.context() as patch:  # nothing is known of hits for too long
        patch.setattr(engine.adapter, "_find", lambda *of_request: None)
        patch.setitem(engine.adapter._ask_until, request_id, 0.0)
        engine.run_until_idle()
    assert serve(engine, prompt(3, 163)) == 10 * BLOCK_SIZE


@pytest.mark.parametrize("right", [0, 1])
def test_beside_a_head_states_of_answers_wait_for_the_token_after_them(
    model: Path, right: int
) -> None:
    """vLLM offers them in the step that computes their last token, and may free their blocks in the
    next one."""
    engine = calm(model, HEAD)
    vars(engine).update(_draft=lambda request_id: drafts_of(engine, request_id, right))
    serve(engine, prompt(0, 6 * BLOCK_SIZE + 3), max_tokens=3 * BLOCK_SIZE)
    (first,) = engine.requests.values()
    assert first.num_tokens == 9 * BLOCK_SIZE + 3, "it did not stop early"
    borders = [7 * BLOCK_SIZE, 8 * BLOCK_SIZE]
    found = [serve(engine, [*first.all_token_ids[: end + 1], 1]) for end in borders]
    assert found == borders if not right else set(found) & set(borders)


def test_beside_a_head_the_token_after_a_state_may_be_the_last_one(model: Path) -> None:
    engine = calm(model, HEAD)
    vars(engine).update(_draft=lambda request_id: [])
    serve(engine, prompt(0, 6 * BLOCK_SIZE + 3), max_tokens=BLOCK_SIZE - 2)
    (first,) = engine.requests.values()
    assert first.num_tokens == 7 * BLOCK_SIZE + 1, "it did not stop early"
    assert serve(engine, [*first.all_token_ids, 1]) == 7 * BLOCK_SIZE


def test_a_state_that_waits_is_dropped_if_vllm_reuses_its_block(model: Path) -> None:
    engine = calm(model, replace(HEAD, groups=("s", "s", "full"), num_blocks=34))
    vars(engine).update(_draft=lambda request_id: drafts_of(engine, request_id, 1))
    first = engine.add(prompt(0, 6 * BLOCK_SIZE + 3), 2 * BLOCK_SIZE)
    engine.step()
    witness = engine.adapter.book.states[first].witness
    while not witness.unnamed:
        engine.step()
    waiting = {block for _, block, _ in witness.unnamed}
    manager = engine.scheduler.kv_cache_manager
    num_free = manager.block_pool.get_num_free_blocks() + len(waiting)
    num_states = 2 * (1 + HEAD.drafts)
    second = engine.add(prompt(1, (num_free - num_states) * BLOCK_SIZE), 2)
    engine.step()
    assert waiting <= {block for group in manager.get_block_ids(second) for block in group}
    assert not witness.unnamed
    engine.run_until_idle()
    engine.check_whole()


def drafts_of(engine: ShadowEngine, request_id: str, count: int) -> list[int]:
    known = engine.requests[request_id].num_tokens
    return engine._true_tokens(request_id, known + count)[known:]


# -- what is loaded --------------------------------------------------------------------------------


def drop(engine: ShadowEngine, part: int, chunk: int) -> None:
    """Remove a chunk from the ranks' memory, and tell nobody."""
    keys = [
        run.keys[run.chunks.index(chunk)]
        for plan in engine.plans
        for job in plan.stores
        for run in job.runs
        if run.part == part and chunk in run.chunks
    ]
    for rank in engine.ranks:
        rank.tier.pop(keys[0], None)


@pytest.mark.parametrize(
    ("part", "chunk", "second"), [(1, 9, 9), (1, 8, 5), (0, 9, 9), (0, 6, 5), (0, 1, 0)]
)
def test_what_is_left_of_a_hit_that_was_not_whole_is_loaded_the_second_time(
    model: Path, part: int, chunk: int, second: int
) -> None:
    """With windows, nothing of a load counts unless all of it arrives."""
    engine = calm(model, WIDE)
    tokens = prompt(1, 10 * CHUNK + 3)
    serve(engine, tokens)
    drop(engine, part, chunk)
    while True:  # a missing chunk is reported as missing, or the deadline passed before
        before = len(engine.ranks[0].load_outcomes)
        serve(engine, tokens)
        outcomes = engine.ranks[0].load_outcomes[before:]
        if outcomes[0] is Outcome.MISSING:
            break
        assert outcomes == [Outcome.DEADLINE], "after a deadline it is computed"
        drop(engine, part, chunk)
    loads = [job for plan in engine.plans for job in plan.loads][-len(outcomes) :]
    ends = [job.runs[-1].chunks[-1] + 1 for job in loads]
    assert ends == ([10, second] if second else [10])
    assert outcomes[1:] == [Outcome.DONE] * (len(ends) - 1)


def test_a_load_brings_windows_first_and_no_more_of_them_than_is_needed(model: Path) -> None:
    engine = calm(model, replace(WIDE, groups=("full", "w40", "c64")))
    serve(engine, prompt(1, 10 * CHUNK + 3))
    assert serve(engine, prompt(1, 9 * CHUNK + 3)) == 9 * CHUNK
    (job,) = [job for plan in engine.plans for job in plan.loads]
    runs = [(engine.parts[run.part].rule, run.chunks, run.skip_blocks) for run in job.runs]
    assert runs == [
        (Rule.CHUNKED, (8,), 0),
        (Rule.WINDOW, (7, 8), 1),
        (Rule.PREFIX, tuple(range(9)), 0),
    ]


def test_an_audit_leaves_the_last_chunk_to_compute_where_the_hit_may_end_before(
    model: Path,
) -> None:
    engine = calm(model, replace(WIDE, audit_share=1e-9))
    tokens = prompt(1, 8 * CHUNK + 3)
    serve(engine, tokens)
    assert serve(engine, tokens) == 7 * CHUNK
    assert engine.adapter.tally.totals.by_label("audits") == {"match": 1}
    assert serve(engine, tokens) == 8 * CHUNK


# -- what attacks on them found --------------------------------------------------------------------


@pytest.mark.parametrize("groups", [("c64",), ("c64", "c96")])
def test_where_nothing_is_needed_there_is_no_load(model: Path, groups: tuple[str, ...]) -> None:
    """At a border of chunked attention no earlier KV is read. An empty load would end vLLM."""
    engine = calm(model, replace(WIDE, groups=groups, prefix_caching=False))
    for _ in range(2):
        assert serve(engine, prompt(1, 6 * CHUNK + 3)) == 0
    assert engine.ranks[0].num_stored_chunks > 0
    assert engine.ranks[0].num_loaded_chunks == 0


def test_a_reset_that_preempts_is_not_refused_for_a_pin(model: Path) -> None:
    """Without the connector vLLM resets at any time with ``reset_running_requests``."""
    engine = ShadowEngine(model, WIDE, 0, Faults(stuck=True))
    engine.add(prompt(1, 6 * CHUNK), 3)
    for _ in range(3):
        engine.step()
    assert engine.adapter.held._pins
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
