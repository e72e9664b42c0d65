"""Models of popular families whose layers follow several rules: hits, bytes and times.

Each family is a tiny model with random weights on its own engine, with a Valkey. A prompt is served
cold, from CPU memory, and from Valkey; vLLM's own prefix cache is reset before each hit, and the
CPU tier emptied before the last. ``hit_tokens``: the tokens of ``prompt_tokens`` that the connector
loaded, the least of all hits. ``kv_bytes_equal``: after either hit every layer has the bytes of the
cold run, in all blocks before the hit's end that both runs still have. ``bytes_per_token``: the
prompt's size in Valkey; ``bytes_per_token_dense``: the size of every layer's KV at every token.
Times are medians over ``--rounds`` prompts. For models with a drafter, ``acceptance_cold`` and
``acceptance_hit`` are the shares of accepted drafts in answers of 40 tokens. Rows ``qwen3-next,
DRAFTER`` run vLLM's copies of states in Triton's interpreter, whose time is part of each step's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engine_timings import come_to_rest, empty_cpu_tier
from benchmarks.harness.servers import running_valkey
from tests.support.engines.calls import draft_counts
from tests.support.engines.instance import VllmInstance
from tests.support.engines.interpreted import copy_states_without_a_gpu
from tests.support.engines.kv_digests import differences
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import PATIENT, random_prompt, tiered_transfer
from tests.support.engines.tiny_drafters import (
    BESIDE_STATES,
    build_drafted,
    build_states_with_drafts,
)
from tests.support.engines.tiny_families import FAMILIES, build_family
from tests.support.redis.servers import Server

_DRAFTED = ("draft_model", "eagle")
_FAMILIES = [name for name, one in FAMILIES.items() if not one.needs or find_spec(one.needs)]
_DRAFTED_STATES = {f"qwen3-next, {method}": method for method in BESIDE_STATES}
_ALL = (*_FAMILIES, *_DRAFTED, *_DRAFTED_STATES)
_ANSWER_TOKENS = 40  # for models with drafters
_WARM_UP_TOKENS = 2000
_VALKEY_MIB = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="*", choices=_ALL, default=_ALL)
    parser.add_argument("--tokens", type=int, default=6000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each family")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    cases = [
        _case(family, args.tokens, args.rounds)
        for family in progress.track(args.families, description="families")
    ]
    return {
        "least_hit_share": round(min(c["hit_tokens"] / c["prompt_tokens"] for c in cases), 3),
        "all_bytes_equal": all(case["kv_bytes_equal"] for case in cases),
        "worst_cpu_hit_vs_cold": round(
            max(case["ttft_cpu_hit_s"] / case["ttft_cold_s"] for case in cases), 3
        ),
        "cases": cases,
    }


def _case(family: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-families-")))
        valkey = stack.enter_context(running_valkey(_VALKEY_MIB))
        engine = stack.enter_context(_engine(family, folder, valkey))
        _serve_all_ways(engine, random_prompt(1, _WARM_UP_TOKENS))
        with valkey.client() as client:
            client.flushall()
        prompts = [random_prompt(2 + number, num_tokens) for number in range(rounds)]
        max_tokens = 2 if family in _FAMILIES else _ANSWER_TOKENS
        served = [_serve_all_ways(engine, prompt, max_tokens) for prompt in prompts]
        stored = _value_bytes(valkey) / rounds
        groups, dense = engine.call(_groups_and_dense_bytes)
    answers = [list(zip(*each, strict=True)) for each in zip(*served, strict=True)]
    (cold, cold_drafts), (cpu, cpu_drafts), (redis, redis_drafts) = answers
    return {
        "family": family,
        "groups": groups,
        "prompt_tokens": num_tokens,
        "hit_tokens": min(hit.external_hit_tokens for hit in (*cpu, *redis)),
        "kv_bytes_equal": all(
            _is_equal(hit, first)
            for hits in (cpu, redis)
            for hit, first in zip(hits, cold, strict=True)
        ),
        "ttft_cold_s": _median(cold),
        "ttft_cpu_hit_s": _median(cpu),
        "ttft_redis_hit_s": _median(redis),
        "bytes_per_token": round(stored / num_tokens),
        "bytes_per_token_dense": dense,
        "acceptance_cold": _acceptance(cold_drafts),
        "acceptance_hit": _acceptance((*cpu_drafts, *redis_drafts)),
    }


def _engine(family: str, folder: Path, valkey: Server) -> VllmInstance:
    prepare = None
    if method := _DRAFTED_STATES.get(family):
        model, engine_args = build_states_with_drafts(method, folder)
        prepare = copy_states_without_a_gpu
    elif family in _DRAFTED:
        model, engine_args = build_drafted(family, folder)
    else:
        model, engine_args = build_family(family, folder / "model"), FAMILIES[family].engine_args
    transfer = tiered_transfer(
        cpu_gib=0.5,
        redis_url=valkey.url,
        compute_or_load="always",
        audit_share=0.0,
    )
    return VllmInstance(
        model,
        transfer,
        folder / "log",
        prepare,
        PATIENT,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=8192,
        **engine_args,
    )


Drafts = tuple[int, int]
"""Drafted tokens, and accepted ones."""


def _serve_all_ways(
    engine: VllmInstance, prompt: Sequence[int], max_tokens: int = 2
) -> tuple[tuple[Served, Drafts], ...]:
    """Cold, from CPU memory, from Valkey."""
    cold = _serve(engine, prompt, max_tokens)
    engine.call(come_to_rest)
    from_cpu = _serve(engine, prompt, max_tokens)
    engine.call(empty_cpu_tier)
    from_redis = _serve(engine, prompt, max_tokens)
    engine.call(come_to_rest)
    return cold, from_cpu, from_redis


def _serve(engine: VllmInstance, prompt: Sequence[int], max_tokens: int) -> tuple[Served, Drafts]:
    drafted, accepted = engine.call(draft_counts)
    served = engine.serve(prompt, max_tokens)
    now = engine.call(draft_counts)
    return served, (now[0] - drafted, now[1] - accepted)


def _acceptance(drafts: Sequence[Drafts]) -> float | None:
    drafted, accepted = map(sum, zip(*drafts, strict=True))
    return round(accepted / drafted, 3) if drafted else None


def _is_equal(hit: Served, cold: Served) -> bool:
    end = hit.cached_tokens
    kept, found = (
        {place for place in served.layer_digests if place.first_token < end}
        for served in (cold, hit)
    )
    wrong = set(differences(hit.layer_digests, cold.layer_digests))
    are_compared = {place.layer for place in kept & found} == {place.layer for place in kept}
    return bool(kept) and are_compared and not wrong & kept


def _median(served: Sequence[Served]) -> float:
    return round(statistics.median(one.ttft_seconds for one in served), 4)


def _value_bytes(valkey: Server) -> int:
    with valkey.client() as client:
        return sum(client.strlen(name) for name in client.keys("lmc:*-*"))


def _groups_and_dense_bytes(probe: EngineProbe) -> tuple[int, int]:
    """The number of vLLM's KV cache groups, and the bytes of one token's KV in all layers that have
    KV per token."""
    config = probe.scheduler.kv_cache_config
    dense = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if spec.tokens_per_state == 1:
            width = spec.num_heads * spec.state_content_size_bytes
            dense += width * len(group.layer_names)
    return len(config.kv_cache_groups), dense
