"""Which adapters vLLM has loaded, as seen at its own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from lmcache_connector.plans import LoadedAdapterList
from lmcache_connector.requests.adapters import AdapterDigests
from lmcache_connector.vllm_compat.lora_loads import LoraLoads

CONFIG: Any = SimpleNamespace()


class Manager(LRUCacheWorkerLoRAManager):
    """vLLM's own, except that it does not read the files: it calls ``while_loading`` instead."""

    def __init__(self, lora_config: Any = CONFIG) -> None:
        self.lora_config = lora_config
        self.while_loading: Callable[[], None] = lambda: None
        self.loaded: set[int] = set()

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def add(self, number: int, path: Path, **more: Any) -> None:
        """As ``add_adapter`` loads one."""
        self._load_adapter(LoRARequest("a", number, str(path), **more))
        self.loaded.add(number)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoraLoads]:
    def load(self: Manager, lora_request: LoRARequest) -> Any:
        self.while_loading()
        return lora_request.lora_int_id

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    loads = LoraLoads(CONFIG)
    yield loads
    loads.close()
    assert WorkerLoRAManager._load_adapter is load, "vLLM is left as it was"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "a", "one")


def write(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    new = folder / "new"
    new.write_text(content)
    new.replace(folder / "adapter_model.safetensors")
    return folder


def settled(loads: LoraLoads, number: int) -> str | None:
    (*_, name) = loads.names_of(number)
    assert name.wait(10.0)
    return name.value


def test_what_was_loaded_is_told_once_and_when_asked(loads: LoraLoads, folder: Path) -> None:
    assert loads.take() is None
    manager = Manager()
    manager.add(1, folder)
    name = settled(loads, 1)
    assert name == AdapterDigests().digest(folder)
    assert loads.take() == LoadedAdapterList(0, ((1, name),), number=1)
    assert loads.take() is None
    loads.ask(7)
    assert loads.take() == LoadedAdapterList(7, ((1, name),), number=2)
    manager.add(2, folder, is_3d_lora_weight=True)
    assert settled(loads, 2) != name


@pytest.mark.parametrize("is_loaded", [False, True])
def test_files_that_change_while_they_are_read_have_no_name(
    loads: LoraLoads, folder: Path, is_loaded: bool
) -> None:
    manager = Manager()
    if is_loaded:
        manager.add(1, folder)
        assert settled(loads, 1) is not None
    manager.while_loading = lambda: void(write(folder, "two"))
    manager.add(1, folder)
    assert settled(loads, 1) is None
    listed = loads.take()
    assert listed is not None
    assert listed.digests == ((1, None),)


def void(result: object) -> None:
    """Drops it."""


def test_reading_the_same_files_again_changes_nothing(loads: LoraLoads, folder: Path) -> None:
    """A request with ``load_inplace`` has them read in every step."""
    manager = Manager()
    manager.add(1, folder)
    names = loads.names_of(1)
    settled(loads, 1)
    assert loads.take() is not None
    manager.add(1, folder, load_inplace=True)
    assert loads.names_of(1) == names
    assert not loads.has_updates


def test_what_vllm_has_dropped_is_not_loaded(loads: LoraLoads, folder: Path) -> None:
    manager = Manager()
    for number in (1, 2):
        manager.add(number, folder)
        settled(loads, number)
    manager.loaded.discard(1)
    listed = loads.take()
    assert listed is not None
    assert [number for number, _ in listed.digests] == [2]
    assert loads.names_of(1) == ()


def test_what_was_replaced_between_two_lists_is_told(loads: LoraLoads, folder: Path) -> None:
    """A, B and A again: the scheduler side would never know of B."""
    manager = Manager()
    manager.add(1, folder)
    one = settled(loads, 1)
    assert loads.take() == LoadedAdapterList(0, ((1, one),), number=1)
    write(folder, "two")
    manager.add(1, folder, load_inplace=True)
    two = settled(loads, 1)
    write(folder, "one")
    manager.add(1, folder, load_inplace=True)
    names = loads.names_of(1)
    assert all(name.wait(10.0) for name in names)
    assert [name.value for name in names] == [one, two, one]
    told = LoadedAdapterList(0, ((1, one),), number=2, replaced=((1, one), (1, two)))
    assert loads.take() == told
    loads.note_acked(1)
    assert loads.names_of(1) == names
    loads.note_acked(2)
    assert loads.names_of(1) == names[-1:]
    loads.ask(1)
    assert loads.take() == LoadedAdapterList(1, ((1, one),), number=3), "told once"


def test_what_else_the_loader_is_called_with_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a vLLM that nobody has tested: one argument less would end the engine at an adapter."""

    def load(manager: object, lora_request: object, device: object) -> object:
        return lora_request, device

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    loads = LoraLoads(CONFIG)
    manager: Any = object.__new__(WorkerLoRAManager)
    manager.lora_config = None
    assert manager._load_adapter("request", "device") == ("request", "device")
    loads.close()


def test_vllm_still_loads_adapters_where_we_look() -> None:
    """``add_adapter`` is what workers call, for requests and for ``add_lora`` alike."""
    for manager in (WorkerLoRAManager, LRUCacheWorkerLoRAManager):
        assert "_load_adapter" in manager.add_adapter.__code__.co_names
    assert "_load_adapter" not in vars(LRUCacheWorkerLoRAManager)
