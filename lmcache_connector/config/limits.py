"""Fixed limits, removed and refused settings, and the folder for caches.

Use limits as ``limits.NAME``, not imported by name, so that tests on slow machines can raise them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lmcache_connector.keys.reasons import by_field

LOOKUP_WAIT_SECONDS = 0.001
"""Wait for lookups per scheduling step, for all requests together; 5 ms while no request runs."""
LOOKUP_DEADLINE_SECONDS = 0.1
"""Longest duration of a lookup; after it, the chunks count as misses in Redis and peers."""
SHUTDOWN_SECONDS = 5.0
"""Limit of each wait of a shutdown: for jobs, for the peer server, for writes to Redis."""
MAX_QUEUED_BYTES = 1 << 30
"""Most bytes that wait in the CPU tier to be written to Redis; at most a quarter of the tier."""

LEAVE_OUT = "no longer a setting, leave it out"
GONE = {
    "share_after_reset": f"{LEAVE_OUT}: keys contain a digest of the weights in memory",
    "lookup_wait_seconds": f"{LEAVE_OUT}: a scheduling step waits 1 ms for lookups",
    "lookup_deadline_seconds": f"{LEAVE_OUT}: a lookup has 0.1 s, and less where the prompt is "
    "quick to compute",
    "redis_connections": f"{LEAVE_OUT}: each rank reads over 2 connections to each server",
    "redis_write_queue_mib": f"{LEAVE_OUT}: a quarter of the CPU tier may wait to be written, "
    "1 GiB at most",
    "prefetch": f"{LEAVE_OUT}: a request's load fetches its chunks",
    "prefetch_mib": f"{LEAVE_OUT}: a request's load fetches its chunks",
    "shutdown_seconds": f"{LEAVE_OUT}: a shutdown waits 5 s for writes",
    "self_test": f"{LEAVE_OUT}: every start runs the self-test",
    "peer_secret": f"{LEAVE_OUT}: a rank lists its chunks on its Unix socket, to its own user",
}
"""Refused settings, with what replaces them: see docs/upgrading.md."""
LMCACHE = by_field(
    {
        "use 'redis_url'": "remote_ audit_actual_ external_lookup blocking_timeout",
        "use 'peers' or 'host_sharing'": "enable_p2p p2p_ enable_controller controller_ lmcache_",
        "use LMCacheP2PConnector": "enable_pd enable_xpyd pd_ nixl_ transfer_channel",
        "use 'cpu_gib'": "max_local_cpu_size local_cpu reserve_local_cpu enable_lazy lazy_",
        "the tiers are 'cpu_gib', 'peers' and 'redis_url'": (
            "local_disk max_local_disk gds_ use_gds maru_ storage_plugins external_backends"
        ),
        "use 'chunk_size'": "chunk_size",
        "use 'store_generated'": "save_decode_cache",
        "use vLLM's --kv-events-config": "enable_kv_events",
    }
)
"""Start of the names of LMCache's settings that are refused here -> what to use instead."""


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/lmcache-connector``, or the same below ``~/.cache``. It may not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/")) / ".cache"
    return root / "lmcache-connector"
