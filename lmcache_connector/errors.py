"""What a user can get wrong, each one clear sentence without a stack trace of ours; failures of our
own code, which vLLM never sees; and where our lines go in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class ConfigError(Exception):
    """The configuration cannot be used. The message names every problem found.

    No ``ValueError``: vLLM reads its configuration through pydantic, which would wrap one.
    """


class UnsupportedError(ValueError):
    """This set-up of vLLM, its version or its model is not supported. Says what, and what to do."""


logger = logging.getLogger(__name__)

_EPISODE_SECONDS = 60.0
"""Failures that follow each other sooner are one episode, and logged once."""


class FailureLog:
    """One line per episode, with the stack trace of its first failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed_at = float("-inf")

    def note(self, call: str, error: Exception) -> None:
        """A call has raised."""
        now = self._clock()
        if now - self._failed_at > _EPISODE_SECONDS:
            logger.error(
                "LMCacheTieredConnector: %s failed. Requests in flight go on without the KV cache "
                "tiers; please report this.", call, exc_info=error,
            )  # fmt: skip
        self._failed_at = now


def log_through(parent_name: str) -> None:
    """Send our log lines through the handlers of another logger (vLLM's), at its level.

    vLLM sets up its own loggers only; without this, everything below a warning would be lost.
    """
    ours, parent = logging.getLogger("lmcache_connector"), logging.getLogger(parent_name)
    if not ours.handlers and parent.handlers:
        ours.handlers = list(parent.handlers)
        ours.setLevel(parent.getEffectiveLevel())
        ours.propagate = False
