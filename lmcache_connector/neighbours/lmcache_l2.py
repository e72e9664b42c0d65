"""The Redis tier as an L2 adapter of LMCache's server, which ``LMCacheMPConnector`` talks to.

The server loads :class:`RedisL2Adapter` by its ``plugin`` type. An object is so many bytes: stored
whole, and read back whole and verified, or it is a miss. What a key means is LMCache's word: its
hash of the tokens, the model's name, a rank and a salt. It says nothing of how KV lies in those
bytes, so types and shapes are part of the name. Hashes shorter than 256 bits are refused.

Nothing here waits for a network: look-ups run on a thread of their own, loads and stores in
:mod:`~lmcache_connector.neighbours.redis_blocks`. Redis evicts by itself, so nothing is ever locked
or deleted.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from lmcache_connector.config import limits
from lmcache_connector.config.strict import parse
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.neighbours.redis_blocks import OnDone, RedisBlocks
from lmcache_connector.neighbours.settings import RedisSettings
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
# A model has one form of object for each of its object groups. Each form has its own connections.
_MAX_FORMS = 16


@dataclass(frozen=True, slots=True)
class _Form:
    """Of an object: its size, and the types and shapes of its tensors."""

    num_bytes: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


_NO_FORM = _Form(0, ())


@dataclass(frozen=True, slots=True)
class _LookUp:
    task: int
    keys: list[ObjectKey]
    forms: list[_Form]
    until: float


class _Results:
    """What has ended, by task, and the descriptor that says so. Thread-safe."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._ended: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def put(self, task: int, result: object) -> None:
        with self._lock:
            if self._closed:
                return
            self._ended[task] = result
            self._notifier.notify()

    def pop(self, task: int) -> Any:
        """``None`` if it has not ended, or was taken already."""
        with self._lock:
            return self._ended.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._notifier.close()


@dataclass
class _Gathered:
    """The results of one task, whose objects may have several forms, by their places."""

    num_parts: int
    results: list[bool]
    on_done: OnDone
    lock: threading.Lock = field(default_factory=threading.Lock)

    def part(self, places: list[int]) -> OnDone:
        def ended(results: list[bool]) -> None:
            with self.lock:
                for place, result in zip(places, results, strict=True):
                    self.results[place] = result
                self.num_parts -= 1
                is_last = not self.num_parts
            if is_last:
                self.on_done(self.results)

        return ended


