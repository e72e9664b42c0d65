"""Which hits are audited: the first of each kind, and then a share of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_SUBJECTS = 4096
"""Answered or tried, the latest ones. One that is forgotten counts as never audited."""
MAX_FIRST_TRIES = 4
"""A first audit that ends without an answer is tried again so often."""


class AuditSampler:
    """Audits one hit per *subject* until that has an answer, then ``share`` of all hits.

    A share of 0 switches all of it off. ``random()`` returns a number in ``[0, 1)``.
    """

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        self.share = share
        self._random = random
        # Tries left, oldest first; 0: answered, or given up.
        self._first: OrderedDict[Hashable, int] = OrderedDict()
        self._open: set[Hashable] = set()

    def wants(self, subject: Hashable) -> bool:
        """Whether to audit this hit. While one of the subject is under way, only by chance."""
        if self.share <= 0:
            return False
        if subject not in self._open and self._first.get(subject, MAX_FIRST_TRIES) > 0:
            return True
        return self._random() < self.share

    def begin(self, subject: Hashable) -> None:
        self._open.add(subject)

    def end(self, subject: Hashable, *, is_answered: bool) -> None:
        self._open.discard(subject)
        tries = self._first.pop(subject, MAX_FIRST_TRIES)
        self._first[subject] = 0 if is_answered else max(0, tries - 1)
        if len(self._first) > MAX_SUBJECTS:
            self._first.popitem(last=False)

    def abandon(self) -> None:
        """What is under way will have no answer."""
        self._open.clear()

    def forget(self) -> None:
        """All subjects count as never audited."""
        self._first.clear()
        self._open.clear()
