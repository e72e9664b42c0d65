"""Which epoch each root of requests has: whose keys this instance uses for them.

A *root* is what KV depends on before the first token: the model, and a request's adapter. Salts
are no part of it here, they separate tenants whose KV is the same. A root is in one of three
states::

              reset, weights unknown                     an audit says: the same weights
    SHARED ---------------------------> PROBATION ------------------------------------> SHARED
       |                                    |
       | an audit says: other KV            | an audit says: other weights; or no audit is wanted
       v                                    v
     APART  <-------------------------------+

While it is not ``SHARED`` a root's epoch is a *nonce* that nobody else will ever have, and that
changes with every reset. A reset with a new label of the weights makes all roots ``SHARED`` again,
with all who have that label; any other leaves a root apart that is.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from blake3 import blake3

MAX_ROOTS = 4096
"""Remembered one by one. An engine may meet any number of adapters."""


class RootState(Enum):
    SHARED = "shared"
    PROBATION = "probation"
    APART = "apart"


class RootEpochs:
    """``label`` names the weights as loaded; "" for those that the model itself names. ``is_named``
    False: it was there at the start, and whether it is about these weights, nobody can say. Only
    another one at a reset is.

    ``new_nonce()`` returns a string that nobody else will ever get. Remembers one entry per root
    that is in another state than the rest, ``MAX_ROOTS`` at most.
    """

    def __init__(self, label: str, new_nonce: Callable[[], str], *, is_named: bool = True) -> None:
        self._label = label
        self._is_named = is_named
        self._new_nonce = new_nonce
        self._default = RootState.SHARED
        self._nonce = ""
        self._states: dict[bytes, RootState] = {}
        self._nonces: dict[bytes, str] = {}

    @property
    def label(self) -> str:
        return self._label

    @property
    def shared_epoch(self) -> str:
        """The epoch of everyone with these weights, "" without a label."""
        if not (self._label and self._is_named):
            return ""
        return f"label:{blake3(self._label.encode()).hexdigest()}"

    def state(self, root: bytes) -> RootState:
        return self._states.get(root, self._default)

    def epoch(self, root: bytes) -> str:
        if self.state(root) is RootState.SHARED:
            return self.shared_epoch
        return self._nonces.get(root, self._nonce)

    def restore(self, root: bytes) -> None:
        """An audit has found the KV under the shared epoch to be what this instance computes."""
        self._set(root, RootState.SHARED)

    def separate(self, root: bytes, *, keeps_keys: bool) -> None:
        """An audit has found other KV. ``keeps_keys``: it was that from before the reset, on which
        nothing relies; else what was loaded may be wrong, and the root gets new keys."""
        if not keeps_keys:
            self._nonces[root] = self._new_nonce()
        self._set(root, RootState.APART)

    def reset(self, label: str, *, audits: bool) -> RootState:
        """The weights may have changed. Returns the state of all roots from now on.

        ``label`` names the weights now; one that has not changed says nothing. ``audits``: whether
        audits shall find out.
        """
        self._nonces.clear()
        self._nonce = self._new_nonce()
        if label != self._label:
            self._is_named = True
            self._default = RootState.SHARED
            self._states.clear()
        else:
            self._default = RootState.PROBATION if audits else RootState.APART
            self._states = {
                root: state for root, state in self._states.items() if state is RootState.APART
            }
        self._label = label
        return self._default

    def _set(self, root: bytes, state: RootState) -> None:
        """What is forgotten for want of room is never shared by that: one that was restored goes on
        probation again, and with too many that are apart, all are."""
        self._states[root] = state
        if len(self._states) <= MAX_ROOTS:
            return
        shared = (each for each, state in self._states.items() if state is RootState.SHARED)
        if (oldest := next(shared, None)) is not None:
            del self._states[oldest]
        else:
            self._default = RootState.APART
            self._nonce = self._new_nonce()
            self._states.clear()
            self._nonces.clear()

    def num_apart(self) -> int:
        """Roots known not to be shared, at least 1 if new ones would not be."""
        known = sum(state is not RootState.SHARED for state in self._states.values())
        return known or int(self._default is not RootState.SHARED)
