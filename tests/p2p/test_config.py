"""Settings are checked as a whole, and documented as they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lmcache_connector.errors import ConfigError
from lmcache_connector.p2p.config import P2PConfig, parse_p2p_config
from lmcache_connector.p2p.control.address import PeerAddress
from tests.support import ROOT
from tests.support.settings_page import default_words

DOCS = ROOT / "docs" / "disaggregated.md"


def test_nothing_has_to_be_set() -> None:
    config = parse_p2p_config({})
    assert config.host == "127.0.0.1"
    assert config.secret_bytes == b""


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"send_typ": "PUT"}, "did you mean 'send_type'"),
        ({"send_type": "PUSH"}, "'send_type'"),
        ({"kv_buffer_size": "1e9"}, "'kv_buffer_size'"),
        ({"kv_buffer_size": 0}, "greater than 0"),
        ({"stall_seconds": float("inf")}, "finite"),
        ({"secret": "short"}, "at least 16 bytes"),
        ({"secret": "env:NO_SUCH_VARIABLE_HERE"}, "NO_SUCH_VARIABLE_HERE is not set"),
        ({"host": "not a host"}, "neither a host name nor an IP address"),
        ({"router": "http://127.0.0.1:1"}, "go together"),
        ({"router": "file:///etc/passwd"}, "'router'"),
    ],
)
def test_what_cannot_be_used_is_said(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_p2p_config(extra)


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_SECRET", "a secret of some length")
    config = parse_p2p_config({"secret": "env:P2P_SECRET"})
    assert config.secret_bytes == b"a secret of some length"
    assert "length" not in repr(config)


def test_whom_a_request_may_name() -> None:
    local, remote = PeerAddress("127.0.0.1", 1), PeerAddress("10.0.0.7", 1)
    assert P2PConfig().may_talk_to(local)
    assert not P2PConfig().may_talk_to(remote)
    assert P2PConfig(host="10.0.0.1", insecure=True).may_talk_to(remote)
    chosen = P2PConfig(host="10.0.0.1", peer_hosts=("10.0.0.2",))
    assert chosen.may_talk_to(PeerAddress("10.0.0.2", 5))
    assert not chosen.may_talk_to(remote)
    assert chosen.may_be_dialled_from("10.0.0.2")
    assert not chosen.may_be_dialled_from("10.0.0.7")
    many = P2PConfig(host="10.0.0.1", peer_hosts=("10.0.0.0/29", "*.pods.example"))
    assert many.may_talk_to(remote)
    assert many.may_talk_to(PeerAddress("a.pods.example", 5))
    assert many.may_be_dialled_from("192.0.2.1")  # a pod may have any address
    for host in ("10.0.0.9", "pods.example", "a.pods.example.org", "xpods.example"):
        assert not many.may_talk_to(PeerAddress(host, 5))


@pytest.mark.parametrize("open_to_all", [{"host": "10.0.0.1"}, {"bind_host": "0.0.0.0"}])
def test_whoever_is_reached_by_others_says_whom_it_trusts(open_to_all: dict[str, Any]) -> None:
    for extra in ({}, {"peer_hosts": ["10.0.0.2"]}):  # whose addresses prove nothing
        with pytest.raises(ConfigError, match="set a 'secret' that all instances share"):
            parse_p2p_config(open_to_all | extra)
    for trust in ({"secret": "x" * 16}, {"insecure": True}):
        parse_p2p_config(open_to_all | trust)
    with pytest.raises(ConfigError, match="'checksum' cannot be off with a 'secret'"):
        parse_p2p_config({"secret": "x" * 16, "checksum": False})
    with pytest.raises(ConfigError, match="'transport' 'nixl' needs a 'secret'"):
        parse_p2p_config({"transport": "nixl"})


def test_the_documentation_lists_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([^|]*) \|", DOCS.read_text(), re.MULTILINE)
    defaults = {
        name: "none" if field.default == () else default_words(field.default)
        for name, field in P2PConfig.model_fields.items()
    }
    assert dict(rows) == defaults
    assert [name for name, _ in rows] == list(defaults)


def test_the_flags_as_printed_are_accepted() -> None:
    flags = re.findall(r"--kv-transfer-config '(\{.*\})'", DOCS.read_text())
    assert len(flags) >= 2
    for flag in flags:
        transfer = json.loads(flag)
        extra = transfer.get("kv_connector_extra_config", {})
        for child in extra.get("connectors", [transfer]):
            if child["kv_connector"] == "LMCacheP2PConnector":
                parse_p2p_config(child.get("kv_connector_extra_config", {}))
