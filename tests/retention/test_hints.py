"""Hints of requests for the CPU tier, and which are taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from lmcache_connector.plans import Claim
from lmcache_connector.retention.hints import MAX_TTL_SECONDS, read_hints, tenant_of


def envelope(*payloads: Any, action_type: str = "retain") -> KvHintsEnvelope:
    actions = [KvHintAction("1", action_type, "1", payload) for payload in payloads]
    return KvHintsEnvelope("1", "message", actions)


def test_a_request_without_hints_claims_nothing_special() -> None:
    hints = read_hints(None, None, None)
    assert hints.claim == Claim()
    assert (hints.num_taken, hints.num_ignored) == (0, 0)


def test_hints_come_with_the_transfer_params() -> None:
    params = {"pin": True, "ttl_seconds": 60, "priority": -2, "do_remote_prefill": False}
    hints = read_hints("salt", params, None)
    assert hints.claim == Claim(tenant_of("salt"), pin=True, ttl_seconds=60, priority=-2)
    assert (hints.num_taken, hints.num_ignored) == (3, 0)


def test_hints_come_in_vllms_own_envelope() -> None:
    hints = read_hints(None, {"priority": 1}, envelope({"ttl_seconds": 2.5, "priority": 4}))
    assert hints.claim == Claim(ttl_seconds=2.5, priority=1)
    assert (hints.num_taken, hints.num_ignored) == (2, 1)


def test_actions_of_other_types_are_ignored() -> None:
    hints = read_hints(None, None, envelope({"pin": True}, action_type="prefetch"))
    assert hints.claim == Claim()
    assert hints.num_ignored == 1


@pytest.mark.parametrize(
    "params",
    [
        {"pin": 1},
        {"pin": "yes"},
        {"ttl_seconds": 0},
        {"ttl_seconds": math.nan},
        {"ttl_seconds": 10**400},
        {"ttl_seconds": MAX_TTL_SECONDS + 1},
        {"ttl_seconds": True},
        {"priority": 5},
        {"priority": -5},
        {"priority": 10**400},
        {"priority": True},
        [],
        "pin",
    ],
)
def test_bad_hints_are_ignored_and_counted(params: Any) -> None:
    hints = read_hints(None, params, None)
    assert hints.claim == Claim()
    assert (hints.num_taken, hints.num_ignored) == (0, 1)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part),
    max_leaves=5,
)


@given(_JSON, _JSON)
def test_arbitrary_json_is_read(params: Any, payload: Any) -> None:
    hints = read_hints(None, params, envelope(payload))
    num_objects = sum(isinstance(each, dict) or each is None for each in (params, payload))
    assert hints.num_ignored >= 2 - num_objects


def test_huge_hints_are_bounded() -> None:
    params = {f"key {i}": "x" * 100 for i in range(100_000)} | {"priority": 2}
    many = envelope(*({"pin": True} for _ in range(10_000)))
    hints = read_hints(None, params, many)
    assert hints.claim == Claim(pin=True, priority=2)
    assert hints.num_ignored == 15  # of the sixteen actions that are read


def test_a_tenant_is_a_digest_of_its_salt() -> None:
    assert tenant_of(None) == tenant_of("") == b""
    assert tenant_of("a") != tenant_of("b")
    assert b"secret" not in tenant_of("secret" * 100)
    assert len(tenant_of("\ud800")) == 16  # no valid text, but a salt
