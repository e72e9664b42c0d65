"""A label on ``/metrics`` comes from an enum, whatever a peer says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.errors import AddressError, PeerError, RefusedError
from lmcache_connector.p2p.reasons import MAX_WIRE_CHARACTERS, UNSENT_REASONS, Cause, Reason


def test_the_label_values_are_those_users_have_alerts_on() -> None:
    assert {str(reason) for reason in Reason} == {
        *("cancelled", "taken", "deadline", "bad_checksum", "copy_failed", "other_prompt"),
        *("buffer_full", "aborted", "reset", "expired", "preempted", "not_needed", "gave_up"),
        *("shutdown", "unknown", "not_arrived", "lost", "no_answer", "unreachable"),
        *("mismatch", "refused", "protocol", "other"),
    }
    assert {str(reason) for reason in UNSENT_REASONS} == {
        *("buffer_full", "aborted", "reset", "expired", "preempted", "copy_failed"),
        *("not_needed", "gave_up", "lost", "shutdown", "other"),
    }


@given(st.sampled_from(Reason), st.text(max_size=MAX_WIRE_CHARACTERS - 20))
def test_a_cause_survives_the_wire(reason: Reason, text: str) -> None:
    cause = Cause(reason, text)
    assert Cause.from_wire(cause.to_wire()) == cause


@pytest.mark.parametrize(
    "said",
    [
        "its request was aborted",  # a version before the words
        "a word of a later version: what it means",
        "Deadline: it is no word",
        "10.0.0.1:9 refused: aborted: by another",
        "",
    ],
)
def test_a_text_never_decides_a_label(said: str) -> None:
    cause = Cause(Reason.OTHER, said)
    assert messages.Gone(said).cause == messages.Forget("t", said).cause == cause


def test_a_refusal_without_a_word_is_a_refusal() -> None:
    assert messages.Refused("you shall not").cause == Cause(Reason.REFUSED, "you shall not")
    assert messages.Refused.of("no", Reason.MISMATCH).cause == Cause(Reason.MISMATCH, "no")


def test_a_cause_is_passed_on_however_long_it_is() -> None:
    long = Cause(Reason.ABORTED, "x" * MAX_WIRE_CHARACTERS)
    forget = messages.Forget("t", long.to_wire())
    passed_on = messages.Forget("t", forget.cause.to_wire())
    assert messages.decode(messages.encode(passed_on)) == forget


def test_peers_of_before_read_a_cause_as_text() -> None:
    """Every version had these fields, the first with a sentence as the reason."""
    forget = messages.Forget("t", Cause(Reason.ABORTED, "its request was aborted").to_wire())
    assert msgspec.msgpack.decode(messages.encode(forget)) == {
        "type": "Forget",
        "transfer_id": "t",
        "reason": "aborted: its request was aborted",
    }
    assert messages.VERSION == 3


def test_errors_carry_their_reason() -> None:
    assert PeerError("it broke").cause == Cause(Reason.OTHER, "it broke")
    assert RefusedError("no").cause.reason is Reason.REFUSED
    assert messages.ProtocolError("no message").cause.reason is Reason.PROTOCOL
    assert isinstance(AddressError("no port"), PeerError)
