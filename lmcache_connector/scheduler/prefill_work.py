"""What an engine step computes of prompts: with its duration, that shows what recompute costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_connector.cost_model.prefill import MIN_PREFILL_TOKENS
from lmcache_connector.plans import PrefillWork
from lmcache_connector.scheduler.request_book import RequestBook

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import SchedulerOutput


def prefill_work(scheduler_output: SchedulerOutput, book: RequestBook) -> PrefillWork | None:
    """The prompt tokens that a step computes; ``None`` if its duration would teach nothing.

    Returns at once for a step that only decodes.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    if scheduler_output.total_num_scheduled_tokens < len(scheduled) + MIN_PREFILL_TOKENS:
        return None
    num_tokens, num_reads, num_prompts = 0, 0.0, 0
    for request_id, count in scheduled.items():
        if count == 1:
            continue
        state = book.get(request_id)
        if state is None:
            return None  # a request that bypasses the cache
        context = state.request.num_computed_tokens
        if context < state.request.num_tokens - 1:  # else it is speculation
            num_tokens += count
            num_reads += count * (context + count / 2)
            num_prompts += 1
    if num_tokens < MIN_PREFILL_TOKENS:
        return None
    context = max(0, round(num_reads / num_tokens - num_tokens / 2))
    return PrefillWork(num_tokens, context, len(scheduled) - num_prompts)


def prompt_tokens_left(scheduler_output: SchedulerOutput, book: RequestBook) -> int:
    """Of the prompts in a step, what it leaves to later steps."""
    left = 0
    for request_id, count in scheduler_output.num_scheduled_tokens.items():
        if count > 1 and (state := book.get(request_id)) is not None:
            request = state.request
            left += max(0, request.num_tokens - request.num_computed_tokens - count)
    return left
