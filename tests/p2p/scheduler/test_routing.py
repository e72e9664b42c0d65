"""Which part an instance plays for a request, from its parameters or its id."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import AddressError
from lmcache_connector.p2p.scheduler.routing import Router
from lmcache_connector.p2p.scheduler.transfer_params import (
    Consume,
    Produce,
    offer_params,
    parse_params,
)

PREFILL, DECODE = PeerAddress("127.0.0.1", 1001), PeerAddress("127.0.0.1", 1002)
BY_ID = f"cmpl-___prefill_addr_{PREFILL}___decode_addr_{DECODE}_u-0-01234567"
NAME = f"___prefill_addr_{PREFILL}___decode_addr_{DECODE}_u-0"


def router(role: str, own: PeerAddress = PREFILL, *, pushes: bool = True) -> Router:
    return Router(
        own=own,
        produces=role in ("producer", "both"),
        consumes=role in ("consumer", "both"),
        pushes=pushes,
        may_talk_to=lambda peer: peer.is_loopback,
    )


def test_the_request_id_names_both() -> None:
    assert router("producer").part_in(BY_ID, None) == Produce(NAME, DECODE, answers=False)
    assert router("consumer").part_in(BY_ID, None) == Consume(NAME, PREFILL)
    assert router("both", PREFILL).part_in(BY_ID, {}) == Produce(NAME, DECODE, answers=False)
    assert router("both", DECODE).part_in(BY_ID, {}) == Consume(NAME, PREFILL)
    with pytest.raises(AddressError):
        router("both", PeerAddress("127.0.0.1", 9)).part_in(BY_ID, None)


def test_pull_names_no_target() -> None:
    assert router("producer", pushes=False).part_in(BY_ID, None) == Produce(
        NAME, None, answers=False
    )


def test_what_a_prefill_instance_offers_a_decode_instance_understands() -> None:
    params = offer_params(PREFILL, "engine", "request-1", [3, 4], 200, 2)
    assert router("consumer").part_in("any", params) == Consume("request-1", PREFILL)
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"] == [[3, 4]]


def test_nixls_words_for_prefill() -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert router("producer").part_in("r-1", params) == Produce("r-1", None, answers=True)
    named = {**params, "remote_host": "127.0.0.1", "remote_port": "1002"}
    assert router("producer").part_in("r-1", named) == Produce("r-1", DECODE, answers=True)
    assert router("consumer").part_in("r-1", params) is None


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_request_id": "x"},
        {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "h"},
        {"do_remote_prefill": True, "remote_request_id": 5, "remote_host": "h", "remote_port": 1},
        {
            "do_remote_prefill": True,
            "remote_request_id": "\ud800",
            "remote_host": "h",
            "remote_port": 1,
        },
        {"do_remote_prefill": "yes"},
        {"do_remote_decode": 1},
        {"do_remote_decode": True, "remote_host": ["h"], "remote_port": 1},
        {"do_remote_decode": True, "remote_host": "h", "remote_port": True},
        {"do_remote_decode": True, "remote_host": "h", "remote_port": "\uff11"},
        {"do_remote_decode": True, "remote_host": "h", "remote_port": 70000},
        {"do_remote_decode": True, "remote_host": "h h", "remote_port": 1},
        {"do_remote_decode": True, "remote_host": "::1%\x00", "remote_port": 1},
        {"do_remote_decode": True, "remote_host": "::1%" + "l" * 500, "remote_port": 1},
        ["do_remote_prefill"],
    ],
)
def test_malformed_parameters_are_refused(params: Any) -> None:
    with pytest.raises(AddressError):
        parse_params("r", params)


def test_a_name_that_cannot_travel_is_refused() -> None:
    for name in ("", "x" * 513, "\udcff"):
        with pytest.raises(AddressError):
            router("producer").part_in(name, {"do_remote_decode": True})


def test_a_request_cannot_send_us_anywhere() -> None:
    params = offer_params(PeerAddress("169.254.169.254", 80), "e", "r", [], 1, 1)
    with pytest.raises(AddressError, match="not among the peers"):
        router("consumer").part_in("r", params)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "do_remote_prefill",
                "do_remote_decode",
                "remote_host",
                "remote_port",
                "remote_request_id",
            ]
        ),
        st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.floats(),
    )
)
def test_no_parameters_break_the_parser(params: dict[str, Any]) -> None:
    with contextlib.suppress(AddressError):
        parse_params("r", params)
