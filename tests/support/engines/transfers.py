"""Requests that are handed over, and their KV token by token: also that of a block begun."""

from __future__ import annotations

from typing import Any

from tests.support.engines.instance import VllmInstance
from tests.support.engines.layer_digests import Digests, differences, digest_layers_on_rank, merged
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
            ranks = probe.on_ranks(digest_layers_on_rank, groups, len(prompt) - 1, False)
            found = merged(ranks)
    return probe.external_hit_tokens() - before, found or {}


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
