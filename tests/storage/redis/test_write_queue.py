from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.storage.redis.write_queue import MAX_HOLD_SECONDS, PendingWrite, WriteQueue


def write(name: int, order: int, size: int = 10) -> PendingWrite:
    return PendingWrite(bytes([name]), memoryview(bytes(size)), order, [])


def names(writes: list[PendingWrite]) -> list[int]:
    return [w.key[0] for w in writes]


def test_first_in_first_out_up_to_the_bytes_asked_for() -> None:
    queue = WriteQueue(100)
    for i in range(5):
        assert queue.offer(write(i, i)) == []
    assert names(queue.take(25, 0.0)) == [0, 1, 2]
    assert names(queue.take(1, 0.0)) == [3]
    assert names(queue.take(100, 0.0)) == [4]
    assert queue.take(100, 0.0) == []


def test_when_full_the_deepest_chunk_goes_first_and_the_newest_of_them() -> None:
    queue = WriteQueue(40)
    for name, order in enumerate((5, 9, 9, 2)):
        queue.offer(write(name, order))
    assert names(queue.offer(write(4, 3))) == [2]
    assert names(queue.offer(write(5, 3))) == [1]
    assert names(queue.offer(write(6, 5))) == [6], "no room is made for an equally deep one"
    assert names(queue.take(1000, 0.0)) == [0, 3, 4, 5]


def test_nothing_is_dropped_for_what_will_not_fit_anyway() -> None:
    queue = WriteQueue(30)
    for name, order in enumerate((1, 8, 9)):
        queue.offer(write(name, order))
    assert names(queue.offer(write(3, 0, size=31))) == [3]
    assert queue.num_bytes == 30


def test_what_is_being_written_still_takes_room() -> None:
    queue = WriteQueue(20)
    queue.offer(write(0, 0))
    queue.offer(write(1, 1))
    taken = queue.take(100, 0.0)
    assert names(queue.offer(write(2, 0))) == [2]
    queue.finish(taken[0], True)
    assert queue.offer(write(2, 0)) == []


def test_a_chunk_already_here_is_not_queued_twice() -> None:
    told = []
    queue = WriteQueue(100)
    first = PendingWrite(b"k", memoryview(b"x" * 10), 0, [lambda ok: told.append(("a", ok))])
    again = PendingWrite(b"k", memoryview(b"x" * 10), 0, [lambda ok: told.append(("b", ok))])
    assert queue.offer(first) == []
    (taken,) = queue.take(100, 0.0)
    assert queue.offer(again) == []
    queue.finish(taken, True)
    assert told == [("a", True), ("b", True)]
    assert queue.num_bytes == 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_writes_are_held_back_until_the_time_given() -> None:
    clock = Clock()
    queue = WriteQueue(100, clock)
    queue.offer(write(1, 0))
    queue.hold(clock.now + 0.5)
    assert queue.take(100, 0.0) == []
    clock.now += 0.5
    assert names(queue.take(100, 0.0)) == [1]


def test_nothing_is_held_back_for_long() -> None:
    clock = Clock()
    queue = WriteQueue(100, clock)
    queue.hold(float("inf"))
    queue.offer(write(1, 0))
    clock.now += MAX_HOLD_SECONDS / 2
    queue.offer(write(2, 1))
    assert queue.take(10, 0.0) == []
    clock.now += MAX_HOLD_SECONDS / 2
    assert names(queue.take(10, 0.0)) == [1]
    assert queue.take(10, 0.0) == [], "the second has waited for half as long"


def test_a_queue_that_fills_up_is_not_held_back() -> None:
    queue = WriteQueue(100, Clock())
    queue.hold(float("inf"))
    for name in range(5):
        queue.offer(write(name, name))
    assert queue.take(10, 0.0) == []
    queue.offer(write(5, 5))
    assert names(queue.take(10, 0.0)) == [0]


def test_a_held_queue_still_closes() -> None:
    queue = WriteQueue(100, Clock())
    queue.hold(float("inf"))
    queue.offer(write(1, 0))
    assert names(queue.close()) == [1]
    assert queue.take(100, 0.0) == []


def test_closing_hands_back_what_waits() -> None:
    queue = WriteQueue(100)
    queue.offer(write(0, 0))
    queue.take(1, 0.0)
    queue.offer(write(1, 1))
    assert names(queue.close()) == [1]
    assert names(queue.offer(write(2, 2))) == [2]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=60
    )
)
def test_never_over_its_bound_and_nothing_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    queue = WriteQueue(100)
    ended: list[PendingWrite] = []
    offered = []
    for name, (order, size, take) in enumerate(steps):
        offered.append(write(name, order, size))
        ended += queue.offer(offered[-1])
        assert queue.num_bytes <= 100
        if take:
            for taken in queue.take(30, 0.0):
                queue.finish(taken, True)
                ended.append(taken)
    ended += queue.close()
    assert sorted(names(ended)) == sorted(names(offered))
    assert queue.num_bytes == 0
