from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.storage.redis.client.url import TopologyKind, parse_redis_url


@pytest.mark.parametrize(
    ("url", "kind", "tls", "hosts", "path", "master", "db"),
    [
        ("redis://h", TopologyKind.SINGLE, False, (("h", 6379),), "", "", 0),
        ("redis://h:1/3", TopologyKind.SINGLE, False, (("h", 1),), "", "", 3),
        ("redis://h:1?db=4", TopologyKind.SINGLE, False, (("h", 1),), "", "", 4),
        ("redis://[::1]:7/", TopologyKind.SINGLE, False, (("::1", 7),), "", "", 0),
        ("rediss://u:p@h", TopologyKind.SINGLE, True, (("h", 6379),), "", "", 0),
        ("unix:///run/r.sock?db=2", TopologyKind.SINGLE, False, (), "/run/r.sock", "", 2),
        (
            "redis+sentinel://a,b:7/mymaster/1",
            TopologyKind.SENTINEL,
            False,
            (("a", 26379), ("b", 7)),
            "",
            "mymaster",
            1,
        ),
        ("rediss+cluster://a:1,b", TopologyKind.CLUSTER, True, (("a", 1), ("b", 6379)), "", "", 0),
    ],
)
def test_url_forms(
    url: str,
    kind: TopologyKind,
    tls: bool,
    hosts: tuple[tuple[str, int], ...],
    path: str,
    master: str,
    db: int,
) -> None:
    address = parse_redis_url(url)
    assert (address.kind, address.tls, address.hosts) == (kind, tls, hosts)
    assert (address.path, address.master, address.db) == (path, master, db)


def test_credentials_are_decoded_and_never_shown() -> None:
    address = parse_redis_url("redis://us%40er:p%3A%2Fss@h:1")
    assert (address.username, address.password) == ("us@er", "p:/ss")
    assert parse_redis_url("redis://:only@h").password == "only"
    for shown in (repr(address), str(address)):
        assert "p:/ss" not in shown
        assert "us@er" not in shown
    assert str(address) == "redis://h:1"


def test_credentials_are_removed_from_error_messages() -> None:
    url = "redis+sentinel://user:p%3A%2Fss@h/main?sentinel_username=guard&sentinel_password=hunter2"
    told = parse_redis_url(url).redact(OSError("AUTH user p:/ss, then AUTH guard hunter2 failed"))
    assert told == "AUTH *** ***, then AUTH *** *** failed"
    alike = parse_redis_url("redis://engine:engine-hunter2@h")
    assert alike.redact(OSError("AUTH engine engine-hunter2 failed")) == "AUTH *** *** failed"
    cut_off = "unknown command 'AUTH', with args beginning with: 'engine' 'engine-hunt"
    assert alike.redact(OSError(cut_off)) == "unknown command 'AUTH'"


def test_an_error_message_is_one_short_line() -> None:
    told = parse_redis_url("redis://h").redact(OSError("\x1b[2J\nforged\r\xe9" + "A" * 10_000))
    assert told == r"\x1b[2J\nforged\r\xe9" + "A" * (200 - len("\x1b[2J\nforged\r\xe9"))


def test_tls_options_reach_the_connection(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    url = f"rediss://h?ssl_ca_certs={ca}&ssl_check_hostname=false"
    options = parse_redis_url(url).tls_options()
    assert options == {"ssl_ca_certs": str(ca), "ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://secret@h", "scheme"),
        ("h:6379", "scheme"),
        ("redis://", "host"),
        ("redis://h:port", "port"),
        ("redis://h:99999", "port"),
        ("redis://h/x", "number"),
        ("redis://h/1/2", "path"),
        ("redis://a host", "malformed"),
        ("redis://h%0d%0aSET", "malformed"),
        ("redis://h/0#1", "#"),
        ("redis://h?ssl_ca_certs=/x", "ssl_ca_certs"),
        ("rediss://h?ssl_ca_path=/no/such/folder", "not a folder"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "not a file"),
        ("redis://h?tiemout=3", "tiemout"),
        ("unix://", "socket"),
        ("unix://run/r.sock", "begins with a /"),
        ("redis+sentinel://h", "master"),
        ("redis+cluster://h/1", "database 0"),
        ("redis+cluster://a,user:hunter2@b", "once"),
        ("redis://a,b", "several hosts"),
    ],
)
def test_impossible_urls_say_why_and_keep_the_secret(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_redis_url(url.replace("://", "://user:hunter2@"))
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("character", "/?#[]")
@pytest.mark.parametrize("url", ["redis://user:hunter2{}x@h:1", "rediss+cluster://:hunter2{}x@a,b"])
def test_the_error_says_how_to_encode_a_password(url: str, character: str) -> None:
    with pytest.raises(ValueError, match="%23") as error:
        parse_redis_url(url.format(character))
    assert "hunter2" not in str(error.value)
