"""The weight epoch: the part of every chunk key that changes when the weights do.

vLLM tells a connector nothing of weight updates, neither when nor to what: all it sees is a reset
(``reset_prefix_cache(reset_connector=True)``, ``pause_generation``, sleep). vLLM's own prefix cache
needs that reset as well. So a reset means: what was stored before is not to be used any more, and
what this instance computes from now on may come from other weights than anyone else's.

An epoch is named by two things::

    number   of the fleet: how often instances of this model on this Redis were reset
    weights  of this instance: "" as loaded at start, then something new after every reset

The number makes a reset hold for the whole fleet in O(1) and without deleting a key: one instance
raises it, the others see that within a second and ask for keys nobody has stored yet. It never
decides which weights made some KV; following it is safe at any time. That is what the second part
is for: at start the model's fingerprint holds the digest of the weights, so instances share; after
a reset nobody can know whose weights are the same, so an instance shares with nobody. KV of
different weights therefore never meets, whatever is updated, or reset, in whatever order.

Sharing begins anew when an instance starts from the new weights, or with a ``model_digest`` of its
own name for them. (Counting updates instead would name weights only where every instance gets every
update and exactly one reset for each; one reset too many, and KV would be mixed up.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class FleetEpoch(Protocol):
    """A number that all instances of a fleet learn, and that never falls."""

    def number(self) -> int:
        """The highest heard of so far. Never blocks."""
        ...

    def advance(self) -> int:
        """Raise it by one, for oneself at once and for the others soon; returns it."""
        ...

    def close(self) -> None: ...


class LocalEpoch:
    """The fleet of an instance without Redis."""

    def __init__(self) -> None:
        self._number = 0

    def number(self) -> int:
        return self._number

    def advance(self) -> int:
        self._number += 1
        return self._number

    def close(self) -> None:
        """Nothing to stop."""


class WeightEpoch:
    """The epoch of one instance. ``nonce`` returns a string that nobody else will ever get."""

    def __init__(self, fleet: FleetEpoch, nonce: Callable[[], str]) -> None:
        self._fleet = fleet
        self._nonce = nonce
        self._weights = ""

    def name(self) -> str:
        """What chunk keys are made with from now on. Cheap: asked for every request."""
        number = self._fleet.number()
        return f"{number}/{self._weights}" if number or self._weights else ""

    def reset(self) -> str:
        """The weights may be others now: move on to an epoch with nothing in it, and name it."""
        self._fleet.advance()
        self._weights = self._nonce()
        return self.name()

    def close(self) -> None:
        self._fleet.close()
