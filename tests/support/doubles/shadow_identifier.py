"""Says what the requests of a shadow engine are computed from, as the real parts should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity
from lmcache_connector.threads import StepWait
from tests.support.doubles.shadow_cells import Source


class ShadowAdapters:
    def may_compute(self, request: Request, lora: str | None) -> bool:
        return True


class ShadowEncoders:
    """There is no encoder cache: a request's own images are what its KV is computed with."""

    def vouches(self, *_: Any) -> bool:
        return True

    def next_step(self, *_: Any) -> None:
        """Nothing is encoded."""

    def clear(self) -> None:
        """Nothing is held."""


class ShadowIdentifier:
    """Stands for ``RequestIdentifier``. ``source_of(request_id)``: the truth."""

    def __init__(self, source_of: Callable[[str], Source]) -> None:
        self._source_of = source_of
        self.adapters = ShadowAdapters()

    def identify(self, request: Request, wait: StepWait | None = None) -> RequestIdentity | None:
        source = self._source_of(request.request_id)
        if source.is_hidden:
            return None
        return RequestIdentity(
            cache_salt=source.salt,
            lora=f"{source.adapter}/{source.adapter_version}" if source.adapter else None,
            multimodal=tuple(MultimodalSpan(i.content, i.start, i.end) for i in source.images),
        )

    def is_current(self, request: Request, wait: StepWait | None = None) -> bool:
        return True

    def multimodal(self, request_id: str) -> None:
        return None

    def give_up(self, request_id: str) -> None:
        """Nothing is being read."""

    def forget(self, request: Request) -> None:
        """Nothing is remembered."""

    def forget_all(self) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing runs."""
