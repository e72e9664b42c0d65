"""Exceptions whose message tells users what to change; the log of our own failures, which vLLM
never sees; and the set-up of our log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class ConfigError(Exception):
    """The configuration cannot be used. The message names every problem found.

    Not a ``ValueError``: pydantic, through which vLLM reads its configuration, would wrap one.
    """


class UnsupportedError(ValueError):
    """This set-up of vLLM, its version or its model is not supported. The message has a remedy."""


logger = logging.getLogger(__name__)

_EPISODE_SECONDS = 60.0
"""Failures closer together than this are one episode, logged once."""


class FailureLog:
    """One line per episode, with the stack trace of its first failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed_at = float("-inf")

    def note(self, call: str, error: BaseException) -> None:
        now = self._clock()
        if now - self._failed_at > _EPISODE_SECONDS:
            logger.error(
                "LMCacheTieredConnector: %s failed. Requests in flight go on without the KV cache "
                "tiers; please report this.", call, exc_info=error,
            )  # fmt: skip
        self._failed_at = now


def log_through(parent_name: str) -> None:
    """Send our log lines through the handlers of another logger (vLLM's), at its level. vLLM
    configures only its own loggers, so everything below a warning would be lost."""
    ours, parent = logging.getLogger("lmcache_connector"), logging.getLogger(parent_name)
    if not ours.handlers and parent.handlers:
        ours.handlers = list(parent.handlers)
        ours.setLevel(parent.getEffectiveLevel())
        ours.propagate = False
