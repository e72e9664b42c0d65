"""Which hits are audited."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from lmcache_connector.audit.verdicts import MAX_FIRST_TRIES, MAX_SUBJECTS, AuditSampler


def sampler(share: float, numbers: Iterator[float] = repeat(0.99)) -> AuditSampler:  # noqa: B008
    return AuditSampler(share, lambda: next(numbers))


def test_the_first_of_each_subject_and_then_by_chance() -> None:
    chances = iter([0.5, 0.0009, 0.001])
    one = sampler(0.001, chances)
    for subject in ("plain", "image"):
        assert one.wants(subject)
        one.begin(subject)
        one.end(subject, is_answered=True)
    assert [one.wants("plain") for _ in range(3)] == [False, True, False]


def test_while_the_first_is_under_way_there_is_no_second() -> None:
    one = sampler(0.001)
    one.begin("plain")
    assert not one.wants("plain")
    assert one.wants("image")


def test_without_an_answer_it_is_tried_again_a_few_times() -> None:
    one = sampler(0.001)
    for _ in range(MAX_FIRST_TRIES):
        assert one.wants("plain")
        one.begin("plain")
        one.end("plain", is_answered=False)
    assert not one.wants("plain")


def test_no_share_is_no_audit_at_all() -> None:
    assert not sampler(0.0, repeat(0.0)).wants("plain")


def test_after_a_reset_every_subject_is_new() -> None:
    one = sampler(0.001)
    one.begin("plain")
    one.end("plain", is_answered=True)
    one.forget()
    assert one.wants("plain")


def test_what_it_remembers_is_bounded() -> None:
    """Each content of an adapter is a subject. One long gone is audited again."""
    one = sampler(0.001)
    for subject in range(MAX_SUBJECTS + 1):
        one.begin(subject)
        one.end(subject, is_answered=True)
    assert [one.wants(subject) for subject in (0, 1, MAX_SUBJECTS)] == [True, False, False]
