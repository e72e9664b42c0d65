"""The worker side of a consumer: requests that wait for KV, and how it gets into their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.data.nixl_agent import Nixl
from lmcache_connector.p2p.memory.cache_form import form_of
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.plans import HandoverPlan, HandoverReport
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.loader import Loader
from lmcache_connector.p2p.worker.poller import Poller
from lmcache_connector.p2p.worker.reader import Reader
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.role import Role
from lmcache_connector.p2p.worker.session import Connect
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings
from lmcache_connector.plans import StepOutput

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Copier
    from lmcache_connector.kv_layout.paged_cache import PagedLayout

_NOT_NEEDED = Cause(Reason.NOT_NEEDED, "nobody needs it any more")
_GAVE_UP = Cause(Reason.GAVE_UP, "the consumer gave up")


class Consumer(Role):
    """``receive_buffer`` is the sink for this rank's transports. ``nixl``: knows the cache."""

    def __init__(
        self,
        settings: P2PWorkerSettings,
        paged: PagedLayout,
        copier: Copier,
        host_buffer: HostBuffer,
        connect: Connect,
        clock: Callable[[], float],
        nixl: Nixl | None = None,
    ) -> None:
        self.receive_buffer = buffer = ReceiveBuffer(settings, host_buffer, clock)
        self._loader = Loader(paged, copier, buffer, clock)
        reader = Reader(settings, form_of(paged), nixl, buffer, clock) if nixl is not None else None
        self._poller = Poller(buffer, settings.own, connect, settings.config, clock, reader)

    @property
    def has_line(self) -> bool:
        """Whether requests wait in line that have no blocks yet."""
        return self._poller.has_line

    def start_loads(self, plan: HandoverPlan) -> None:
        for arrival in plan.arrivals:
            self.receive_buffer.keep(arrival.transfer_id)
            self._poller.keep(arrival.source, arrival.transfer_id)
        for load in plan.loads:
            waiting = self.receive_buffer.expect(load)
            self._poller.let_go(load.source, load.transfer_id)
            if not self.receive_buffer.is_over(waiting):
                self._poller.watch(waiting)
        for request_id in plan.cancelled_loads:
            self.receive_buffer.cancel(request_id)
        for release in plan.releases:
            self.receive_buffer.discard(release.transfer_id)
            self._poller.let_go(release.source, release.transfer_id)
            self._poller.forget(release.source, release.transfer_id, _NOT_NEEDED)

    def take_output(self) -> StepOutput[HandoverReport]:
        """Loads that ended. Producers of those that failed are told to stop."""
        self.receive_buffer.end_overdue()
        ended = self._loader.take_results()
        if not ended:
            return StepOutput()
        for load, result in ended:
            is_short = result.num_blocks < len(load.block_ids)
            if is_short and not self.receive_buffer.awaits(load.transfer_id):
                self._poller.forget(load.source, load.transfer_id, _GAVE_UP)
        return StepOutput(
            finished_recving=frozenset(load.request_id for load, _ in ended),
            report=HandoverReport(loads=tuple(result for _, result in ended)),
        )

    def wait(self, seconds: float, *, for_room: bool) -> bool:
        if not self.receive_buffer.num_waiting:
            return False
        self._loader.wait_for_result(seconds)
        return True

    def answer(self, peer: Peer, message: Message) -> Message | None:
        if isinstance(message, messages.Offer):
            return self.receive_buffer.offered(peer, message)
        if isinstance(message, messages.More):
            return self.receive_buffer.room(peer, message)
        if isinstance(message, messages.Forget):
            self.receive_buffer.fail(message.transfer_id, message.cause)
            return messages.Done()
        return None

    def close(self, seconds: float) -> None:
        self.receive_buffer.close()
        self._poller.close(seconds)
        self._loader.close(seconds)
