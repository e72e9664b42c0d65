"""The worker side of a producer: saves what the forward pass writes, answers who wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.client import Connect
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.data.base import Transport
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.plans import HandoverHold, HandoverPlan, Save
from lmcache_connector.p2p.worker.host_buffer import HostBuffer
from lmcache_connector.p2p.worker.saver import LayerSave, Saver
from lmcache_connector.p2p.worker.send_buffer import Outgoing, SendBuffer
from lmcache_connector.p2p.worker.sender import Sender
from lmcache_connector.storage.geometry import ChunkGeometry

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Copier
    from lmcache_connector.kv_layout.paged_cache import PagedLayout

logger = logging.getLogger(__name__)

_VACATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """``geometry``: this rank's part for a number of blocks. ``waits``: mode ``PUT``, in which a
    step ends only when what it computed is on its way, ``stall_seconds`` later at most."""

    own: RankTopology
    geometry: Callable[[int], ChunkGeometry]
    block_size: int
    layer_names: tuple[str, ...]
    lease_seconds: float
    stall_seconds: float
    checksum: bool
    waits: bool


class Producer:
    """Called from the engine's step thread, but for :meth:`answer`."""

    def __init__(
        self,
        settings: ProducerSettings,
        layers: tuple[PagedLayout, ...],
        copier: Copier,
        host_buffer: HostBuffer,
        connect: Connect,
        transports: dict[str, Transport],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._copier = copier
        self._layer_index = {name: i for i, name in enumerate(settings.layer_names)}
        self.send_buffer = SendBuffer(host_buffer, settings.lease_seconds, clock)
        self._saver = Saver(layers, copier, self.send_buffer, checksum=settings.checksum)
        self._sender = Sender(
            self.send_buffer, settings.own, connect, transports, settings.stall_seconds, clock
        )
        self._saves: tuple[tuple[Save, Outgoing], ...] = ()
        self._saved_layers: set[int] = set()
        self._holds: list[HandoverHold] = []

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, plan: HandoverPlan) -> None:
        """Before the forward pass: blocks that are taken back must not be read any more."""
        if plan.vacated and not self.send_buffer.settle_copies(plan.vacated, _VACATE_SECONDS):
            for transfer_id in plan.vacated:
                self.send_buffer.decline(transfer_id, "its blocks were taken back")

    def start_forward(self, plan: HandoverPlan) -> None:
        """Right before the forward pass: know what to save, make room for it."""
        self.send_buffer.announce(plan.announced)
        for drop in plan.drops:
            self.send_buffer.decline(drop.transfer_id, drop.reason)
        for start in plan.starts:
            num_blocks = -(-start.num_tokens // self._settings.block_size)
            if not self._settings.own.write_shards:
                continue  # another rank holds a replica and sends it
            geometry = self._settings.geometry(num_blocks)
            if self.send_buffer.open(start, geometry, num_blocks) is None:
                logger.warning(
                    "The buffer is full: the KV of %s is not handed over", start.transfer_id
                )
            elif start.target is not None:
                self._sender.push(start.transfer_id, start.target)
        pairs = ((save, self.send_buffer.get(save.transfer_id)) for save in plan.saves)
        self._saves = tuple((save, outgoing) for save, outgoing in pairs if outgoing is not None)
        self._saved_layers = set()

    def save_layer(self, layer_name: str) -> None:
        """A layer has just been computed; its copy runs beside the rest of the forward pass."""
        layer = self._layer_index.get(layer_name)
        if self._saves and layer is not None and layer not in self._saved_layers:
            self._submit(layer)

    def finish_saves(self, plan: HandoverPlan) -> None:
        """After the forward pass."""
        if self._saves:
            for layer in range(len(self._layer_index)):
                if layer not in self._saved_layers:
                    self._submit(layer)
            for save, outgoing in self._saves:
                if save.is_last:
                    self._saver.seal(outgoing)
            self._saves = ()
            if self._settings.waits and not self.send_buffer.settle(self._settings.stall_seconds):
                logger.debug("PUT: not all was sent within this step")
        self._holds += plan.holds

    def take_released_holds(self) -> frozenset[str]:
        """Finished requests whose blocks are not read any more."""
        free = [hold for hold in self._holds if self.send_buffer.is_copied(hold.transfer_id)]
        self._holds = [hold for hold in self._holds if hold not in free]
        return frozenset(hold.request_id for hold in free)

    def wait(self, seconds: float, *, for_room: bool) -> None:
        """Until something changes in the send_buffer; not at all if nobody waits for that."""
        if self._holds or for_room:
            with self.send_buffer.changed:
                self.send_buffer.changed.wait(seconds)

    def close(self, seconds: float) -> None:
        self._saver.close(seconds)
        self.send_buffer.close()
        self._sender.close(seconds)

    def _submit(self, layer: int) -> None:
        self._saved_layers.add(layer)
        fence = self._copier.fence()
        for save, outgoing in self._saves:
            if save.block_ids:
                self._saver.submit(
                    LayerSave(outgoing, layer, save.first_block, save.block_ids, fence)
                )

    # -- the control server's thread -----------------------------------------------------------

    def answer(self, peer: Peer, message: Message) -> Message | None:
        """To a message that is for a producer; ``None`` for any other."""
        if isinstance(message, messages.Want):
            return self._wanted(peer, message)
        if isinstance(message, messages.Forget) and self.send_buffer.get(message.transfer_id):
            self.send_buffer.decline(message.transfer_id, message.reason)
            return messages.Done()
        return None

    def _wanted(self, peer: Peer, want: messages.Want) -> Message:
        outgoing = self.send_buffer.get(want.transfer_id)
        if outgoing is None:
            if self.send_buffer.is_announced(want.transfer_id):
                return messages.Coming()
            reason = self.send_buffer.gone(want.transfer_id)
            if reason is None:
                return messages.Unknown()
            return messages.Gone(reason) if reason else messages.Sent()
        if outgoing.failed:
            return messages.Gone(outgoing.failed)
        if outgoing.start.digest != want.digest:
            return messages.Gone("the prompt there was another one")
        try:
            self._sender.fetch(want.transfer_id, peer.card, want.first_block)
        except PeerError as error:
            return messages.Refused(str(error))
        return messages.Coming()
