"""Which LoRA adapter a request is computed with: what lies on the disk, and what is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_connector.plans import AdapterRef
from lmcache_connector.requests.adapter_files import AdapterDigests, adapter_name
from lmcache_connector.requests.loaded_adapters import LoadedAdapters
from lmcache_connector.threads import Background, Task

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 1024
_LOOK_SECONDS = 0.5
"""While requests queue, the files of their adapters may change, and vLLM may read them again."""
_STALE_SECONDS = 5.0
"""No step takes longer: the engine was paused, and its files may be others since."""


@dataclass(slots=True)
class _Look:
    """The last look at an adapter that ``num_queued`` requests in vLLM's queue have."""

    adapter: Any
    reading: Task[str]
    since: float
    num_queued: int = 0


class AdapterReader:
    """Reads adapters in the background. Runs on the scheduler's thread.

    ``find_folder`` turns the path a request has into the folder vLLM reads, ``None`` if there is
    none yet. ``loaded`` knows what vLLM has loaded; without it, that is taken to be what lies on
    the disk. ``looks``: at the adapters of requests in vLLM's queue.
    """

    def __init__(
        self,
        find_folder: Callable[[str], Path | None] = Path,
        loaded: LoadedAdapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_folder = find_folder
        self._clock = clock
        self.looks: dict[tuple[str, bool], _Look] = {}
        self.loaded = loaded
        self._digests = AdapterDigests()
        self._reads = Background("lmc-adapters")
        self._warned: set[str] = set()

    def enter(self, adapter: Any) -> Task[str]:
        """A request with the adapter has joined vLLM's queue. Returns the name of what its files
        hold now, to be. They are looked at again with every step until it has left, so that an ask
        need not wait for that, however long the step before it took."""
        look = self.looks.get(_files_of(adapter))
        if look is None:
            look = _Look(adapter, self._submit(adapter), self._clock())
            self.looks[_files_of(adapter)] = look
        else:
            self._look(look)
        look.num_queued += 1
        return look.reading

    def leave(self, adapter: Any) -> None:
        look = self.looks[_files_of(adapter)]
        look.num_queued -= 1
        if not look.num_queued:
            del self.looks[_files_of(adapter)]

    def next_step(self) -> None:
        for look in self.looks.values():
            if look.reading.is_done and self._clock() - look.since >= _LOOK_SECONDS:
                self._look(look)

    def last_look(self, adapter: Any) -> Task[str]:
        """The name of what the files held by the last step. The request is in vLLM's queue."""
        look = self.looks[_files_of(adapter)]
        if look.reading.is_done and self._clock() - look.since >= _STALE_SECONDS:
            self._look(look)
        return look.reading

    def ask(self, adapter: Any) -> int:
        """Ask the ranks what they have loaded, ahead of need: unless all have told already that
        they have that adapter. Returns the question's number; 0: none."""
        if self.loaded is None or self.loaded.have_loaded(adapter.lora_int_id):
            return 0
        return self.loaded.ask()

    def is_known(self, adapter: Any, name: str, question: int) -> bool:
        """Whether enough is known of what the ranks have loaded to say what they compute with.

        That the files are those it was loaded from, and still are, needs no further question.
        """
        return (
            self.loaded is None
            or self.loaded.are(AdapterRef(adapter.lora_int_id, name))
            or (question > 0 and self.loaded.have_answered(question))
        )

    def will_compute(self, request: Request, name: str) -> bool:
        """Whether a request that arrives is computed with the adapter of that name."""
        adapter, loaded = request.lora_request, self.loaded
        if loaded is None:
            return True
        ref = AdapterRef(adapter.lora_int_id, name)
        if self.may_compute(request, name):
            loaded.expect(ref)
            return True
        self._warn(
            f"{ref}",
            f"The files of LoRA adapter {adapter.lora_name} are not those vLLM has loaded: its "
            "requests bypass the KV cache tiers. Load changed weights under a new number, or with "
            "load_inplace.",
        )
        return False

    def may_compute(self, request: Request, name: str | None) -> bool:
        """Whether no rank is known to compute the request with another adapter than that.

        With ``load_inplace`` vLLM reads the files again before it begins. The ranks know best.
        """
        if name is None or self.loaded is None:
            return True
        adapter = request.lora_request
        if adapter.load_inplace and request.num_computed_tokens == 0:
            return True
        return self.loaded.may_be(AdapterRef(adapter.lora_int_id, name))

    def close(self) -> None:
        self._reads.close()

    def _look(self, look: _Look) -> None:
        look.reading, look.since = self._submit(look.adapter), self._clock()

    def _submit(self, adapter: Any) -> Task[str]:
        return self._reads.submit(lambda: self._read(adapter))

    def _read(self, adapter: Any) -> str | None:
        """On a thread of its own."""
        try:
            folder = self._find_folder(adapter.lora_path)
            if folder is None:
                return None
            return adapter_name(self._digests.digest(folder), adapter.is_3d_lora_weight)
        except OSError as error:
            self._warn(
                adapter.lora_path,
                f"LoRA adapter {adapter.lora_name} cannot be read ({error}): its requests bypass "
                "the KV cache tiers. Give vLLM a local directory.",
            )
            return None

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(about)
            logger.warning("%s", message)


def _files_of(adapter: Any) -> tuple[str, bool]:
    """What :meth:`AdapterReader._read` goes by."""
    return adapter.lora_path, adapter.is_3d_lora_weight
