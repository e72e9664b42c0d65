"""What vLLM's engine core does around its scheduler, for engines that have no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.outputs import ModelRunnerOutput

STOP_TOKEN = 7


def sampling(max_tokens: int, transfer: dict[str, Any] | None) -> SamplingParams:
    """``transfer``: the request's ``kv_transfer_params``."""
    return SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=[STOP_TOKEN],
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
    )


def sampled(tokens: Mapping[str, list[int]]) -> ModelRunnerOutput:
    """What one rank answers. ``tokens``: by request."""
    return ModelRunnerOutput(
        req_ids=list(tokens),
        req_id_to_index={request_id: i for i, request_id in enumerate(tokens)},
        sampled_token_ids=list(tokens.values()),
    )


def merged(aggregator: KVOutputAggregator, outputs: Sequence[ModelRunnerOutput]) -> Any:
    """What the scheduler is told of a step of all ranks."""
    found = outputs[0] if len(outputs) == 1 else aggregator.aggregate(list(outputs))
    assert found is not None
    if found.kv_connector_output is not None and found.kv_connector_output.is_empty():
        found.kv_connector_output = None
    return found


def evict_group(scheduler: Any, group: int, but_first: int = 0) -> int:
    """Evict a group's blocks, but the ``but_first`` first, from vLLM's cache; returns how many."""
    pool = scheduler.kv_cache_manager.block_pool
    hashed = [block for block in pool.blocks if block.block_hash is not None]
    cached = [b.block_id for b in hashed if get_group_id(b.block_hash) == group][but_first:]
    pool.evict_blocks(set(cached))
    return len(cached)
