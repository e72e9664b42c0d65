"""How much of a CPU tier each may hold, and what is told of who holds what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a chunk went. The values are labels of a metric."""

    EXPIRED = "expired"
    OVER_SHARE = "over_share"
    OLDEST = "oldest"


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes. ``tenant_bytes``: what a tenant keeps while others want the room. ``pin_bytes``:
    pinned chunks of all tenants; ``tenant_pin_bytes``: of each."""

    tenant_bytes: float = math.inf
    pin_bytes: float = 0.0
    tenant_pin_bytes: float = 0.0

    @classmethod
    def of(cls, capacity_bytes: float, tenant_share: float, pin_share: float) -> Limits:
        pin_bytes = capacity_bytes * pin_share
        return cls(capacity_bytes * tenant_share, pin_bytes, pin_bytes * tenant_share)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is in the tier, and what became of it since the start.

    ``tenant_bytes``: by label, of which there are 257 at most. ``refused_pins``: how often a
    prompt was not pinned as a whole, for want of room.
    """

    tenant_bytes: tuple[tuple[str, int], ...] = ()
    pinned_bytes: int = 0
    refused_pins: int = 0
    evicted: tuple[tuple[str, int], ...] = ()
