"""What a user can get wrong: each is one clear sentence, shown without a stack trace of ours."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot be used. The message names every problem found."""


class UnsupportedError(ValueError):
    """This set-up of vLLM, its version or its model is not supported. Says what, and what to do."""
