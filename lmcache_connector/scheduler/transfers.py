"""KV transfers on the scheduler side: prompts sent to other instances, or received from them.

A sent prompt is stored like any other. The scheduler side tells the workers which of its chunks
another instance will read, and vLLM keeps its blocks until they are stored. A received prompt waits
in vLLM's queue, without blocks, until the sender offers its chunks; then the chunks are loaded.

Transfers survive a failure of the scheduler side, so that the instance that waits hears of the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from lmcache_connector.config import limits
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.kv_parts.part import BlockTables, keys_of_part
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.net.address import Address
from lmcache_connector.peers.awaited import Awaited, Cause, Offered
from lmcache_connector.peers.routing import Receive, Router, Send
from lmcache_connector.plans import PeerSource, TransferUpdate
from lmcache_connector.scheduler.request_state import RequestState, Transfer
from lmcache_connector.threads import PENDING, Pending, StepWait

if TYPE_CHECKING:
    from lmcache_connector.peers.watch import TransferWatch
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """``num_told``, ``has_tail``: leading chunks, and the tail, that the workers know of."""

    request: Request
    transfer_id: str
    answers: bool
    num_told: int = 0
    has_tail: bool = False


@dataclass(slots=True)
class _Received:
    """``source``: whom to ask once the request's keys are known; ``awaited``: what was asked."""

    request: Request
    source: Address | None = None
    awaited: Awaited | None = None


