"""KV of different weights never meets, whatever is updated and reset in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.keys.weight_epoch import LocalEpoch, WeightEpoch


class SharedNumber:
    """What Redis would hold; instances hear of it when they ask, or later."""

    def __init__(self) -> None:
        self.value = 0


class Member:
    """A ``FleetEpoch`` that hears of the others only when told to."""

    def __init__(self, shared: SharedNumber) -> None:
        self._shared = shared
        self._known = 0

    def number(self) -> int:
        return self._known

    def advance(self) -> int:
        self._known += 1
        return self._known

    def exchange(self) -> None:
        self._known = self._shared.value = max(self._known, self._shared.value)

    def close(self) -> None:
        """Nothing to stop."""


class Fleet:
    def __init__(self, size: int) -> None:
        numbers = count()
        self.nonce: Callable[[], str] = lambda: f"n{next(numbers)}"
        self.shared = SharedNumber()
        self.members = [Member(self.shared) for _ in range(size)]
        self.epochs = [WeightEpoch(member, self.nonce) for member in self.members]

    def talk(self) -> None:
        for _ in range(2):
            for member in self.members:
                member.exchange()

    def names(self) -> list[str]:
        return [epoch.name() for epoch in self.epochs]


def test_at_start_all_share() -> None:
    assert Fleet(3).names() == ["", "", ""]


def test_a_reset_leaves_everything_stored_before_behind_for_everyone() -> None:
    fleet = Fleet(3)
    fleet.epochs[0].reset()
    fleet.talk()
    first, second, third = fleet.names()
    assert second == third != ""
    assert first not in ("", second)


def test_every_reset_is_new() -> None:
    fleet = Fleet(2)
    seen = {fleet.epochs[0].reset() for _ in range(5)} | {fleet.epochs[1].reset() for _ in range(5)}
    assert len(seen) == 10


def test_alone_without_redis() -> None:
    names = count()
    epoch = WeightEpoch(LocalEpoch(), lambda: str(next(names)))
    assert epoch.name() == ""
    assert len({epoch.name(), epoch.reset(), epoch.reset()}) == 3
    assert epoch.name() == epoch.name()


actions = st.lists(
    st.tuples(st.sampled_from(["update", "clear", "talk"]), st.integers(0, 2)), max_size=30
)


@given(actions)
def test_no_epoch_ever_holds_kv_of_two_sets_of_weights(steps: list[tuple[str, int]]) -> None:
    """Any instance may get weights of its own at any time, be reset without, or hear of others."""
    fleet, weights, fresh = Fleet(3), [0, 0, 0], count(1)
    stored: dict[str, int] = {}
    for action, who in steps:
        if action == "talk":
            fleet.members[who].exchange()
        else:
            if action == "update":
                weights[who] = next(fresh)
            fleet.epochs[who].reset()
        for name, held in zip(fleet.names(), weights, strict=True):
            assert stored.setdefault(name, held) == held
