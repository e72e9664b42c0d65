"""Limits that the system sets itself, settings that are gone, and the folder for caches.

They are read where they are used, not imported by name, so that a test can be more patient on a
slow machine than the product is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LOOKUP_WAIT_SECONDS = 0.001
"""One scheduling step waits for look-ups, of all requests together; 5 ms while no request runs."""
LOOKUP_DEADLINE_SECONDS = 0.1
"""A request waits for its look-up in Redis; after it, Redis counts as a miss."""
SHUTDOWN_SECONDS = 5.0
"""A shutdown waits for jobs in progress, and again for writes in progress."""
MAX_QUEUED_BYTES = 1 << 30
"""Wait to be written to Redis, and stay in the CPU tier meanwhile: at most a quarter of it."""
MAX_PREFETCH_BYTES = 512 << 20
"""Fetched ahead for requests that wait, per rank: at most this, a quarter of the CPU tier, and half
of a tenant's share, or what comes for one request would push out what came for another."""

GONE = {
    "share_after_reset": "no setting any more: weights are named by what is in memory, so leave it "
    "out",
    "lookup_wait_seconds": "no setting any more: a step waits 1 ms for look-ups, so leave it out",
    "lookup_deadline_seconds": "no setting any more: a look-up has 0.1 s, and less where the "
    "prompt is quick to compute, so leave it out",
    "redis_connections": "no setting any more: 2 connections read from each server, so leave it "
    "out",
    "redis_write_queue_mib": "no setting any more: a quarter of the CPU tier may wait to be "
    "written, 1 GiB at most, so leave it out",
    "prefetch_mib": "called 'prefetch' now, true or false: the size follows from cpu_gib",
    "shutdown_seconds": "no setting any more: a shutdown waits 5 s for writes, so leave it out",
    "self_test": "no setting any more: every start tests itself, so leave it out",
}
"""Settings that are refused, by what replaces them: see docs/upgrading.md."""


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/lmcache-connector``, or the same below ``~/.cache``. It may not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/")) / ".cache"
    return root / "lmcache-connector"
