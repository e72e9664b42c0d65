"""Every metric of hand-overs on vLLM's ``/metrics``, in the form of the tiers' table.

Tokens and prompts are counted once per engine; loads, bytes, seconds and what was not sent over all
its ranks.
"""

from __future__ import annotations

from lmcache_connector.metric_table import SECONDS_BUCKETS, counter, gauge, histogram, table
from lmcache_connector.p2p.reasons import REASONS, UNSENT_REASONS


def _each(words: tuple[str, ...]) -> tuple[tuple[str], ...]:
    return tuple((word,) for word in words)


METRICS = table(
    [
        counter("p2p_handovers", (), "Prompts computed here and offered to a consumer."),
        counter(
            "p2p_declined_handovers", (), "Prompts served without one: no room in the buffers."
        ),
        counter(
            "p2p_unsent_handovers",
            ("reason",),
            "Hand-overs that reached nobody, or not whole, over all ranks.",
            _each(UNSENT_REASONS),
        ),
        counter("p2p_loads", (), "Requests that waited here for KV from a producer."),
        counter(
            "p2p_failed_loads",
            ("reason",),
            "Loads that did not bring all, over all ranks.",
            _each(REASONS),
        ),
        counter("p2p_hit_tokens", (), "Prompt tokens handed over to this engine."),
        counter("p2p_recomputed_tokens", (), "Tokens whose KV did not come, computed after all."),
        counter(
            "p2p_malformed_requests",
            (),
            "Requests whose id or parameters could not be understood, or were not allowed.",
        ),
        counter("p2p_received_bytes", (), "Bytes of KV received, over all ranks."),
        counter(
            "p2p_receive_seconds",
            (),
            "Time from the first to the last byte of each hand-over, over all ranks.",
        ),
        histogram(
            "p2p_load_seconds",
            (),
            "Time from a request's wait for KV until it is in the cache or given up, per rank.",
            SECONDS_BUCKETS,
        ),
        gauge("p2p_reserved_bytes", (), "Buffer promised to hand-overs, on the fullest rank."),
        gauge("p2p_capacity_bytes", (), "Buffer for hand-overs, per rank."),
    ]
)
