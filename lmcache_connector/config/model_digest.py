"""The setting ``model_digest``, which both connectors have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmcache_connector.config.strict import gone_value

ModelDigest = Annotated[
    str,
    Field(min_length=1, max_length=256),
    gone_value(
        "sampled",
        "leave model_digest out, which reads every byte once and remembers the digest",
    ),
]
"""``full``, or a name of the user's for the weights."""
