"""The metrics of hand-overs. The scheduler side counts them all: it hears of every rank."""

from __future__ import annotations

from lmcache_connector.metrics.log_line import traffic
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import (
    SECONDS_BUCKETS,
    Known,
    counter,
    gauge,
    histogram,
    table,
)
from lmcache_connector.p2p.reasons import UNSENT_REASONS, Reason


def _each(reasons: tuple[Reason, ...]) -> Known:
    return tuple((reason,) for reason in reasons)


METRICS = table(
    [
        counter("p2p_handovers", (), "Prompts computed here and offered for KV transfer."),
        counter(
            "p2p_streamed_handovers",
            (),
            "Prompts larger than the buffers, transferred in segments.",
        ),
        counter("p2p_declined_handovers", (), "Prompts not offered because the buffers were full."),
        counter(
            "p2p_unsent_handovers",
            ("reason",),
            "KV transfers that were not fetched completely, over all ranks.",
            _each(UNSENT_REASONS),
        ),
        counter("p2p_loads", (), "Requests that waited for KV from a producer."),
        counter(
            "p2p_failed_loads",
            ("reason",),
            "Loads that ended incomplete, over all ranks.",
            _each(tuple(Reason)),
        ),
        counter("p2p_hit_tokens", (), "Prompt tokens received from producers."),
        counter("p2p_recomputed_tokens", (), "Tokens recomputed because their KV did not arrive."),
        counter(
            "p2p_malformed_requests",
            (),
            "Requests whose id or parameters were malformed or not allowed.",
        ),
        counter("p2p_received_bytes", (), "Bytes of KV received, over all ranks."),
        counter(
            "p2p_receive_seconds",
            (),
            "Time from the first to the last byte of each KV transfer, over all ranks.",
        ),
        histogram(
            "p2p_load_seconds",
            (),
            "Time until a request's KV is in the cache or given up, per rank.",
            SECONDS_BUCKETS,
        ),
        gauge("p2p_reserved_bytes", (), "Buffer reserved for KV transfers, on the fullest rank."),
        gauge("p2p_capacity_bytes", (), "Size of the buffer for KV transfers, per rank."),
    ]
)

_TROUBLES = (
    ("tokens recomputed", "p2p_recomputed_tokens"),
    ("failed loads", "p2p_failed_loads"),
    ("not sent", "p2p_unsent_handovers"),
    ("declined", "p2p_declined_handovers"),
    ("malformed requests", "p2p_malformed_requests"),
)


def log_fields(samples: Samples) -> dict[str, str]:
    """The periodic log line: the hand-overs of this interval, for a person to read."""
    fields: dict[str, str] = {}
    if offered := samples.total("p2p_handovers"):
        fields["handed over"] = _some(offered, "prompt")
    if loads := samples.total("p2p_loads"):
        tokens = samples.total("p2p_hit_tokens")
        fields["taken over"] = f"{_some(tokens, 'token')} by {_some(loads, 'load')}"
    if num_bytes := samples.total("p2p_received_bytes"):
        fields["received"] = traffic(num_bytes, samples.total("p2p_receive_seconds"))
    for title, name in _TROUBLES:
        if amount := samples.total(name):
            fields[title] = f"{amount:.0f}" + _why(samples, name)
    if reserved := samples.gauge_total("p2p_reserved_bytes"):
        capacity = samples.gauge_total("p2p_capacity_bytes")
        fields["buffer"] = f"{reserved / capacity:.0%} of {capacity / 2**30:.3g} GiB"
    return fields


def _some(count: float, noun: str) -> str:
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def _why(samples: Samples, name: str) -> str:
    """`` (deadline 2, lost 1)``; nothing for a metric without reasons."""
    reasons = samples.by_label(name)
    return f" ({', '.join(f'{why} {n:.0f}' for why, n in reasons.items())})" if reasons else ""
