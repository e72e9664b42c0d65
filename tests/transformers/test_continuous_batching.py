"""Transformers' paged continuous batching with the tiers, on its own thread."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.stepwise.tiers import Tiers
from lmcache_connector.transformers import KVTiers
from lmcache_connector.transformers.continuous_batching import TieredBatching
from tests.support.clock import within
from tests.support.device import DEVICE
from tests.support.engines.settings import random_prompt
from tests.support.redis.servers import Server

PAGE, CHUNK = 32, 128
SMALL = {"cpu_gib": 0.05, "compute_or_load": "always"}


def prompt(seed: int, length: int) -> list[int]:
    return [token % 60 + 2 for token in random_prompt(seed, length)]


def new_manager(folder: Path, **more: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    limits = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1)
    sizes = {"page_size": PAGE, "num_blocks": 128, "max_batch_tokens": 512, "use_cuda_graph": False}
    return model.init_continuous_batching(limits, ContinuousBatchingConfig(**(sizes | more)))


@contextmanager
def batching(folder: Path, config: dict[str, Any]) -> Iterator[tuple[Any, TieredBatching]]:
    manager = new_manager(folder)
    with TieredBatching(manager, SMALL | config) as tiers:
        manager.start()
        try:
            yield manager, tiers
        finally:
            manager.stop()


def answers(manager: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, tokens in prompts.items():
        manager.add_request(tokens, request_id=name)
    results = [manager.get_result(timeout=60) for _ in prompts]
    assert all(result is not None and result.error is None for result in results)
    return {result.request_id: result.generated_tokens for result in results}


def kv_of(tiers: TieredBatching, blocks: list[int]) -> torch.Tensor:
    part = tiers._paged._part.groups[0]
    return torch.stack([layer[blocks] for layer in part.owners])


def test_prompts_and_answers_are_hits(model: Path, valkey: Server) -> None:
    prompts = {"a": prompt(1, 300), "b": prompt(2, 700), "c": prompt(3, 40)}
    config = {"redis_url": valkey.url}
    with batching(model, config) as (manager, first):
        cold = answers(manager, prompts)
        assert first.counts.hit_chunks == 0
        assert first.counts.stored_chunks == 2 + 5
    with batching(model, config) as (manager, second):
        hit = answers(manager, prompts)
        assert second.counts.hit_chunks == second.counts.redis_chunks == 2 + 5
        turn = prompts["a"] + cold["a"] + prompt(4, 60)
        before = second.counts
        answers(manager, {"turn": turn})
        assert second.counts.lost_chunks == before.lost_chunks == 0
    assert hit["c"] == cold["c"]
    assert all(hit[name][:1] == cold[name][:1] for name in prompts)


def test_answers_are_not_stored_if_that_is_not_wanted(model: Path) -> None:
    with batching(model, {"store_generated": False}) as (manager, tiers):
        answers(manager, {"a": prompt(9, 250)})
        assert tiers.counts.stored_chunks == 1


def test_restored_kv_equals_the_stored_kv_byte_for_byte(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own copies are evicted in between, so that the tiers are read."""
    tokens = prompt(5, 300)
    seen: list[torch.Tensor] = []
    stored: list[torch.Tensor] = []
    with batching(model, {}) as (manager, tiers):
        restored = tiers._paged.restored

        def look(row: Any, number: int) -> None:
            if number:
                seen.append(kv_of(tiers, list(row.blocks[: number // PAGE])))
            restored(row, number)

        kept = tiers._paged.keep

        def watch(row: Any) -> None:
            if len(row.token_ids) >= 2 * CHUNK and not stored:
                stored.append(kv_of(tiers, list(row.blocks[: 2 * CHUNK // PAGE])))
            kept(row)

        monkeypatch.setattr(tiers._paged, "restored", look)
        monkeypatch.setattr(tiers._paged, "keep", watch)
        answers(manager, {"cold": tokens})
        for allocator in manager.batch_processor.cache.cache_allocators.values():
            evicted = allocator.ledger.evict_cached_blocks()
            allocator.pool.free_blocks(allocator.index, evicted)
            tiers._cache.cache_tensor.zero_()
        answers(manager, {"hit": tokens})
        assert tiers.counts.hit_chunks == 2
    assert torch.equal(seen[0], stored[0])


@pytest.mark.parametrize("change", ["hook", "weights"])
def test_kv_of_a_changed_model_is_not_shared(model: Path, change: str) -> None:
    """The model changes during an answer; blocks of the old one still exist."""
    tokens = prompt(6, 300)
    with batching(model, {}) as (manager, tiers):
        llama, handle, number = manager.model, None, 0

        def alter(*_: Any) -> None:
            nonlocal number
            number += 1
            if number == 10:
                with torch.no_grad():
                    llama.model.layers[0].self_attn.v_proj.weight.mul_(2)

        if change == "weights":
            handle = llama.model.layers[0].register_forward_hook(alter)
            alter.__module__ = "transformers.test"  # or it would count as an alteration
        answers(manager, {"cold": tokens})
        if change == "hook":
            handle = llama.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out * 2)
        stored = tiers.counts.stored_chunks
        assert stored == 2
        answers(manager, {"again": prompt(7, 300)})
        assert tiers.counts.stored_chunks == stored + (0 if change == "hook" else 2)
        before = tiers.counts.hit_chunks
        answers(manager, {"once more": tokens + prompt(8, 60)})
        assert tiers.counts.hit_chunks == before
        assert handle is not None
        handle.remove()


def test_a_hook_registered_during_a_pass_counts(model: Path) -> None:
    """The manager's thread computes while the caller's registers a hook, for that pass alone."""
    tokens = prompt(10, 300)
    with batching(model, {}) as (manager, tiers), ExitStack() as stack:
        layers = manager.model.model.layers

        def begin(*_: Any) -> None:
            hook = layers[1].self_attn.v_proj.register_forward_hook(lambda *args: args[2] * 2)
            stack.callback(hook.remove)

        begin.__module__ = "transformers.test"  # or it would be an alteration itself
        handle = layers[0].register_forward_hook(begin)
        kept = tiers._paged.keep

        def end(row: Any) -> None:
            stack.close()
            kept(row)

        tiers._paged.keep = end  # type: ignore[method-assign]
        answers(manager, {"altered": tokens})
        handle.remove()
        assert tiers.counts.stored_chunks == 0


def test_passes_of_other_threads_are_not_the_managers(model: Path) -> None:
    """Autocast applies to one thread: a pass there computes other KV, but is not the manager's."""
    tokens = prompt(11, 300)
    with batching(model, {}) as (manager, tiers):
        answers(manager, {"first": tokens})
        with torch.autocast(DEVICE.type, dtype=torch.float16), torch.no_grad():
            manager.model(torch.tensor([tokens[:4]], device=DEVICE), use_cache=False)
        answers(manager, {"second": tokens + prompt(12, 200)})
        assert tiers.counts.stored_chunks == 2 + 2


def test_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17 lacks a module that is needed."""
    older = "transformers.generation.continuous_batching.cache_allocators"
    monkeypatch.setitem(sys.modules, older, None)
    monkeypatch.delitem(sys.modules, TieredBatching.__module__)
    with pytest.raises(UnsupportedError, match=r"5\.18"):
        importlib.import_module(TieredBatching.__module__)


def test_a_prompt_with_several_answers_leaves_what_others_share_of_it_known(model: Path) -> None:
    """The second answer's request comes without a prompt of its own, so it bypasses the tiers."""
    manager, system = new_manager(model), prompt(5, 2 * CHUNK)
    with TieredBatching(manager, SMALL) as tiers:
        processor = manager.batch_processor
        for number, num_children in enumerate((0, 1, 0)):
            before = tiers.counts.stored_chunks
            tokens = system + prompt(10 + number, 20 if num_children else CHUNK + 9)
            request = RequestState(
                f"r{number}", tokens, max_new_tokens=PAGE + 8, num_children=num_children
            )
            processor.scheduler.add_waiting_request(request)
            while processor.scheduler.has_pending_requests() and processor.prepare_next_batch():
                processor._generation_step(manager.model)
                processor.update_batch()
        assert tiers.counts.stored_chunks - before == 1


def test_unsupported_managers_are_refused(model: Path) -> None:
    manager = new_manager(model, allow_block_sharing=False)
    with pytest.raises(UnsupportedError, match="allow_block_sharing"):
        TieredBatching(manager, SMALL)
    with pytest.raises(UnsupportedError, match="require_cache_salt"):
        TieredBatching(new_manager(model), {**SMALL, "require_cache_salt": True})
    manager = new_manager(model, use_async_batching=True)
    with pytest.raises(UnsupportedError, match="use_async_batching"):
        TieredBatching(manager, SMALL)
    with pytest.raises(UnsupportedError, match="cpu_offload_space"):
        TieredBatching(new_manager(model, cpu_offload_space=0.01), SMALL)
    manager = new_manager(model)
    # As transformers decides for flash attention on a GPU; a CPU has no graphs.
    manager.continuous_batching_config.use_cuda_graph = (True, False)
    with pytest.raises(UnsupportedError, match="use_cuda_graph"):
        TieredBatching(manager, SMALL)


@pytest.mark.parametrize("kind", [KVTiers, TieredBatching])
def test_an_interrupted_close_is_called_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: type[KVTiers | TieredBatching]
) -> None:
    class Interrupt(BaseException):
        """A KeyboardInterrupt would end pytest."""

    def interrupt(_: object) -> None:
        raise Interrupt

    def lanes() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("lmc-")}

    manager, before = new_manager(model), lanes()
    tiers = (
        TieredBatching(manager, SMALL) if kind is TieredBatching else KVTiers(manager.model, SMALL)
    )
    assert lanes() > before
    with monkeypatch.context() as patch:
        patch.setattr(Tiers, "close", interrupt)
        with pytest.raises(Interrupt):
            tiers.close()
    tiers.close()
    within(5.0, lambda: lanes() <= before)
    assert lanes() <= before


def test_two_threads_close_at_once(model: Path) -> None:
    manager = new_manager(model)
    tiers, both = TieredBatching(manager, SMALL), threading.Barrier(2)
    manager.start()
    manager.add_request(prompt(1, 400), max_new_tokens=60)

    def close() -> None:
        both.wait(10.0)
        tiers.close()

    with ThreadPoolExecutor(2) as threads:
        for end in [threads.submit(close) for _ in range(2)]:
            end.result(30.0)
