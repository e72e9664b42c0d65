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
        arena: HostBuffer,
        connect: Connect,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.inbox = ReceiveBuffer(settings, arena, clock)
        self._loader = Loader(paged, copier, self.inbox, clock)
        self._askers = Poller(self.inbox, settings.own, connect, grace_seconds, clock)

    # -- one step ------------------------------------------------------------------------------

    def start_loads(self, plan: HandoverPlan) -> None:
        for load in plan.loads:
            waiting = self.inbox.expect(load)
            if not self.inbox.is_over(waiting):
                self._askers.watch(waiting)
        for request_id in plan.cancelled_loads:
            self.inbox.cancel(request_id)
        for release in plan.releases:
            self.inbox.discard(release.transfer_id)
            self._askers.forget(release.source, release.transfer_id, "nobody needs it any more")

    def wait_for_result(self, seconds: float) -> None:
        self._loader.wait_for_result(seconds)

    def take_results(self) -> list[tuple[HandoverLoad, HandoverResult]]:
        """Loads that ended. Producers of those that failed are told to stop."""
        self.inbox.end_overdue()
        results = self._loader.take_results()
        for load, result in results:
            is_short = result.num_blocks < len(load.block_ids)
            if is_short and not self.inbox.awaits(load.transfer_id):
                self._askers.forget(load.source, load.transfer_id, "the consumer gave up")
        return results

    def close(self, seconds: float) -> None:
        self.inbox.close()
        self._askers.close(seconds)
        self._loader.close(seconds)

    # -- the control server's thread -----------------------------------------------------------

    def answer(self, peer: Peer, message: Message) -> Message | None:
        """To a message that is for a consumer; ``None`` for any other."""
        if isinstance(message, messages.Offer):
            return self.inbox.offered(peer, message)
        if isinstance(message, messages.Forget):
            self.inbox.fail(message.transfer_id, message.reason)
            return messages.Done()
        return None
