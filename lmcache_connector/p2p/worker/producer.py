"""The worker side of a producer: saves what the forward pass writes, answers who wants it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import CacheForm, Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.data.nixl_agent import Nixl
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.memory.outgoing import LayerSave, Outgoing
from lmcache_connector.p2p.plans import HandoverHold, HandoverPlan, HandoverReport, Save, Start
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.held import OTHER_PROMPT, HeldPrompts
from lmcache_connector.p2p.worker.role import Role
from lmcache_connector.p2p.worker.saver import Saver
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.sender import Sender
from lmcache_connector.p2p.worker.session import Connect
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings
from lmcache_connector.plans import StepOutput

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Copier
    from lmcache_connector.kv_layout.paged_cache import PagedLayout

logger = logging.getLogger(__name__)

_VACATE_SECONDS = _LET_GO_SECONDS = 5.0
_HOLD_SECONDS = 2.0
_VACATED = Cause(Reason.PREEMPTED, "its blocks were taken back")
_RESET = Cause(Reason.RESET, "the cache was reset")
_SHUTDOWN = Cause(Reason.SHUTDOWN, "the producer is shutting down")


@dataclass(frozen=True, slots=True)
class Readable:
    """A paged cache that NIXL knows."""

    form: CacheForm
    nixl: Nixl


class Producer(Role):
    """``layers``: the paged cache, layer by layer. ``readable``: where peers can read it.
    ``has_line``: whether requests of this rank wait in line for KV of others.

    In mode ``PUT`` a step ends only when what it computed is on its way, ``stall_seconds`` later at
    most.
    """

    def __init__(
        self,
        settings: P2PWorkerSettings,
        layers: tuple[PagedLayout, ...],
        copier: Copier,
        host_buffer: HostBuffer,
        connect: Connect,
        clock: Callable[[], float],
        readable: Readable | None = None,
        has_line: Callable[[], bool] = lambda: False,
    ) -> None:
        config = settings.config
        self._settings = settings
        self._copier = copier
        self._layer_index = {name: i for i, name in enumerate(settings.layer_widths)}
        self._host_buffer = host_buffer
        self._has_line = has_line
        self._buffer = SendBuffer(host_buffer, config.lease_seconds, clock)
        self._saver = Saver(layers, copier, self._buffer, digest_bytes=settings.digest_bytes)
        self._sender = Sender(self._buffer, settings.own, connect, clock)
        self._saves: tuple[tuple[Save, Outgoing], ...] = ()
        self._saved_layers: set[int] = set()
        self._holds: list[HandoverHold] = []
        self._staged: deque[HandoverHold] = deque()
        self._held: HeldPrompts | None = None
        if readable is not None:
            self._held = HeldPrompts(
                settings,
                readable.form,
                readable.nixl,
                self._buffer.changed,
                self._buffer.held_ended,
                clock,
            )

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, plan: HandoverPlan) -> None:
        """Blocks that are taken back must not be read any more."""
        if plan.vacated:
            self._buffer.settle_copies(plan.vacated, _VACATED, _VACATE_SECONDS)

    def start_forward(self, plan: HandoverPlan) -> None:
        """Know what to save, and make room for it."""
        if plan.reset and self._held is not None:
            self._held.end_all(_RESET, 0.0)
        self._buffer.announce(plan.announced)
        for drop in plan.drops:
            self._end(drop.transfer_id, drop.cause)
        if self._settings.own.write_shards:  # else another rank holds a replica and sends it
            for start in plan.starts:
                self._open(start)
        pairs = ((save, self._buffer.get(save.transfer_id)) for save in plan.saves)
        self._saves = tuple((save, outgoing) for save, outgoing in pairs if outgoing is not None)
        self._saved_layers = set()

    def _open(self, start: Start) -> None:
        ring = self._settings.ring(self._settings.num_blocks(start.num_tokens))
        geometry = self._settings.geometry(ring.segment_blocks)
        if self._buffer.open(start, geometry, ring) is None:
            logger.warning("The buffer is full: the KV of %s is not handed over", start.transfer_id)
        elif start.target is not None:
            self._sender.push(start.transfer_id, start.target)

    def save_layer(self, layer_name: str) -> None:
        """The layer's copy runs beside the rest of the forward pass."""
        layer = self._layer_index.get(layer_name)
        if self._saves and layer is not None and layer not in self._saved_layers:
            self._submit(layer)

    def end_forward(self, plan: HandoverPlan) -> None:
        """Save the layers that were not saved one by one."""
        if self._saves:
            for layer in range(len(self._layer_index)):
                if layer not in self._saved_layers:
                    self._submit(layer)
            for save, outgoing in self._saves:
                if save.is_last:
                    self._buffer.seal(outgoing)
            self._saves = ()
            config = self._settings.config
            if config.send_type == "PUT" and not self._buffer.settle(config.stall_seconds):
                logger.debug("PUT: not all was sent within this step")
        for hold in plan.holds:
            if hold.held is not None and self._held is not None:
                self._held.hold(hold, hold.held)
            else:
                self._holds.append(hold)

    def take_output(self) -> StepOutput[HandoverReport]:
        """Transfers that ended, and finished requests whose blocks are not read any more."""
        self._spare_blocks()
        while self._staged:
            self._holds.append(self._staged.popleft())
        free = [hold for hold in self._holds if self._buffer.is_copied(hold.transfer_id)]
        self._holds = [hold for hold in self._holds if hold not in free]
        read = self._held.take_free() if self._held is not None else frozenset()
        released, unsent = self._buffer.take_released()
        return StepOutput(
            finished_sending=read.union(hold.request_id for hold in free),
            report=HandoverReport((), released, unsent) if released or unsent else None,
        )

    def _spare_blocks(self) -> None:
        """Nobody is in a hurry for some prompts: keep them in host memory, if it has room."""
        for hold in self._held.untouched(_HOLD_SECONDS) if self._held is not None else ():
            if hold.held is not None and self._settings.ring(len(hold.held.block_ids)).is_whole:
                self._stage(hold.transfer_id)

    def wait(self, seconds: float, *, for_room: bool) -> bool:
        is_holding = self._held is not None and not self._held.is_empty
        if not self._holds and not is_holding and not for_room:
            return False
        with self._buffer.changed:
            self._buffer.changed.wait(seconds)
        return True

    def let_go(self) -> bool:
        if self._held is not None and not self._held.end_all(_RESET, _LET_GO_SECONDS):
            return False
        return self._buffer.settle_copies(self._buffer.transfer_ids, _VACATED, _LET_GO_SECONDS)

    def close(self, seconds: float) -> None:
        if self._held is not None:
            self._held.end_all(_SHUTDOWN, seconds)
            self._held.close()
        self._saver.close(seconds)
        self._buffer.close()
        self._sender.close(seconds)

    def _submit(self, layer: int) -> None:
        self._saved_layers.add(layer)
        fence = self._copier.fence()
        for save, outgoing in self._saves:
            if save.block_ids:
                self._buffer.plan(
                    LayerSave(outgoing, layer, save.first_block, save.block_ids, fence)
                )

    # -- the control server's thread -----------------------------------------------------------

    def answer(self, peer: Peer, message: Message) -> Message | None:
        if isinstance(message, messages.Want):
            return self._wanted(peer, message)
        if isinstance(message, messages.Keep):
            self._keep(peer, message.transfer_ids)
            return messages.Done()
        if isinstance(message, messages.Forget) and self._knows(message.transfer_id):
            self._end(message.transfer_id, message.cause)
            return messages.Done()
        if self._held is None:
            return None
        if isinstance(message, messages.Show):
            return self._held.show()
        if isinstance(message, messages.HaveRead):
            return self._held.proof(peer, message)
        return None

    def _keep(self, peer: Peer, transfer_ids: Sequence[str]) -> None:
        # Two whose lines wait for blocks that each holds for the other would wait for ever.
        in_blocks = not self._has_line()
        self._buffer.keep(transfer_ids, in_blocks=in_blocks)
        if self._held is not None:
            self._held.keep(peer, transfer_ids, in_blocks=in_blocks)

    def _knows(self, transfer_id: str) -> bool:
        is_held = self._held is not None and self._held.find(transfer_id) is not None
        return is_held or self._buffer.get(transfer_id) is not None

    def _end(self, transfer_id: str, cause: Cause) -> None:
        if self._held is None or self._held.end(transfer_id, cause) is None:
            self._buffer.decline(transfer_id, cause)

    def _wanted(self, peer: Peer, want: messages.Want) -> Message:
        if self._held is not None:
            if not want.reads:
                self._held.keep(peer, (want.transfer_id,), in_blocks=True)
                self._stage(want.transfer_id)
            elif (held := self._held.wanted(peer, want)) is not None:
                return held
        found = self._buffer.find(want.transfer_id)
        if not isinstance(found, Outgoing):
            return found
        if found.start.digest != want.digest:
            return messages.Gone(OTHER_PROMPT.to_wire())
        try:
            self._sender.fetch(want.transfer_id, peer.card, want.first_block)
        except PeerError as error:
            return messages.Refused(error.cause.to_wire())
        return messages.Coming()

    def _stage(self, transfer_id: str) -> None:
        """Copy a prompt out of the blocks that hold it, to be sent in frames. While there is no
        room, it stays in them."""
        assert self._held is not None
        with self._buffer.changed:  # nobody else shall take the room, or the prompt
            hold = self._held.find(transfer_id)
            if hold is None or hold.held is None:
                return
            prompt = hold.held
            ring = self._settings.ring(len(prompt.block_ids))
            num_bytes = self._settings.geometry(ring.segment_blocks).chunk_bytes * ring.num_slots
            if not self._host_buffer.has_room(num_bytes):
                return
            self._held.take(hold)
            self._open(Start(hold.transfer_id, prompt.digest, prompt.num_tokens, None))
            outgoing = self._buffer.get(hold.transfer_id)
            if outgoing is not None:
                for layer in range(len(self._layer_index)):
                    self._buffer.plan(LayerSave(outgoing, layer, 0, prompt.block_ids, None))
                self._buffer.seal(outgoing)
            self._staged.append(hold)  # its blocks are free once they are copied
