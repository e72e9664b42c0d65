"""Errors planted in the product: inside one call, where a function of ours begins."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lmcache_connector

_PRODUCT = str(Path(lmcache_connector.__file__).parent)
_BOUNDARY = tuple(
    f"{_PRODUCT}/{name}"
    for name in ("connector", "scheduler/guard.py", "vllm_compat/short_loads.py")
)


class PlantedError(Exception):
    """Raised in the place of an error of the product."""


class Planter:
    """Makes one call of ``owner``'s method raise when it enters its ``depth``-th function of the
    product: the first call from ``number`` on that enters so many. ``has_raised``: if it did."""

    def __init__(self, owner: Any, call: str, number: int, depth: int) -> None:
        self.has_raised = False
        self._calls = itertools.count()
        self._number = number
        self._depth = depth
        original = getattr(owner, call)

        def planted(*args: Any, **kwargs: Any) -> Any:
            if self.has_raised or next(self._calls) < self._number:
                return original(*args, **kwargs)
            with self._raising():
                return original(*args, **kwargs)

        setattr(owner, call, planted)

    @contextmanager
    def _raising(self) -> Iterator[None]:
        entered = itertools.count(1)

        def see(frame: FrameType, event: str, _: Any) -> None:
            file = frame.f_code.co_filename
            if not file.startswith(_PRODUCT) or file.startswith(_BOUNDARY):
                return
            if not self.has_raised and next(entered) >= self._depth:
                self.has_raised = True
                raise PlantedError

        sys.settrace(see)
        try:
            yield
        finally:
            sys.settrace(None)
