"""Which roots of requests this instance does not share any more, because an audit found other KV.

A *root* is what KV depends on before the first token: the model, and a request's adapter. Salts
are no part of it here, they separate tenants whose KV is the same. A root that is apart has a
*nonce* in place of the weights' name, which nobody else will ever have, until the weights are
others.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_ROOTS = 4096
"""Remembered one by one. An engine may meet any number of adapters."""


class RootEpochs:
    """``name``: of the weights. ``new_nonce()`` returns a string that nobody else will ever get.

    Remembers one entry per root that is apart, ``MAX_ROOTS`` at most: with more, all are.
    """

    def __init__(self, new_nonce: Callable[[], str]) -> None:
        self.name = ""
        self._new_nonce = new_nonce
        self._nonces: dict[bytes, str] = {}
        self._nonce_of_all = ""

    def epoch(self, root: bytes) -> str:
        return self._nonces.get(root) or self._nonce_of_all or self.name

    def separate(self, root: bytes) -> None:
        """What was loaded under the root may be wrong: it gets new keys."""
        self._nonces[root] = self._new_nonce()
        if len(self._nonces) > MAX_ROOTS:
            self._nonces.clear()
            self._nonce_of_all = self._new_nonce()

    def rename(self, name: str) -> None:
        """The weights are others: nothing is known of any root."""
        self.name = name
        self._nonces.clear()
        self._nonce_of_all = ""

    def num_apart(self) -> int:
        """Roots that are not shared, at least 1 if new ones would not be."""
        return len(self._nonces) or int(bool(self._nonce_of_all))
