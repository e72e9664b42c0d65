"""Whether an instance produces or consumes the KV of a request.

``kv_transfer_params`` come first; without them the request id may name both instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_connector.p2p.control.address import PeerAddress, checked_transfer_id, parse_request_id
from lmcache_connector.p2p.errors import AddressError
from lmcache_connector.p2p.scheduler.transfer_params import Consume, Produce, parse_params


@dataclass(frozen=True, slots=True)
class Router:
    """``may_talk_to``: whether a request may name that peer."""

    own: PeerAddress
    produces: bool
    consumes: bool
    pushes: bool
    may_talk_to: Callable[[PeerAddress], bool]

    def part_in(
        self, request_id: str, params: Mapping[str, Any] | None
    ) -> Produce | Consume | None:
        """``None`` for a request without a hand-over, or one that is for another role.

        Raises :class:`AddressError` for one that cannot be understood or is not allowed.
        """
        part = self._by_params(request_id, params) or self._by_id(request_id)
        peer = part.target if isinstance(part, Produce) else part.source if part else None
        if peer is not None and not self.may_talk_to(peer):
            raise AddressError(f"{peer} is not among the peers this instance may talk to")
        return part

    def _by_params(
        self, request_id: str, params: Mapping[str, Any] | None
    ) -> Produce | Consume | None:
        part = parse_params(request_id, params)
        if isinstance(part, Consume):
            return part if self.consumes else None
        if part is None or not self.produces:
            return None
        checked_transfer_id(part.transfer_id)
        return part

    def _by_id(self, request_id: str) -> Produce | Consume | None:
        route = parse_request_id(request_id)
        if route is None:
            return None
        if self.produces and self.consumes and self.own not in (route.prefill, route.decode):
            raise AddressError(f"neither address in the request id is {self.own}, this instance")
        if self.consumes and (not self.produces or self.own == route.decode):
            return Consume(route.transfer_id, route.prefill)
        if self.produces:
            return Produce(route.transfer_id, route.decode if self.pushes else None, answers=False)
        return None
