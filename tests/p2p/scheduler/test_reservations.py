"""Room is promised once, and free again when every rank has let go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.metrics.tally import Tally
from lmcache_connector.p2p.scheduler.reservations import Reservations

CAPACITY = 100


def test_a_reservation_lasts_until_every_rank_has_let_go() -> None:
    room = Reservations(CAPACITY, num_ranks=2, tally=Tally())
    assert room.reserve("a", 60)
    room.release("a")
    assert not room.reserve("b", 60)
    room.release("a")
    assert room.reserve("b", 60)
    assert room.reserved_bytes == 60


def test_nobody_else_is_released_by_a_late_word() -> None:
    room = Reservations(CAPACITY, num_ranks=1, tally=Tally())
    room.reserve("a", 60)
    room.cancel("a")
    room.release("a")
    room.release("unknown")
    assert room.reserved_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "cancel"]),
            st.sampled_from("abc"),
            st.integers(0, 120),
        ),
        max_size=40,
    )
)
def test_what_is_promised_is_what_is_reserved(actions: list[tuple[str, str, int]]) -> None:
    room, expected, heard = (
        Reservations(CAPACITY, num_ranks=2, tally=Tally()),
        dict[str, int](),
        dict[str, int](),
    )
    for action, name, num_bytes in actions:
        if action == "reserve":
            fits = sum(expected.values()) + num_bytes <= CAPACITY
            assert room.reserve(name, num_bytes) == fits
            if fits:
                expected[name], heard[name] = num_bytes, 0
        elif action == "release":
            room.release(name)
            heard[name] = heard.get(name, 0) + 1
            if heard[name] == 2:
                expected.pop(name, None)
        else:
            room.cancel(name)
            expected.pop(name, None)
        assert room.reserved_bytes == sum(expected.values()) <= CAPACITY
