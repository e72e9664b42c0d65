"""A load that relies on a store waits for as long as stores take."""

from __future__ import annotations

import pytest

from lmcache_connector.cost_model.steps import StoreBacklog


def test_a_store_under_way_takes_what_the_last_ones_took() -> None:
    now = 0.0
    stores = StoreBacklog(lambda: now)
    for job_id in range(20):
        stores.planned(job_id)
        stores.ended(job_id, [0.1, 0.2])  # the slower rank counts
    stores.planned(20)
    assert stores.wait_seconds(20) == pytest.approx(0.2, rel=0.01)
    now = 0.15
    assert stores.wait_seconds(20) == pytest.approx(0.05, rel=0.05)
    assert stores.wait_seconds(19) == 0.0
    assert stores.wait_seconds(0) == 0.0  # what relies on no store


def test_one_long_pass_says_nothing_of_the_next_store() -> None:
    stores = StoreBacklog(lambda: 0.0)
    for job_id, seconds in enumerate([0.2, 30.0, 0.2, 40.0, 0.2]):
        stores.planned(job_id)
        stores.ended(job_id, [seconds])
        stores.planned(100 + job_id)
        assert stores.wait_seconds(100 + job_id) == pytest.approx(0.2)


def test_a_backlog_shows_before_it_ends() -> None:
    """The first of them is a second old: the last one waits for all of that at least."""
    now = 0.0
    stores = StoreBacklog(lambda: now)
    stores.planned(1)
    now = 1.0
    stores.planned(2)
    assert stores.wait_seconds(2) == pytest.approx(1.0)
    stores.ended(1, [])  # no rank had heard of it
    assert stores.wait_seconds(2) == 0.0
