"""Three calls around the forward pass of a real paged model: loaded KV has the stored bytes."""

from __future__ import annotations

import copy
import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as group
from lmcache.v1 import memory_management
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lmcache_connector.config import limits
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.copy_kv_blocks.cpu import CpuCopier
from lmcache_connector.errors import ConfigError, UnsupportedError
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.stepwise import tiers
from lmcache_connector.stepwise.connector import LMCacheConnector
from lmcache_connector.stepwise.model_input import ModelInput
from lmcache_connector.stepwise.tiers import WITHOUT_EFFECT, UnwrittenGate, read_settings
from lmcache_connector.worker.job_queue import JobQueue
from lmcache_connector.worker.rank_tiers import RankTiers
from tests.support import ROOT
from tests.support.clock import within
from tests.support.engines.stepped_model import VOCABULARY, SteppedEngine, SteppedModel, sequence
from tests.support.redis.servers import Server
from tests.support.torch_threads import one_torch_thread

CHUNK = 32


def tokens_of(seed: int, number: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCABULARY) for i in range(number)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[SteppedEngine]:
    with SteppedEngine({}) as engine:
        yield engine


def test_a_prefix_is_loaded_byte_for_byte_and_shortens_the_input(engine: SteppedEngine) -> None:
    tokens = tokens_of(1, 100)
    cold, all_of_it = engine.step(sequence(tokens, range(7)))
    assert all_of_it.query_lens == (100,)
    hit, left = engine.step(sequence(tokens, range(20, 27)))
    assert left.query_lens == (100 - 3 * CHUNK,)
    assert torch.equal(engine.kv_of(range(20, 27), 96), engine.kv_of(range(7), 96))
    assert torch.allclose(hit[-1], cold[-1], atol=1e-4)
    assert engine.connector.counts.hit_chunks >= 3


def test_sequences_of_one_step_are_told_apart(engine: SteppedEngine) -> None:
    one, other = tokens_of(5, 70), tokens_of(6, 90)
    both = ModelInput((*one, *other), (70, 90), (70, 90), (tuple(range(5)), tuple(range(5, 11))))
    engine.step(both)
    swapped = ModelInput(
        (*other, *one), (90, 70), (90, 70), (tuple(range(20, 26)), tuple(range(30, 35)))
    )
    _, left = engine.step(swapped)
    assert left.query_lens == (90 - 64, 70 - 64)
    assert torch.equal(engine.kv_of(range(20, 26), 64), engine.kv_of(range(5, 11), 64))
    assert torch.equal(engine.kv_of(range(30, 35), 64), engine.kv_of(range(5), 64))


def test_generated_tokens_are_stored_once_they_fill_a_chunk(engine: SteppedEngine) -> None:
    tokens = tokens_of(7, 2 * CHUNK)
    blocks = tuple(range(4))
    engine.step(sequence(tokens[:50], blocks))
    for end in range(51, 2 * CHUNK + 1):
        engine.step(ModelInput(tuple(tokens[:end]), (end,), (1,), (blocks,)))
    _, left = engine.step(sequence([*tokens, 1], range(10, 15)))
    assert left.query_lens == (1,)
    assert torch.equal(engine.kv_of(range(10, 14), 64), engine.kv_of(blocks, 64))


def test_context_not_seen_computed_is_not_stored(engine: SteppedEngine) -> None:
    """The caller claims 40 tokens of context in blocks of another sequence."""
    tokens, blocks = tokens_of(8, 70), tuple(range(5))
    engine.step(sequence(tokens[:CHUNK], (20, 21)))
    engine.step(sequence(tokens_of(9, 70), blocks))
    engine.step(ModelInput(tuple(tokens), (70,), (30,), (blocks,)))
    _, left = engine.step(sequence(tokens, range(10, 15)))
    assert left.query_lens == (70 - CHUNK,), "the second chunk is not stored"


