"""Requests that are handed over, and their KV token by token: also that of a block begun."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from tests.support.engines.instance import VllmInstance
from tests.support.engines.kv_digests import logical
from tests.support.engines.layer_digests import NULL_BLOCK, Digests, Place, differences, merged
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import BLOCK_SIZE
from tests.support.prompts import random_prompt

PRODUCED = {"do_remote_decode": True}
CONSUMED = {"do_remote_prefill": True}


def transfer(
    probe: EngineProbe, prompt: list[int], params: dict[str, Any] | None, max_tokens: int = 2
) -> tuple[int, Digests]:
    """Serve one request. Tokens that were loaded for it, and digests of the KV of all tokens of its
    prompt but the last one, in the step of its first token."""
    before, found = probe.external_hit_tokens(), None
    extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
    name = probe.add(prompt, max_tokens, **extra)
    while probe.scheduler.has_requests():
        outputs = probe.engine.step()
        if outputs and found is None:
            (running,) = (each for each in probe.scheduler.requests if each.startswith(name))
            groups = probe.scheduler.kv_cache_manager.get_block_ids(running)
            found = merged(probe.on_ranks(digest_tokens_on_rank, groups, len(prompt) - 1))
    return probe.external_hit_tokens() - before, found or {}


def digest_tokens_on_rank(
    worker: Any, block_ids: tuple[list[int], ...], num_tokens: int
) -> Digests:
    """Runs in a worker process of vLLM: of a request's blocks, the first ``num_tokens`` tokens."""
    runner = worker.model_runner
    caches = runner.compilation_config.static_forward_context
    found: Digests = {}
    for group, ids in zip(runner.kv_cache_config.kv_cache_groups, block_ids, strict=True):
        size = group.kv_cache_spec.block_size
        for name in group.layer_names:
            for index, block in enumerate(ids[: -(-num_tokens // size)]):
                if block == NULL_BLOCK:
                    continue
                heads = logical(caches[name].kv_cache, [block])
                shift = worker.rank * len(heads)
                for head, data in enumerate(heads):
                    tokens = data[: min(size, num_tokens - index * size)]
                    place = Place(name, index * size, shift + head)
                    found[place] = blake3(tokens.tobytes()).hexdigest()
    return found


def produced(engine: VllmInstance, prompt: list[int], max_tokens: int = 2) -> Digests:
    """Computed and stored for another, and forgotten by vLLM."""
    loaded, digests = engine.call(transfer, prompt, PRODUCED, max_tokens)
    assert loaded == 0
    engine.reset_prefix_cache()
    return dict(digests)


def assert_handed_over(engine: VllmInstance, seed: int, length: int) -> None:
    """All of a prompt but its last token is loaded, as it was computed."""
    prompt = random_prompt(seed, length)
    cold = produced(engine, prompt)
    loaded, digests = engine.call(transfer, prompt, CONSUMED)
    assert loaded == length - 1
    assert {p.layer for p in digests} == {p.layer for p in cold} != set()
    assert {p for p in digests if p.first_token + BLOCK_SIZE >= length} <= cold.keys()
    assert differences(digests, cold) == []
