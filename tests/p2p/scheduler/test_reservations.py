"""Room is promised once, and free again when every rank has let go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.metrics.tally import Tally
from lmcache_connector.p2p.scheduler.reservations import Reservations

CAPACITY = 100


@settings(deadline=None)  # of wall time, which a busy machine takes
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
    """A reservation lasts until both ranks have released it, and a late release frees no other."""
    tally = Tally()
    room = Reservations(CAPACITY, num_ranks=2, tally=tally)
    expected, heard = dict[str, int](), dict[str, int]()
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
    told = tally.take()
    assert told is not None
    assert told.gauges == {
        "p2p_reserved_bytes": room.reserved_bytes,
        "p2p_capacity_bytes": CAPACITY,
    }
