"""Which LoRA adapter a request is computed with: the files on disk, and what the ranks have loaded.

An adapter is identified by the content of the files vLLM reads, not by their path. vLLM reads them
when it first meets the adapter's number, caches them, and may drop and read them again. So a
request is computed with what every rank has loaded, as the ranks report it, not with the files on
disk. Runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from lmcache_connector.bounded import Latest
from lmcache_connector.keys.kept_digests import Signature
from lmcache_connector.plans import AdapterRef, LoadedAdapterList
from lmcache_connector.threads import Background, Task

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM reads the first that exists (``LoRAModel.from_local_checkpoint``)."""
_MAX_KNOWN, _MAX_EXPECTED, _MAX_WARNINGS = 1024, 4096, 1024
_LOOK_SECONDS = 0.5
"""How often files of queued requests' adapters are checked: vLLM may read them again."""
_STALE_SECONDS = 5.0
"""A read older than this is repeated: no step takes as long, so the engine was paused."""

# -- on the disk -----------------------------------------------------------------------------------

AdapterStamp = tuple[tuple[Path, Signature], ...]
"""An adapter's files with their signatures, which change when a file is written or replaced."""


def adapter_stamp(folder: Path) -> AdapterStamp:
    """Raises ``OSError`` if ``folder`` holds no adapter."""
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder} holds no adapter weights")
    return tuple((file, Signature.of(file.stat())) for file in (folder / _CONFIG, weights))


class AdapterDigests:
    """Hexadecimal digests of adapters, cached by stamp. Calls may take seconds; one thread makes
    them.
    """

    def __init__(self) -> None:
        self._known: Latest[AdapterStamp, str] = Latest(_MAX_KNOWN)

    def digest(self, folder: Path, stamp: AdapterStamp | None = None) -> str:
        """``stamp``: of the files to digest. Raises ``OSError`` if they are unreadable, or have
        another stamp at the end.
        """
        stamp = stamp or adapter_stamp(folder)
        digest = self._known.get(stamp) or _digest_files(stamp)
        if adapter_stamp(folder) != stamp:
            raise OSError(f"the adapter in {folder} is being changed")
        self._known[stamp] = digest
        return digest


def _digest_files(stamp: AdapterStamp) -> str:
    hasher = blake3()
    for file, _ in stamp:
        # The suffix decides how vLLM reads the file. Both digests have a fixed length.
        hasher.update(blake3(file.suffix.encode()).digest())
        hasher.update(blake3().update_mmap(file).digest())
    return str(hasher.hexdigest())


def adapter_name(digest: str, is_3d: bool) -> str:
    """Identity of an adapter: its content, and how vLLM is told to read it."""
    return f"{digest}:3d" if is_3d else digest


# -- on the disk and in memory ---------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    """The last read of an adapter that ``num_queued`` requests in vLLM's queue use."""

    adapter: Any
    reading: Task[str] = field(default_factory=Task)
    since: float = 0.0
    num_queued: int = 0


