"""The worker side of a consumer: requests that wait for KV, and how it gets into their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.client import Connect
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.plans import HandoverLoad, HandoverPlan, HandoverResult
from lmcache_connector.p2p.worker.host_buffer import HostBuffer
from lmcache_connector.p2p.worker.loader import Loader
from lmcache_connector.p2p.worker.poller import Poller
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer, ReceiveBufferSettings

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Copier
    from lmcache_connector.kv_layout.paged_cache import PagedLayout


class Consumer:
    """Called from the engine's step thread, but for :meth:`answer`."""

    def __init__(
        self,
        settings: ReceiveBufferSettings,
        paged: PagedLayout,
        copier: Copier,
        host_buffer: HostBuffer,
        connect: Connect,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.receive_buffer = ReceiveBuffer(settings, host_buffer, clock)
        self._loader = Loader(paged, copier, self.receive_buffer, clock)
        self._poller = Poller(self.receive_buffer, settings.own, connect, grace_seconds, clock)

    # -- one step ------------------------------------------------------------------------------

    def start_loads(self, plan: HandoverPlan) -> None:
        for load in plan.loads:
            waiting = self.receive_buffer.expect(load)
            if not self.receive_buffer.is_over(waiting):
                self._poller.watch(waiting)
        for request_id in plan.cancelled_loads:
            self.receive_buffer.cancel(request_id)
        for release in plan.releases:
            self.receive_buffer.discard(release.transfer_id)
            self._poller.forget(release.source, release.transfer_id, "nobody needs it any more")

    def wait_for_result(self, seconds: float) -> None:
        self._loader.wait_for_result(seconds)

    def take_results(self) -> list[tuple[HandoverLoad, HandoverResult]]:
        """Loads that ended. Producers of those that failed are told to stop."""
        self.receive_buffer.end_overdue()
        results = self._loader.take_results()
        for load, result in results:
            is_short = result.num_blocks < len(load.block_ids)
            if is_short and not self.receive_buffer.awaits(load.transfer_id):
                self._poller.forget(load.source, load.transfer_id, "the consumer gave up")
        return results

    def close(self, seconds: float) -> None:
        self.receive_buffer.close()
        self._poller.close(seconds)
        self._loader.close(seconds)

    # -- the control server's thread -----------------------------------------------------------

    def answer(self, peer: Peer, message: Message) -> Message | None:
        """To a message that is for a consumer; ``None`` for any other."""
        if isinstance(message, messages.Offer):
            return self.receive_buffer.offered(peer, message)
        if isinstance(message, messages.Forget):
            self.receive_buffer.fail(message.transfer_id, message.reason)
            return messages.Done()
        return None
