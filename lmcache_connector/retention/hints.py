"""Hints of a request on how long the CPU tier should keep its chunks.

Clients send ``pin``, ``ttl_seconds`` and ``priority`` in ``kv_transfer_params``, orchestrators in a
``retain`` action of vLLM's ``kv_hints``; the former take precedence. Hints do not change KV, so no
key contains them. Invalid hints are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from blake3 import blake3

from lmcache_connector.plans import Claim

ACTION = "retain"
MAX_PRIORITY = 4
MAX_TTL_SECONDS = 30 * 86400.0
_MAX_ACTIONS = 16
_TENANT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hints:
    """A request's claim, and how many hints were accepted and ignored."""

    claim: Claim
    num_taken: int = 0
    num_ignored: int = 0


def read_hints(cache_salt: str | None, params: Any, envelope: Any) -> Hints:
    """``params``: the request's ``kv_transfer_params``, ``envelope``: its ``kv_hints``, each may be
    ``None``. O(1), whatever they contain."""
    taken: dict[str, Any] = {}
    actions = list(islice(envelope.actions, _MAX_ACTIONS)) if envelope is not None else []
    payloads = [action.payload for action in actions if action.action_type == ACTION]
    num_ignored = len(actions) - len(payloads)
    for source in (params, *payloads):
        if source is None:
            continue
        if not isinstance(source, Mapping):
            num_ignored += 1
            continue
        for name, is_sound in _RULES.items():
            value = source.get(name)
            if value is None:
                continue
            if name not in taken and is_sound(value):
                taken[name] = value
            else:
                num_ignored += 1
    return Hints(Claim(tenant_of(cache_salt), **taken), len(taken), num_ignored)


def tenant_of(cache_salt: str | None) -> bytes:
    """A digest, since salts may be secrets. All requests without a salt are tenant ``b''``."""
    if not cache_salt:
        return b""
    return blake3(cache_salt.encode("utf-8", "surrogatepass")).digest(_TENANT_BYTES)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_ttl(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_TTL_SECONDS and math.isfinite(value)


def _is_priority(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and -MAX_PRIORITY <= value <= MAX_PRIORITY


_RULES = {"pin": _is_flag, "ttl_seconds": _is_ttl, "priority": _is_priority}
