"""Whose keys a root has, over any history of audits and other weights."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.audit.verdicts import MAX_ROOTS, RootEpochs

ROOT, OTHER = b"plain", b"adapter"


def epochs() -> RootEpochs:
    numbers = count()
    one = RootEpochs(lambda: f"nonce {next(numbers)}")
    one.rename("weights")
    return one


def test_all_roots_have_the_name_of_the_weights() -> None:
    one = epochs()
    assert one.epoch(ROOT) == one.epoch(OTHER) == "weights"
    assert one.num_apart() == 0


def test_wrong_kv_leaves_even_the_keys_of_its_own_behind() -> None:
    one, seen = epochs(), {"weights"}
    for _ in range(3):
        one.separate(ROOT)
        assert one.epoch(ROOT) not in seen
        seen.add(one.epoch(ROOT))
    assert one.epoch(OTHER) == "weights"
    assert one.num_apart() == 1


def test_other_weights_are_shared_again() -> None:
    one = epochs()
    one.separate(ROOT)
    one.rename("others")
    assert one.epoch(ROOT) == "others"
    assert one.num_apart() == 0


def test_with_too_many_roots_apart_all_are() -> None:
    one = epochs()
    for root in range(MAX_ROOTS + 1):
        one.separate(str(root).encode())
    assert one.epoch(b"new") == one.epoch(b"0") != "weights"
    assert one.num_apart() == 1


@given(st.lists(st.sampled_from([ROOT, OTHER, None])))
def test_a_root_is_shared_unless_an_audit_was_against_it(history: list[bytes | None]) -> None:
    apart: set[bytes] = set()
    one = epochs()
    for number, root in enumerate(history):
        if root is None:
            one.rename(f"weights {number}")
            apart.clear()
        else:
            one.separate(root)
            apart.add(root)
        for each in (ROOT, OTHER):
            assert (one.epoch(each) == one.name) == (each not in apart)
