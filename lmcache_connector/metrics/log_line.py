"""The tiered connector's part of vLLM's periodic log line, for a person to read."""

from __future__ import annotations

from lmcache_connector.metrics.samples import Samples

_TRAFFIC = (
    ("load", "cpu", "loaded from CPU"),
    ("load", "redis", "fetched from Redis"),
    ("store", "cpu", "stored to CPU"),
    ("store", "redis", "written to Redis"),
)
_BYTES = {"load": "loaded_bytes", "store": "stored_bytes"}
_TROUBLES = (
    ("requests not cached", "bypassed_requests"),
    ("tokens left to compute", "declined_tokens"),
    ("failed loads", "failed_loads"),
    ("dropped writes", "dropped_writes"),
    ("evicted chunks", "evicted_chunks"),
)
_CIRCUIT_OPEN = 2  # as the metric's description in the table says


def log_fields(samples: Samples) -> dict[str, str]:
    """What the cache did in this interval: titles, and what to print behind each."""
    fields: dict[str, str] = {}
    queried, saved = samples.total("queried_tokens"), samples.total("prefill_saved_tokens")
    if queried or saved:
        fields["hit tokens"] = (
            f"{saved:.0f} of {queried:.0f} (planned: "
            f"CPU {samples.total('hit_tokens', 'cpu'):.0f}, "
            f"Redis {samples.total('hit_tokens', 'redis'):.0f}; "
            f"lost {samples.total('recomputed_tokens'):.0f})"
        )
    for verb, tier, title in _TRAFFIC:
        num_bytes = samples.total(_BYTES[verb], tier)
        if num_bytes:
            fields[title] = traffic(num_bytes, sum(samples.observed(f"{verb}_seconds", tier)))
    for title, name in _TROUBLES:
        if amount := samples.total(name):
            fields[title] = f"{amount:.0f}"
    if capacity := samples.gauge_total("cpu_capacity_bytes"):
        used = samples.gauge_total("cpu_used_bytes")
        fields["CPU tier"] = f"{used / capacity:.0%} of {capacity / 2**30:.3g} GiB"
    if wrong := samples.total("audits", "mismatch"):
        fields["audits that found wrong KV"] = f"{wrong:.0f}"
    if _CIRCUIT_OPEN in samples.gauge_values("circuit_state"):
        fields["Redis"] = "DOWN"
    if saved := samples.total("prefill_saved_seconds"):
        fields["prefill saved"] = f"{saved:.3g} s"
    return fields


def traffic(num_bytes: float, seconds: float) -> str:
    """``32 MiB at 1.7 GB/s``, or ``32 MiB`` if ``seconds`` is 0."""
    text = f"{num_bytes / 2**20:.3g} MiB"
    return f"{text} at {num_bytes / seconds / 1e9:.2g} GB/s" if seconds > 0 else text
