"""Other limits than the product sets itself: more patient where a machine is slow."""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_connector.config import limits

PATIENT: Mapping[str, float] = {"LOOKUP_DEADLINE_SECONDS": 10.0}
"""For tests, and figures, of what is loaded: not of how long a request waits to hear of it."""


def set_limits(values: Mapping[str, float]) -> None:
    """In this process, for good: for an engine that has a process to itself."""
    for name, value in values.items():
        getattr(limits, name)  # a name that is gone is the caller's mistake
        setattr(limits, name, value)