@dataclass(eq=False)
class RequestTransfers:
    """``router``, ``engine_id`` and ``tp_size`` describe this instance to readers of its prompts.
    ``watch`` queries senders; ``None``: nothing is received. ``updates`` go into the next plan."""

    config: ConnectorConfig
    router: Router
    engine_id: str
    tp_size: int
    num_parts: int
    tally: Tally
    watch: TransferWatch | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._received: dict[str, _Received] = {}
        self.updates: list[TransferUpdate] = []

    def arrived(self, request: Request) -> None:
        """Start the request's KV transfer. A malformed one is counted, and the prompt computed."""
        name = request.request_id
        if name in self._sent or name in self._received:
            return
        try:
            part = self.router.part_in(name, request.kv_transfer_params)
        except ValueError as error:
            self.tally.count("p2p_malformed_requests")
            logger.warning("Request %.256r is computed here: %s", name, error)
            return
        if isinstance(part, Send):
            self._sent[name] = _Sent(request, part.transfer_id, part.answers)
            self.updates.append(TransferUpdate(part.transfer_id))
        elif isinstance(part, Receive) and self.watch is not None:
            self._received[name] = received = _Received(request)
            if part.transfer_id:
                seconds = self.config.transfer_deadline_seconds
                received.awaited = self.watch.ask(part.source, part.transfer_id, seconds)
            else:
                received.source = part.source

    # -- prompts that come -----------------------------------------------------------------------

    def is_coming(self, request_id: str) -> bool:
        """Whether the request still waits for its sender, until the transfer's own deadline."""
        received = self._received.get(request_id)
        if received is None or (awaited := received.awaited) is None or awaited.is_done:
            return False
        if self.clock() >= awaited.until:  # e.g. during a slow host name lookup
            awaited.settle(Offered(cause=Cause.DEADLINE))
            return False
        return True

    def find(self, state: RequestState, num_computed_tokens: int, wait: StepWait) -> Pending | None:
        """Learn which of the request's chunks the sender offers. ``PENDING``: ask again."""
        name = state.request.request_id
        if (received := self._received.get(name)) is None:
            return None
        source, received.source = received.source, None
        num_chunks = num_computed_tokens // self.config.chunk_size
        if source is not None and self.watch is not None and state.keys.loadable[num_chunks:]:
            seconds, keys = limits.LOOKUP_DEADLINE_SECONDS, self._part_keys(state.keys.loadable)
            received.awaited = self.watch.ask(source, "", seconds, keys)
        if (awaited := received.awaited) is None or state.source is not None:
            return None
        if not awaited.is_done:
            wait.on(awaited.wait)
        if self.is_coming(name) or (offered := awaited.value) is None:
            wait.end()
            return PENDING
        if offered.cause is not None:
            self.tally.count("p2p_failed_loads", offered.cause.value)
            self.drop_source(name)
            return None
        offered_keys = filter(offered.holds, self._part_keys(state.keys.loadable))
        state.lookup.offered_keys = frozenset(offered_keys)
        if not state.lookup.offered_keys:
            self.drop_source(name)
            return None
        state.source = PeerSource(
            awaited.source.host,
            awaited.source.port,
            offered.num_ranks,
            self.config.trusts(awaited.source),
            offered.engine_id,
        )
        return None

    def turn_down(self, state: RequestState) -> None:
        """Others have more of the request than the instance that it names."""
        state.source, state.lookup.offered_keys = None, frozenset()
        self.drop_source(state.request.request_id)

    def drop_source(self, request_id: str) -> None:
        """The request needs nothing more from another instance."""
        received = self._received.pop(request_id, None)
        if received and received.awaited and self.watch is not None:
            self.watch.done(received.awaited)

    # -- prompts that go -------------------------------------------------------------------------

    def part_of(self, request: Request) -> Transfer:
        """The request's role in KV transfers."""
        name = request.request_id
        received = self._received.get(name)
        loads = received and received.awaited and received.awaited.transfer_id
        return Transfer(stores=name in self._sent, loads=bool(loads))

    def planned(self, state: RequestState) -> None:
        """Stores of the request may have been planned: tell the workers which prompt chunks are
        planned or stored."""
        if (sent := self._sent.get(state.request.request_id)) is None:
            return
        end = min(state.store.next_chunk, len(state.keys.keys))
        end = min(end, state.request.num_prompt_tokens // self.config.chunk_size)
        keys = state.keys.keys[sent.num_told : end]
        if state.store.has_tail and state.keys.tail is not None and not sent.has_tail:
            keys, sent.has_tail = [*keys, state.keys.tail.key], True
        if keys:
            self.updates.append(TransferUpdate(sent.transfer_id, self._part_keys(keys)))
            sent.num_told = max(end, sent.num_told)

    def finished(
        self,
        request: Request,
        state: RequestState | None,
        block_ids: BlockTables,
        stores: Iterable[int],
        *,
        is_held: bool,
    ) -> tuple[bool, dict[str, Any] | None]:
        """``is_held``: vLLM keeps the request's blocks until its open ``stores`` have ended on all
        ranks. Returns whether it must, and the parameters for the router. ``state`` is ``None`` for
        a request that is not stored."""
        self.drop_source(request.request_id)
        if (sent := self._sent.get(request.request_id)) is None:
            return False, None
        if state is not None:
            self.planned(state)
        params = self._params(sent, block_ids) if sent.answers else None
        held = request.request_id if is_held else ""
        self.tally.count("p2p_handovers")
        del self._sent[request.request_id]
        self.updates.append(TransferUpdate(sent.transfer_id, (), frozenset(stores), held))
        return is_held, params  # from here on nothing raises: vLLM gets this answer

    def start_over(self) -> None:
        """A call has failed, maybe that of a request's end: end the transfers of ended requests."""
        for request_id, received in list(self._received.items()):
            if received.request.is_finished():
                self.drop_source(request_id)
        for request_id, sent in list(self._sent.items()):
            if sent.request.is_finished():
                del self._sent[request_id]
                self.updates.append(TransferUpdate(sent.transfer_id, (), frozenset()))

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def _part_keys(self, chunk_keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """The keys of all parts of these chunks."""
        by_part = (keys_of_part(chunk_keys, part, self.num_parts) for part in range(self.num_parts))
        return tuple(chain.from_iterable(by_part))

    def _params(self, sent: _Sent, block_ids: BlockTables) -> dict[str, Any]:
        address = self.router.own
        assert address is not None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": sent.transfer_id,
            "remote_host": address.host,
            "remote_port": address.port,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_num_tokens": sent.request.num_prompt_tokens,
            "tp_size": self.tp_size,
        }
