from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.storage.redis import write_queue
from lmcache_connector.storage.redis.write_queue import PendingWrite, WriteQueue
from tests.support.costs import lines_run

NO_NODE, SLOW, QUICK = range(3)


def write(name: int, order: int, size: int = 10) -> PendingWrite:
    return PendingWrite(bytes([name]), memoryview(bytes(size)), order, [])


def names(writes: list[PendingWrite]) -> list[int]:
    return [w.key[0] for w in writes]


def test_a_full_queue_drops_its_deepest_chunk_the_newest_of_several() -> None:
    queue = WriteQueue(40)
    for name, order in enumerate((5, 9, 9, 2)):
        queue.offer(write(name, order))
    assert names(queue.offer(write(4, 3))) == [2]
    assert names(queue.offer(write(5, 3))) == [1]
    assert names(queue.offer(write(6, 5))) == [6], "no room is made for an equally deep one"
    assert names(queue.take(1000, 0.0)) == [0, 3, 4, 5]


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


def test_a_node_with_a_long_lane_makes_room_for_another() -> None:
    """Until both lanes are equally long, whatever the depth of their chunks."""
    queue = WriteQueue(90)
    for name in range(9):
        assert queue.offer(write(name, name), SLOW) == []
    dropped = [queue.offer(write(name, 20), QUICK) for name in range(10, 15)]
    assert [names(each) for each in dropped] == [[8], [7], [6], [5], [14]]
    assert names(queue.offer(write(15, 1), SLOW)) == [4], "otherwise a lane makes its own room"
    assert names(queue.offer(write(16, 1), QUICK)) == [13]


def test_writes_in_progress_to_a_slow_node_drop_no_first_chunks_of_others() -> None:
    queue = WriteQueue(40)
    for name in range(3):
        queue.offer(write(name, name), SLOW)
    queue.take(100, 0.0, SLOW)
    queue.offer(write(3, 9), QUICK)
    assert names(queue.offer(write(4, 0), QUICK)) == [3]


def test_a_write_is_moved_to_its_nodes_lane() -> None:
    queue = WriteQueue(100)
    queue.offer(write(0, 0))
    queue.offer(write(1, 1))
    first, second = queue.take(100, 0.0)
    assert queue.move(first, QUICK)
    assert queue.lane_bytes(NO_NODE) == queue.lane_bytes(QUICK) == 10
    assert names(queue.take(100, 0.0, QUICK)) == [0]
    assert names(queue.close()) == []
    assert not queue.move(second, QUICK), "after close() nobody would write it"
    for each in (first, second):
        queue.finish(each, False)
    assert queue.num_bytes == 0


def test_the_cost_of_an_offer_is_constant() -> None:
    def costs(num_waiting: int) -> list[int]:
        queue = WriteQueue(num_waiting * 10)

        def offer(number: int, order: int) -> int:
            offered = PendingWrite(b"%d" % number, memoryview(bytes(10)), order, [])
            return lines_run(lambda: queue.offer(offered, QUICK), write_queue)

        found = [max(offer(i, i % 100) for i in range(num_waiting))]
        found += [offer(10**6, 1), offer(10**6 + 1, 200), offer(7, 7)]
        taken = queue.take(num_waiting * 5, 0.0, QUICK)
        for each in taken:
            queue.finish(each, True)
        total = sum(offer(10**7 + i, i % 7) for i in range(num_waiting))
        return [*found, total // num_waiting]

    few, many = costs(100), costs(10_000)
    assert max(few[1:]) <= 100
    assert all(b <= a + 20 for a, b in zip(few[1:], many[1:], strict=True))


def test_a_full_queue_of_one_long_prompt_sorts_none_of_it_again() -> None:
    num_compared = 0

    class Order(int):
        def __lt__(self, other: int) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) < other

    queue, num_waiting = WriteQueue(100_000), 10_000
    for i in range(num_waiting):
        queue.offer(PendingWrite(b"%d" % i, memoryview(bytes(10)), Order(i), []))
    num_compared = 0
    for i in range(100):
        deeper = PendingWrite(b"%d" % (num_waiting + i), memoryview(bytes(10)), Order(10**6), [])
        assert queue.offer(deeper) == [deeper]
        shallower = PendingWrite(b"0%d" % i, memoryview(bytes(10)), Order(5), [])
        assert [each.order for each in queue.offer(shallower)] == [num_waiting - 1 - i]
    assert num_compared < 100 * 50


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=60,
    )
)
def test_the_queue_keeps_its_bound_and_all_writes(steps: list[tuple[int, int, bool, int]]) -> None:
    lanes = (NO_NODE, SLOW, QUICK)
    queue = WriteQueue(100)
    ended: list[PendingWrite] = []
    offered = []
    for name, (order, size, take, where) in enumerate(steps):
        offered.append(write(name, order, size))
        ended += queue.offer(offered[-1], lanes[where])
        assert queue.num_bytes <= 100
        if take:
            for taken in queue.take(30, 0.0, lanes[where]):
                if size % 3 and queue.move(taken, QUICK):
                    continue
                queue.finish(taken, True)
                ended.append(taken)
        assert queue.num_bytes == sum(queue.lane_bytes(lane) for lane in lanes)
    ended += queue.close()
    assert sorted(names(ended)) == sorted(names(offered))
    assert queue.num_bytes == 0
    assert not queue._pending
