"""Which LoRA adapter a request is computed with: what lies on the disk, and what is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_connector.plans import AdapterRef
from lmcache_connector.requests.adapter_files import AdapterDigests, adapter_name
from lmcache_connector.requests.background_read import BackgroundReads, Reading
from lmcache_connector.requests.loaded_adapters import LoadedAdapters

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 1024


class AdapterReader:
    """Reads adapters in the background. Runs on the scheduler's thread.

    ``find_folder`` turns the path a request has into the folder vLLM reads, ``None`` if there is
    none yet. ``loaded`` knows what vLLM has loaded; without it, that is taken to be what lies on
    the disk.
    """

    def __init__(
        self,
        find_folder: Callable[[str], Path | None] = Path,
        loaded: LoadedAdapters | None = None,
    ) -> None:
        self._find_folder = find_folder
        self.loaded = loaded
        self._digests = AdapterDigests()
        self._reads = BackgroundReads("lmc-adapters")
        self._warned: set[str] = set()

    def read(self, adapter: Any) -> Reading[str]:
        """Start to read the adapter of a request. Returns the name of its content, to be."""
        return self._reads.submit(lambda: self._read(adapter))

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
        if not loaded.are_watched:
            self._warn(
                "",
                "This vLLM does not tell when it loads LoRA adapters: requests with adapters "
                "bypass the KV cache tiers.",
            )
            return False
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
