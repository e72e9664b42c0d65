"""Whose keys a root has, over any history of resets and audits."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.audit.root_epochs import MAX_ROOTS, RootEpochs, RootState

ROOT, OTHER = b"plain", b"adapter"


def epochs(label: str = "") -> RootEpochs:
    numbers = count()
    return RootEpochs(label, lambda: f"nonce {next(numbers)}")


def test_as_loaded_all_share_without_an_epoch() -> None:
    one = epochs()
    assert one.epoch(ROOT) == one.shared_epoch == ""
    assert one.state(ROOT) is RootState.SHARED
    assert one.num_apart() == 0


def test_a_reset_puts_every_root_on_probation_until_its_audit() -> None:
    one = epochs()
    assert one.reset("", audits=True) is RootState.PROBATION
    assert one.epoch(ROOT) == one.epoch(OTHER) == "nonce 0"
    one.restore(ROOT)
    assert one.epoch(ROOT) == ""
    assert one.state(OTHER) is RootState.PROBATION


def test_other_weights_leave_a_root_with_the_keys_of_its_probation() -> None:
    one = epochs()
    one.reset("", audits=True)
    before = one.epoch(ROOT)
    one.separate(ROOT, keeps_keys=True)
    assert one.epoch(ROOT) == before
    assert one.state(ROOT) is RootState.APART


def test_wrong_kv_leaves_even_the_keys_of_its_own_behind() -> None:
    one, seen = epochs(), {""}
    for _ in range(3):
        one.separate(ROOT, keeps_keys=False)
        assert one.epoch(ROOT) not in seen
        seen.add(one.epoch(ROOT))
    assert one.epoch(OTHER) == ""
    assert one.num_apart() == 1


def test_a_root_that_was_wrong_stays_apart_over_a_reset() -> None:
    one = epochs()
    one.separate(ROOT, keeps_keys=False)
    before = one.epoch(ROOT)
    one.reset("", audits=True)
    assert one.state(ROOT) is RootState.APART
    assert one.epoch(ROOT) != before
    assert one.state(OTHER) is RootState.PROBATION


def test_a_new_label_shares_everything_with_all_who_have_it() -> None:
    one, two = epochs("step 1"), epochs("step 1")
    one.separate(ROOT, keeps_keys=False)
    assert one.reset("step 2", audits=True) is RootState.SHARED
    assert two.reset("step 2", audits=False) is RootState.SHARED
    assert one.epoch(ROOT) == two.epoch(ROOT) != epochs("step 1").epoch(ROOT)


def test_without_audits_a_reset_is_for_good() -> None:
    one = epochs("step 1")
    assert one.reset("step 1", audits=False) is RootState.APART
    assert one.num_apart() == 1
    assert one.reset("step 1", audits=False) is RootState.APART
    assert one.epoch(ROOT) == "nonce 1"


acts = st.lists(
    st.one_of(
        st.tuples(st.just("reset"), st.sampled_from(["", "a", "b"]), st.booleans()),
        st.tuples(st.just("separate"), st.sampled_from([ROOT, OTHER]), st.booleans()),
        st.tuples(st.just("restore"), st.sampled_from([ROOT, OTHER]), st.none()),
    )
)


@given(acts)
def test_an_epoch_is_shared_or_nobody_elses(history: list[tuple[str, object, object]]) -> None:
    """Keys of one's own never come back after they were left, and shared keys name the label."""
    one, left = epochs(), set[str]()
    for act, what, flag in history:
        before = {root: one.epoch(root) for root in (ROOT, OTHER)}
        if act == "reset":
            one.reset(str(what), audits=bool(flag))
            left |= {epoch for epoch in before.values() if "nonce" in epoch}
        elif act == "separate":
            assert isinstance(what, bytes)
            one.separate(what, keeps_keys=bool(flag) and one.state(what) is RootState.PROBATION)
        elif isinstance(what, bytes) and one.state(what) is RootState.PROBATION:
            one.restore(what)
        for root in (ROOT, OTHER):
            epoch, shared = one.epoch(root), one.state(root) is RootState.SHARED
            assert (epoch == one.shared_epoch) == shared
            assert epoch not in left


def test_a_label_found_at_the_start_says_nothing_until_another_comes() -> None:
    """An engine that starts again has the weights of its disk, whatever the file says."""
    restarted = RootEpochs("step-12", iter("abc").__next__, is_named=False)
    assert restarted.epoch(ROOT) == restarted.shared_epoch == ""
    assert restarted.reset("step-12", audits=True) is RootState.PROBATION
    assert restarted.shared_epoch == ""
    assert restarted.reset("step-13", audits=True) is RootState.SHARED
    assert restarted.epoch(ROOT) == RootEpochs("step-13", str).shared_epoch


def roots(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def test_roots_restored_long_ago_are_on_probation_again() -> None:
    one = epochs()
    one.reset("", audits=True)
    one.separate(ROOT, keeps_keys=False)
    for root in roots(MAX_ROOTS):
        one.restore(root)
    first, *_, last = roots(MAX_ROOTS)
    assert one.state(first) is RootState.PROBATION
    assert one.epoch(first) != one.shared_epoch
    assert one.state(last) is RootState.SHARED
    assert one.state(ROOT) is RootState.APART


def test_with_too_many_roots_apart_all_are() -> None:
    one = epochs()
    for root in roots(MAX_ROOTS + 1):
        one.separate(root, keeps_keys=False)
    assert {one.state(root) for root in (*roots(2), ROOT)} == {RootState.APART}
    assert one.epoch(ROOT) != one.shared_epoch
    assert one.num_apart() == 1
