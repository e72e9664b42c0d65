"""Limits that the system sets itself, and the folder for caches.

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


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/lmcache-connector``, or the same below ``~/.cache``. It may not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/")) / ".cache"
    return root / "lmcache-connector"
