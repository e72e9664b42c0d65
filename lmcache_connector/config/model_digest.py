"""The setting ``model_digest``, which both connectors have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field


def _exact(value: str) -> str:
    if value == "sampled":
        raise ValueError(
            "'sampled' is gone, because it took retrained embedding rows for the old ones: leave "
            "model_digest out, which reads every byte once and remembers the digest"
        )
    return value


ModelDigest = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_exact)]
"""``full``, or a name of the user's for the weights."""