def test_another_process_loads_only_its_own_models_kv_from_redis(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOOKUP_DEADLINE_SECONDS", 10.0)
    tokens, shared = tokens_of(13, 100), {"redis_url": valkey.url}
    with SteppedEngine(shared) as one:
        one.step(sequence(tokens, range(7)))
        stored = one.kv_of(range(7), 96)
    with SteppedEngine(shared) as two:
        _, left = two.step(sequence(tokens, range(10, 17)))
        assert left.query_lens == (4,)
        assert two.connector.counts.redis_chunks == 3
        assert torch.equal(two.kv_of(range(10, 17), 96), stored)
    with SteppedEngine(shared, model=SteppedModel(seed=1)) as other:
        _, left = other.step(sequence(tokens, range(7)))
        assert left.query_lens == (100,)


def test_redis_is_asked_again_after_it_was_slow(valkey: Server) -> None:
    """But not while it is slow: lookups of prompts that can wait would queue behind the others."""
    settings = {"redis_url": valkey.url, "compute_or_load": "auto", "redis_admission": "reused"}
    seeds, submit = itertools.count(40), BackgroundLookup.submit
    try_soon = BackgroundLookup.try_soon
    with (
        SteppedEngine(settings) as stepped,
        patch.object(BackgroundLookup, "submit", autospec=True, side_effect=submit) as submitted,
        patch.object(BackgroundLookup, "try_soon", autospec=True, side_effect=try_soon) as tried,
    ):

        def num_asked_for(num_prompts: int) -> int:
            before = submitted.call_count
            for _ in range(num_prompts):
                stepped.step(sequence(tokens_of(next(seeds), 100), range(7)))
            return submitted.call_count - before

        num_asked_for(4)  # to measure how fast it computes
        with valkey.silent():
            assert within(30.0, lambda: num_asked_for(1) == 0)
            before = tried.call_count
            assert num_asked_for(20) == 0
            assert tried.call_count - before == 20
        # Once it is known to be quick again, for each prompt.
        assert within(60.0, lambda: num_asked_for(10) == 10)


def test_ranks_load_the_prefix_that_all_of_them_have() -> None:
    def agree(there: Sequence[int]) -> list[int]:
        return [min(each, CHUNK) for each in there]

    with SteppedEngine({}) as engine:
        engine.connector = LMCacheConnector(
            1, 1, {"chunk_size": CHUNK, "cpu_gib": 0.05, "compute_or_load": "always"}, agree
        )
        tokens = tokens_of(16, 100)
        engine.step(sequence(tokens, range(7)))
        _, left = engine.step(sequence(tokens, range(10, 17)))
        assert left.query_lens == (100 - CHUNK,)


ONE, OTHER = tokens_of(24, 70), tokens_of(25, 70)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (ModelInput((*ONE, *OTHER), (70, 70), (70, 70), (range(5), range(5))), "block 0"),
        (ModelInput((*ONE, *OTHER), (70, 70), (6, 70), (range(5), (9, 0, 10, 11, 12))), "block 0"),
        (sequence(ONE, (0, 0, 1, 2, 3)), "twice"),
        (sequence(ONE, (0, 1, 2, 3)), "need 5 blocks"),
        (sequence(ONE, (0, 1, 2, 3, 64)), "the 64 blocks"),
        (sequence(ONE, (-1, 1, 2, 3, 4)), "the 64 blocks"),
        (sequence([-1, *ONE], range(5)), "token ids"),
    ],
)
def test_impossible_tables_and_tokens_are_refused(
    engine: SteppedEngine, wrong: ModelInput, reason: str
) -> None:
    """Otherwise their KV would be stored under other tokens' keys."""
    with pytest.raises(ValueError, match=reason):
        engine.step(wrong)
    with pytest.raises(ValueError, match=reason):
        engine.connector.send_kv_caches_and_hidden_states(
            engine.model, wrong, engine.kv_caches, None
        )


def test_nothing_is_stored_if_weights_change_between_the_calls() -> None:
    tokens = tokens_of(26, 70)
    with SteppedEngine({}) as engine:
        first = sequence(tokens, range(5))
        engine.connector.recv_kv_caches_and_hidden_states(engine.model, first, engine.kv_caches)
        weights = {name: each.clone() for name, each in engine.model.state_dict().items()}
        with torch.no_grad():
            engine.model.get_parameter("qkv.0.weight").mul_(1.5)
        engine.model(first, engine.kv_caches)
        engine.connector.send_kv_caches_and_hidden_states(
            engine.model, first, engine.kv_caches, None
        )
        engine.model.load_state_dict(weights)
        _, left = engine.step(sequence(tokens, range(10, 15)))
        assert left.query_lens == (70,)