class Adapters:
    """The files of adapters, read in the background, and the ranks' reports of what they have
    loaded. Runs on the scheduler's thread.

    ``world_size``: number of ranks. ``find_folder``: from a request's path to the folder vLLM
    reads, ``None`` if missing. ``acked``: number of each rank's last list, 0 without one.
    ``question``: goes with the next plan; 0: none. ``looks``: reads of queued requests' adapters.
    """

    def __init__(
        self,
        world_size: int,
        find_folder: Callable[[str], Path | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.acked = (0,) * world_size
        self.question = 0
        self.looks: dict[tuple[str, bool], _Look] = {}
        self._find_folder = find_folder
        self._clock = clock
        self._lists: dict[int, LoadedAdapterList] = {}  # by rank
        self._expected: Latest[int, AdapterRef] = Latest(_MAX_EXPECTED)  # by number
        self._last_question = 0
        self._digests = AdapterDigests()
        self._reads = Background("lmc-adapters")
        self._warned: set[str] = set()

    # -- the ranks' reports --------------------------------------------------------------------

    def ask(self) -> int:
        """Request a list of adapters from all ranks. Returns the question's number."""
        if not self.question:
            self._last_question += 1
            self.question = self._last_question
        return self.question

    def take_question(self) -> int:
        question, self.question = self.question, 0
        return question

    def forget(self) -> None:
        """Discard the reports, which a failed call may have processed in part, and ask again."""
        self._lists.clear()
        self._expected.clear()
        self.ask()

    def update(self, rank: int, adapters: LoadedAdapterList) -> set[AdapterRef]:
        """Returns the adapters under whose names KV may have been computed so far although another
        adapter was loaded."""
        before = self._lists.get(rank)
        self._lists[rank] = adapters
        self.acked = (*self.acked[:rank], adapters.number, *self.acked[rank + 1 :])
        doubtful = set()
        for number, digest in adapters.digests:
            in_memory = [d for each, d in adapters.replaced if each == number]
            if before is not None and not in_memory:
                in_memory = [before.digest_of(number, default=digest)]
            in_memory.append(digest)
            expected = self._expected.get(number)
            names = {*in_memory, expected.digest if expected is not None else None}
            mistaken = {
                AdapterRef(number, d)
                for d in names
                if d and not is_current_and_unreplaced(d, in_memory)
            }
            if expected in mistaken:
                del self._expected[number]
            doubtful |= mistaken
        return doubtful

    def ask_ahead(self, adapter: Any) -> int:
        """Ask the ranks ahead of need, unless all report an adapter of that number. Returns the
        question's number; 0: none."""
        number = adapter.lora_int_id
        if self._all(lambda listed: any(each == number for each, _ in listed.digests)):
            return 0
        return self.ask()

    def is_known(self, adapter: Any, name: str, question: int) -> bool:
        """Whether the ranks' reports suffice to say what they compute with: all report this
        adapter, or all have answered ``question``.
        """
        number = adapter.lora_int_id
        return self._all(lambda listed: listed.digest_of(number) == name) or (
            question > 0 and self._all(lambda listed: listed.answered >= question)
        )

    def will_compute(self, request: Request, name: str) -> bool:
        """Whether an arriving request will be computed with the adapter ``name``."""
        adapter = request.lora_request
        ref = AdapterRef(adapter.lora_int_id, name)
        if self.may_compute(request, name):
            self._expected[ref.number] = ref
            return True
        self._warn(
            f"{ref}",
            f"The files of LoRA adapter {adapter.lora_name} are not those vLLM has loaded: its "
            "requests bypass the KV cache tiers. Load changed weights under a new number, or with "
            "load_inplace.",
        )
        return False

    def may_compute(self, request: Request, name: str | None) -> bool:
        """Whether each rank has loaded exactly this adapter, or none of its number yet. With
        ``load_inplace``, vLLM reads the files again before the request begins."""
        if name is None:
            return True
        adapter = request.lora_request
        if adapter.load_inplace and request.num_computed_tokens == 0:
            return True
        lists, number = self._lists.values(), adapter.lora_int_id
        return all(listed.digest_of(number, default=name) == name for listed in lists)

    def _all(self, holds: Callable[[LoadedAdapterList], bool]) -> bool:
        return len(self._lists) == len(self.acked) and all(map(holds, self._lists.values()))

    # -- files ---------------------------------------------------------------------------------

    def enter(self, adapter: Any) -> Task[str]:
        """A request with the adapter joined vLLM's queue. Returns the pending name of its files'
        content. The files are read again at intervals until `leave`, so that `last_look` need not
        wait, however long a step took."""
        look = self.looks.get(_files_of(adapter))
        if look is None:
            look = self.looks[_files_of(adapter)] = _Look(adapter)
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
            self._look_if_older(look, _LOOK_SECONDS)

    def last_look(self, adapter: Any) -> Task[str]:
        """The name read last. The request must be in vLLM's queue."""
        look = self.looks[_files_of(adapter)]
        self._look_if_older(look, _STALE_SECONDS)
        return look.reading

    def close(self) -> None:
        self._reads.close()

    def _look_if_older(self, look: _Look, seconds: float) -> None:
        if look.reading.is_done and self._clock() - look.since >= seconds:
            self._look(look)

    def _look(self, look: _Look) -> None:
        look.reading = self._reads.submit(lambda: self._read(look.adapter))
        look.since = self._clock()

    def _read(self, adapter: Any) -> str | None:
        """Runs on a background thread."""
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


def is_current_and_unreplaced(digest: str, in_memory: Sequence[str | None]) -> bool:
    """Whether KV computed under the digest's name is that adapter's: the adapter is in memory, and
    nothing has replaced it since. ``in_memory``: contents of memory over time."""
    return digest in in_memory and set(in_memory[in_memory.index(digest) :]) == {digest}


def _files_of(adapter: Any) -> tuple[str, bool]:
    """What identifies a read."""
    return adapter.lora_path, adapter.is_3d_lora_weight
