"""Addresses in request ids are parsed strictly: understood whole, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.control.address import PeerAddress, data_ports, parse_request_id
from lmcache_connector.p2p.errors import AddressError

GOOD = "___prefill_addr_10.0.0.1:14579___decode_addr_node-2.local:80_5f3c9e"


@pytest.mark.parametrize(
    "request_id",
    [
        GOOD,
        f"cmpl-{GOOD}",
        f"chatcmpl-{GOOD}-0123abcd",
        f"{GOOD}-ffffffff",
    ],
)
def test_both_instances_read_the_same(request_id: str) -> None:
    route = parse_request_id(request_id)
    assert route is not None
    assert route.prefill == PeerAddress("10.0.0.1", 14579)
    assert route.decode == PeerAddress("node-2.local", 80)
    assert route.transfer_id == GOOD


def test_prompts_of_one_request_are_told_apart() -> None:
    first, second = (parse_request_id(f"cmpl-{GOOD}-{i}-0123abcd") for i in range(2))
    assert first is not None
    assert second is not None
    assert first.transfer_id != second.transfer_id


def test_ipv6() -> None:
    route = parse_request_id("___prefill_addr_[::1]:1___decode_addr_[fe80::2]:2_x")
    assert route is not None
    assert (route.prefill, route.decode) == (PeerAddress("::1", 1), PeerAddress("fe80::2", 2))
    assert str(route.prefill) == "[::1]:1"


@pytest.mark.parametrize("request_id", ["", "cmpl-1", "prefill_addr_a:1", "a___decode"])
def test_other_ids_are_nobodys_business(request_id: str) -> None:
    assert parse_request_id(request_id) is None


@pytest.mark.parametrize(
    "request_id",
    [
        "___prefill_addr_",
        "___decode_addr_a:1_x",
        "___prefill_addr_a:1_x",
        "___prefill_addr_a:1___decode_addr_b:2",  # no name of its own
        "___prefill_addr_a:1___decode_addr_b:2_",
        "___prefill_addr_a___decode_addr_b:2_x",
        "___prefill_addr_a:___decode_addr_b:2_x",
        "___prefill_addr_a:0___decode_addr_b:2_x",
        "___prefill_addr_a:65536___decode_addr_b:2_x",
        "___prefill_addr_a:1___decode_addr_b:-2_x",
        "___prefill_addr_a:1___decode_addr_b:2_x y",
        "___prefill_addr_a:1___decode_addr_b:2_x\n",
        "___prefill_addr_-a:1___decode_addr_b:2_x",
        "___prefill_addr_[zz]:1___decode_addr_b:2_x",
        "___prefill_addr_a:1___decode_addr_b/../:2_x",
        "___decode_addr_b:2___prefill_addr_a:1_x",
        f"{GOOD}{GOOD}",
        "___prefill_addr_a:1___decode_addr_b:2_" + "x" * 600,
        "___prefill_addr_" + "a" * 300 + ":1___decode_addr_b:2_x",
        "___prefill_addr_a:\u0661___decode_addr_b:2_x",
    ],
)
def test_a_malformed_id_is_refused(request_id: str) -> None:
    with pytest.raises(AddressError):
        parse_request_id(request_id)


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_id_breaks_the_parser(before: str, after: str) -> None:
    for request_id in (before, f"{before}___prefill_addr_{after}", f"{GOOD}{before}"):
        try:
            route = parse_request_id(request_id)
        except AddressError:
            continue
        assert route is None or 0 < route.prefill.port < 65536


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("a.b", False)],
)
def test_loopback_is_recognised(host: str, loopback: bool) -> None:
    assert PeerAddress(host, 1).is_loopback is loopback


def test_ranks_follow_the_first_port() -> None:
    assert PeerAddress("a", 10).of_rank(3) == PeerAddress("a", 13)
    with pytest.raises(AddressError):
        PeerAddress("a", 65535).of_rank(1)


def test_no_two_ranks_of_a_host_and_no_two_transports_share_a_data_port() -> None:
    ranks = [data_ports(5000, place, ["nixl", "tcp"]) for place in range(4)]
    assert sorted(port for ports in ranks for port in ports.values()) == list(range(5000, 5008))
    assert data_ports(5000, 3, ["tcp"]) == {"tcp": 5003}
    assert data_ports(0, 3, ["nixl", "tcp"]) == {"nixl": 0, "tcp": 0}
    with pytest.raises(AddressError, match="choose a lower one"):
        data_ports(65535, 1, ["tcp"])