@contextmanager
def altered(model: SteppedModel, how: str) -> Iterator[None]:
    with ExitStack() as stack:
        if "training" in how:
            model.train()
            stack.callback(model.eval)
        elif "autocast" in how:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        else:
            hook = model.get_submodule("qkv.0").register_forward_hook(lambda *args: args[2] * 2)
            stack.callback(hook.remove)
        yield


ALTERATIONS = pytest.mark.parametrize("how", ["training mode", "autocast", "forward hooks"])


@ALTERATIONS
def test_altered_steps_are_neither_stored_nor_loaded(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Most altered steps complete no chunk; a later, unaltered step completes it."""
    tokens, blocks = tokens_of(27, 140), tuple(range(9))
    model = SteppedModel(dropout=0.5)
    with SteppedEngine({}, model=model) as engine:
        engine.step(sequence(tokens[:40], blocks))
        with altered(model, how):
            for end in range(41, 61):
                engine.step(ModelInput(tuple(tokens[:end]), (end,), (1,), (blocks,)))
            assert engine.step(sequence(tokens, range(10, 19)))[1].query_lens == (140,)
        engine.step(ModelInput(tuple(tokens), (140,), (80,), (blocks,)))
        assert engine.connector.counts.stored_chunks == 1
        engine.step(sequence(tokens, range(20, 29)))
        assert engine.connector.counts.hit_chunks == 1
    assert caplog.text.count(how) == 1


@ALTERATIONS
def test_an_altered_pass_counts_although_send_follows_after_its_end(how: str) -> None:
    tokens, blocks = tokens_of(28, 40), tuple(range(3))
    model = SteppedModel(dropout=0.5)
    with SteppedEngine({}, model=model) as engine:
        first = sequence(tokens[:20], blocks)
        with altered(model, how):
            engine.connector.recv_kv_caches_and_hidden_states(model, first, engine.kv_caches)
            model(first, engine.kv_caches)
        engine.connector.send_kv_caches_and_hidden_states(model, first, engine.kv_caches, None)
        engine.step(ModelInput(tuple(tokens), (40,), (20,), (blocks,)))
        assert engine.connector.counts.stored_chunks == 0


@ALTERATIONS
def test_an_engine_may_alternate_between_plain_and_altered_steps(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(29, 70)
    model = SteppedModel(dropout=0.5)
    with SteppedEngine({}, model=model) as engine:
        engine.step(sequence(tokens, range(5)))
        for _ in range(3):
            with altered(model, how):
                engine.step(sequence(tokens[:10], (10,)))
            assert engine.step(sequence(tokens, range(20, 25)))[1].query_lens == (70 - 64,)
    assert caplog.text.count(how) == 1


def test_hooks_of_modules_put_in_between_count() -> None:
    """The first step with a swapped-in module is a prompt; later ones compute single tokens."""
    tokens, blocks = tokens_of(30, 70), tuple(range(5))
    with SteppedEngine({}) as engine:
        layers = engine.model.get_submodule("qkv")
        assert isinstance(layers, torch.nn.ModuleList)
        plain, hooked = layers[0], copy.deepcopy(layers[0])
        hooked.register_forward_hook(lambda *args: args[2] * 2)
        engine.step(sequence(tokens[:40], blocks))
        layers[0] = hooked
        assert engine.step(sequence(tokens, range(10, 15)))[1].query_lens == (70,)
        layers[0] = plain
        engine.step(sequence(tokens[:40], blocks))
        before = engine.connector.counts.stored_chunks
        layers[0] = hooked
        for end in range(41, 51):
            engine.step(ModelInput(tuple(tokens[:end]), (end,), (1,), (blocks,)))
        layers[0] = plain
        engine.step(ModelInput(tuple(tokens), (70,), (20,), (blocks,)))
        assert engine.connector.counts.stored_chunks == before


def test_parallel_modules_of_torch_are_no_alteration() -> None:
    """Torch splits a model over ranks by hooks."""
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        model = SteppedModel()
        halves = {"qkv.*": ColwiseParallel(), "out.*": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (1,)), halves)
        tokens = tokens_of(31, 70)
        alone = SteppedEngine({"model_digest": "mine"}, model=model)
        with alone as engine, pytest.raises(UnsupportedError, match="pass agree"):
            engine.step(sequence(tokens, range(5)))
        with SteppedEngine({"model_digest": "mine"}, model=model, agree=list) as engine:
            engine.step(sequence(tokens, range(5)))
            assert engine.step(sequence(tokens, range(10, 15)))[1].query_lens == (70 - 64,)
            assert torch.equal(engine.kv_of(range(10, 14), 64), engine.kv_of(range(4), 64))
            model.get_submodule("out.0").register_forward_hook(lambda *args: args[2] * 2)
            assert engine.step(sequence(tokens, range(10, 15)))[1].query_lens == (70,)
    finally:
        group.destroy_process_group()


def test_a_closed_or_forked_connector_refuses_calls() -> None:
    with SteppedEngine({}) as engine:
        engine.step(sequence(ONE, range(5)))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.step(sequence(ONE, range(5)))
            except ValueError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                engine.connector.close()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        engine.connector.close()
        with pytest.raises(ValueError, match="closed"):
            engine.step(sequence(ONE, range(5)))


def test_generated_tokens_are_not_stored_if_that_is_not_wanted() -> None:
    tokens, blocks = tokens_of(29, 2 * CHUNK), tuple(range(4))
    with SteppedEngine({"store_generated": False}) as engine:
        engine.step(sequence(tokens[:50], blocks))
        for end in range(51, 2 * CHUNK + 1):
            engine.step(ModelInput(tuple(tokens[:end]), (end,), (1,), (blocks,)))
        assert engine.connector.counts.stored_chunks == 1


@pytest.mark.parametrize("is_from_redis", [False, True])
def test_a_tenant_keeps_its_share_of_the_cpu_tier(valkey: Server, is_from_redis: bool) -> None:
    """Another tenant's prompts fill the tier, which holds about 80 chunks, twice. With a Redis, the
    second engine loads what the first one stored."""
    prompts = [(tokens_of(30 + n, 10 * CHUNK), "other" if n else "one") for n in range(17)]
    steps = [sequence(tokens, range(20), cache_salts=(salt,)) for tokens, salt in prompts]
    redis = {"redis_url": valkey.url} if is_from_redis else {}
    with SteppedEngine(redis) as first:
        for step in steps if is_from_redis else ():
            first.step(step)
    with SteppedEngine({"cpu_gib": 0.001, **redis}) as engine:
        for step in steps:
            engine.step(step)
        before = engine.connector.counts
        assert before.redis_chunks == (9 * 17 if is_from_redis else 0)
        assert engine.step(steps[0])[1].query_lens == (CHUNK,)
        assert engine.connector.counts.redis_chunks == before.redis_chunks


@pytest.mark.parametrize(
    "caches",
    [
        [torch.zeros(2, 64, 16, 32)],
        [(torch.zeros(64, 16, 2, 16),) * 3],
        {"layer": torch.zeros(2, 64, 16, 2, 16)},
        [[[1], [1]]],
    ],
)
def test_caches_of_another_form_are_refused(caches: Any) -> None:
    with SteppedEngine({}) as engine, pytest.raises(UnsupportedError, match="one entry per layer"):
        engine.connector.recv_kv_caches_and_hidden_states(
            engine.model, sequence(ONE, range(5)), caches
        )


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'peers' is .*only with vLLM: share through Redis"):
        read_settings({"peers": ["127.0.0.1:7450"]})
    with pytest.raises(ConfigError, match="chunk_sise"):
        LMCacheConnector(0, 0, {"chunk_sise": 32})
    with SteppedEngine({"chunk_size": 24}) as engine, pytest.raises(ConfigError, match="multiple"):
        engine.step(sequence(tokens_of(17, 40), range(3)))
    with SteppedEngine({}) as engine:
        engine.model = lambda *_: None
        with pytest.raises(UnsupportedError, match="model_digest"):
            engine.step(sequence(tokens_of(17, 40), range(3)))


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error("on purpose")

    return fail


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_nothing_behind(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The process is the user's own, who tries again with a smaller CPU tier."""
    before, engine = set(threading.enumerate()), SteppedEngine({"redis_url": valkey.url})
    if error is ConfigError:
        monkeypatch.setattr(memory_management, "_allocate_cpu_memory", raising(RuntimeError))
    else:  # while Redis is measured
        monkeypatch.setattr(RankTiers, "is_calibrating", property(raising(error)))
    with pytest.raises(error):
        engine.step(sequence(tokens_of(1, 40), range(3)))

    def left() -> set[str]:
        return {each.name for each in set(threading.enumerate()) - before} - {"PinMonitor-thread"}

    within(5.0, lambda: not left())
    assert left() == set()


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("waits", ["wait_for_result", "finish_stores"])
def test_an_interrupted_wait_leaves_no_copy_in_the_callers_blocks(
    monkeypatch: pytest.MonkeyPatch, waits: str, is_repeated: bool
) -> None:
    """A caller that interrupts a wait may go on with other KV in the same blocks. ``is_repeated``:
    a second interrupt comes before the copies have ended; the caller's next step ends them."""
    is_load, tokens, blocks = waits == "wait_for_result", tokens_of(60, 100), range(20, 27)
    copying, go = threading.Event(), threading.Event()
    copy_now, cancel = CpuCopier.copy, JobQueue.cancel
    queues: list[JobQueue] = []

    class Interrupt(BaseException):
        """A KeyboardInterrupt would end pytest."""

    interrupts = [Interrupt()] if is_repeated else []

    def held(*args: Any) -> Any:
        copying.set()
        assert go.wait(30.0)
        return copy_now(*args)

    def interrupt(queue: JobQueue, _: float) -> None:
        queues.append(queue)
        if not is_load:
            queue.wait_for_result(0.0)  # begins stores
        assert copying.wait(30.0)
        raise Interrupt

    def cancel_and_let_go(queue: JobQueue, *args: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        cancel(queue, *args)
        go.set()

    with torch.inference_mode(), SteppedEngine({}) as engine:  # its tensors count no writes
        engine.step(sequence(tokens if is_load else tokens_of(61, 40), range(7)))
        monkeypatch.setattr(JobQueue, "cancel", cancel_and_let_go)
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopier, "copy", held)
            patch.setattr(JobQueue, waits, interrupt)
            with pytest.raises(Interrupt):
                engine.step(sequence(tokens, blocks))
        assert not interrupts
        other = sequence(tokens_of(62, 100), blocks)
        if is_repeated:
            engine.step(other)
        else:
            engine.model(other, engine.kv_caches)
        go.set()
        assert within(30.0, lambda: queues[0].num_open == 0)
        found = engine.kv_of(blocks, 100)
        engine.model(other, engine.kv_caches)
        assert torch.equal(found, engine.kv_of(blocks, 100))
        if not is_load:
            _, left = engine.step(sequence(tokens, range(30, 37)))
            assert left.query_lens == (100,), "KV of others is stored"


def test_chunks_whose_store_was_interrupted_are_stored_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupt(BaseException):
        """A KeyboardInterrupt would end pytest."""

    def interrupt(_: object) -> None:
        raise Interrupt

    with SteppedEngine({}) as engine:
        prompt = sequence(tokens_of(60, 100), range(7))
        with monkeypatch.context() as patch:
            patch.setattr(tiers, "UnwrittenGate", interrupt)
            with pytest.raises(Interrupt):
                engine.step(prompt)
        left = [engine.step(prompt)[1].query_lens for _ in range(2)]
        assert left == [(100,), (4,)]


def test_settings_without_effect_are_refused_and_on_the_page() -> None:
    page = (ROOT / "docs" / "stepwise.md").read_text().partition("Refused here")[2]
    assert set(re.findall(r"`(\w+)`", page.partition("There is no")[0])) == set(WITHOUT_EFFECT)
    fields = ConnectorConfig.model_fields
    with pytest.raises(ConfigError) as caught:
        read_settings({name: fields[name].default for name in WITHOUT_EFFECT})
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(WITHOUT_EFFECT)
    assert all("only with vLLM" in line for line in lines)


# -- copied tensors --------------------------------------------------------------------------------


def test_a_copy_of_a_tensor_written_meanwhile_is_dropped() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    gate, late = UnwrittenGate([one, other]), UnwrittenGate([one])
    assert gate.passes(threading.Event())
    other[2] = 1.0
    assert not gate.passes(threading.Event())
    assert late.passes(threading.Event()), "nobody has written to what it copies"
    cancelled = threading.Event()
    cancelled.set()
    assert not late.passes(cancelled)