class RedisL2Adapter(L2AdapterInterface):
    """``params``: the settings of `RedisSettings`. Raises :class:`ConfigError` with all that is
    wrong. Thread-safe."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._settings = parse(RedisSettings, params, "adapter_params", limits.GONE)
        self._blocks: dict[_Form, RedisBlocks] = {}
        self._lock = threading.Lock()
        self._last_task = 0
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._questions: queue.SimpleQueue[_LookUp | None] = queue.SimpleQueue()
        self._asker = start_thread("lmc-neighbour-lookup", self._run_lookups)

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task, sizes = self._new_task(), [obj.get_size() for obj in objects]

        def ended(stored: list[bool]) -> None:
            done = [i for i, fine in enumerate(stored) if fine]
            written = sum(sizes[i] for i in done)
            self._stores.put(task, L2StoreResult(len(done) == len(keys), written))
            if done:
                self._notify_keys_stored([keys[i] for i in done], [sizes[i] for i in done])

        def store(blocks: RedisBlocks, places: list[int], on_done: OnDone) -> None:
            buffers = [_bytes_of(objects[i]) for i in places]
            blocks.store([_name(keys[i]) for i in places], buffers, places, on_done)

        self._by_form(keys, [_form_of(obj) for obj in objects], store, ended)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task = self._new_task()
        forms = {group: _form_of_layout(layout) for group, layout in group_layout_descs.items()}
        found = [forms.get(key.object_group_id, _NO_FORM) for key in keys]
        until = time.monotonic() + limits.LOOKUP_DEADLINE_SECONDS
        self._questions.put(_LookUp(task, list(keys), found, until))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        found: Bitmap | None = self._lookups.pop(task_id)
        return found

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: what Redis drops before the load is a miss there."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()

        def ended(hits: list[bool]) -> None:
            self._loads.put(task, _bitmap(hits))
            if accessed := [key for key, hit in zip(keys, hits, strict=True) if hit]:
                self._notify_keys_accessed(accessed)

        def load(blocks: RedisBlocks, places: list[int], on_done: OnDone) -> None:
            buffers = [_bytes_of(objects[i]) for i in places]
            blocks.load([_name(keys[i]) for i in places], buffers, on_done)

        self._by_form(keys, [_form_of(obj) for obj in objects], load, ended)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        found: Bitmap | None = self._loads.pop(task_id)
        return found

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            tiers = dict(self._blocks)
        return {
            "is_healthy": True,  # a dead Redis costs hits, not requests
            "type": type(self).__name__,
            "tiers": [
                {"object_bytes": form.num_bytes, **_counts(tier)} for form, tier in tiers.items()
            ],
        }

    def close(self) -> None:
        """Write what can be written within 5 s, end the rest. Idempotent."""
        self._questions.put(None)
        self._asker.join(limits.SHUTDOWN_SECONDS)
        with self._lock:
            tiers = list(self._blocks.values())
        for tier in tiers:
            tier.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _new_task(self) -> int:
        with self._lock:
            self._last_task += 1
            return self._last_task

    def _of_form(self, form: _Form) -> RedisBlocks | None:
        """``None`` for what cannot be stored."""
        with self._lock:
            if form.num_bytes <= 0 or (
                form not in self._blocks and len(self._blocks) >= _MAX_FORMS
            ):
                return None
            if form not in self._blocks:
                identity = {
                    "neighbour": "lmcache mp",
                    "lmcache": lmcache.__version__,
                    "tensors": form.tensors,
                }
                self._blocks[form] = RedisBlocks(self._settings, identity, form.num_bytes)
            return self._blocks[form]

    def _by_form(
        self,
        keys: list[ObjectKey],
        forms: list[_Form],
        submit: Callable[[RedisBlocks, list[int], OnDone], None],
        on_done: OnDone,
    ) -> None:
        """Call ``submit`` for the places of each form, and ``on_done`` with the results of all."""
        groups = [
            (blocks, places)
            for form in dict.fromkeys(forms)
            if (blocks := self._of_form(form)) is not None
            and (places := [i for i, f in enumerate(forms) if f == form and _is_sound(keys[i])])
        ]
        gathered = _Gathered(len(groups), [False] * len(keys), on_done)
        for blocks, places in groups:
            submit(blocks, places, gathered.part(places))
        if not groups:
            on_done(gathered.results)

    def _run_lookups(self) -> None:
        while (asked := self._questions.get()) is not None:
            found = [False] * len(asked.keys)
            try:
                if time.monotonic() < asked.until:  # so no more wait than come in that time
                    self._look_up(asked, found)
            except Exception:
                logger.exception("A look-up of %d objects failed", len(asked.keys))
                found = [False] * len(asked.keys)
            self._lookups.put(asked.task, _bitmap(found))

    def _look_up(self, asked: _LookUp, found: list[bool]) -> None:
        def exist(blocks: RedisBlocks, places: list[int], on_done: OnDone) -> None:
            on_done(blocks.exist([_name(asked.keys[i]) for i in places]))

        def ended(results: list[bool]) -> None:
            found[:] = results

        self._by_form(asked.keys, asked.forms, exist, ended)


def _counts(blocks: RedisBlocks) -> dict[str, Any]:
    counts = blocks.stats().counts
    return {
        "objects_hit": counts.chunks_hit,
        "misses": dict(counts.misses),
        "bytes_written": counts.bytes_written,
    }


def _is_sound(key: ObjectKey) -> bool:
    return len(key.chunk_hash) >= _HASH_BYTES


def _name(key: ObjectKey) -> bytes:
    """Every field of the key, so that no two keys have one name."""
    fields = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id]
    return canonical_bytes([*fields, key.cache_salt])


def _bytes_of(obj: MemoryObj) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _form_of(obj: MemoryObj) -> _Form:
    return _Form(obj.get_size(), _tensors(obj.get_dtypes(), obj.get_shapes()))


def _form_of_layout(layout: MemoryLayoutDesc) -> _Form:
    num_bytes = sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
    return _Form(num_bytes, _tensors(layout.dtypes, layout.shapes))


def _tensors(
    dtypes: Sequence[object], shapes: Sequence[Iterable[int]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((str(dtype), tuple(shape)) for dtype, shape in zip(dtypes, shapes, strict=True))


def _bitmap(results: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(results))
    for index, result in enumerate(results):
        if result:
            bitmap.set(index)
    return bitmap
