"""Finds what a newer vLLM has added to its requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from lmcache_connector.requests.excuses import known_fields

logger = logging.getLogger(__name__)


class UnknownFields:
    """Tells requests that use a field nobody has looked at. Warns once per field.

    A class with a fixed list of fields is looked at once. A set difference is all that a request of
    a known vLLM costs.
    """

    def __init__(self) -> None:
        self._unknown: dict[type, tuple[str, ...]] = {}
        self._warned: set[tuple[str, str]] = set()

    def are_used_in(self, request: Any) -> bool:
        """Whether a field in neither table of ``excuses`` has a value, here or in a part."""
        return (
            self._any_used(request, "Request")
            or self._any_used(request.sampling_params, "SamplingParams")
            or self._any_used(request.lora_request, "LoRARequest")
            or any(map(self._feature_uses_any, request.mm_features))
        )

    def _feature_uses_any(self, feature: Any) -> bool:
        return self._any_used(feature, "MultiModalFeatureSpec") or self._any_used(
            feature.mm_position, "PlaceholderRange"
        )

    def _any_used(self, part: Any, class_name: str) -> bool:
        if part is None:
            return False
        names = self._unknown.get(type(part))
        if names is None:
            fixed = fixed_fields(type(part))
            names = tuple(sorted(set(fixed or vars(part)) - known_fields(class_name)))
            if fixed:
                self._unknown[type(part)] = names
        used = [name for name in names if _is_set(getattr(part, name, None))]
        for name in used:
            self._warn(class_name, name)
        return bool(used)

    def _warn(self, class_name: str, name: str) -> None:
        if (class_name, name) in self._warned:
            return
        self._warned.add((class_name, name))
        logger.warning(
            "This vLLM has a field %s.%s that this release does not know: requests that use it "
            "bypass the KV cache tiers.",
            class_name,
            name,
        )


def fixed_fields(kind: type) -> tuple[str, ...]:
    """Fields that a class lists, msgspec's and dataclasses; empty for any other."""
    fields: Iterable[str] = getattr(kind, "__struct_fields__", ())
    return tuple(fields) or tuple(getattr(kind, "__dataclass_fields__", ()))


def _is_set(value: Any) -> bool:
    if value is None or value is False:
        return False
    return bool(value) if isinstance(value, int | float | str | bytes | list | dict | set) else True
