"""What a user can get wrong: each is one clear sentence, shown without a stack trace of ours."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used. The message names every problem found.

    No ``ValueError``: vLLM reads its configuration through pydantic, which would wrap one.
    """


class UnsupportedError(ValueError):
    """This set-up of vLLM, its version or its model is not supported. Says what, and what to do."""
