"""Room promised to prompts: none begins that might find no place to be handed over from."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_connector.metrics.tally import Tally


@dataclass(slots=True)
class _Reservation:
    num_bytes: int
    ranks_left: int


class Reservations:
    """By transfer id. ``capacity_bytes``: of the rank that holds most, which stands for all.

    A reservation lasts until each of ``num_ranks`` has let go of the transfer.
    """

    def __init__(self, capacity_bytes: int, num_ranks: int, tally: Tally) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self._num_ranks = num_ranks
        self._tally = tally
        self._by_id: dict[str, _Reservation] = {}
        self._add(0)

    def reserve(self, transfer_id: str, num_bytes: int) -> bool:
        """Whether there is room, beside all that is promised. One by this name is replaced."""
        if self.reserved_bytes + num_bytes > self.capacity_bytes:
            return False
        self.cancel(transfer_id)
        self._by_id[transfer_id] = _Reservation(num_bytes, self._num_ranks)
        self._add(num_bytes)
        return True

    def release(self, transfer_id: str) -> None:
        """One rank has let go of it."""
        reservation = self._by_id.get(transfer_id)
        if reservation is not None:
            reservation.ranks_left -= 1
            if reservation.ranks_left == 0:
                self.cancel(transfer_id)

    def cancel(self, transfer_id: str) -> None:
        """No rank has it, or will."""
        reservation = self._by_id.pop(transfer_id, None)
        if reservation is not None:
            self._add(-reservation.num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self._tally.set("p2p_reserved_bytes", value=self.reserved_bytes)
        self._tally.set("p2p_capacity_bytes", value=self.capacity_bytes)
