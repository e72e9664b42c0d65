"""One rank's worker side: its memory, its ports, and the producer and consumer that use them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from lmcache_connector.copy_kv_blocks.copier import Copier, make_copier
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout
from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress, data_ports
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.messages import Card, Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.control.server import ControlServer
from lmcache_connector.p2p.data.base import Transport
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.plans import HandoverPlan, HandoverReport
from lmcache_connector.p2p.worker.consumer import Consumer
from lmcache_connector.p2p.worker.host_buffer import HostBuffer
from lmcache_connector.p2p.worker.producer import Producer, ProducerSettings
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBufferSettings
from lmcache_connector.plans import StepOutput
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import ask_for_amx

if TYPE_CHECKING:
    from lmcache_connector.p2p.config import P2PConfig

logger = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class P2PWorkerSettings:
    """``card`` without its transports, which are known once they listen. ``geometry``: this rank's
    part of one block. ``layer_widths``: content bytes of a token and KV head, by layer name.
    ``first_rank``: ranks of data-parallel engines before this one."""

    config: P2PConfig
    card: Card
    own: RankTopology
    geometry: ChunkGeometry
    layer_widths: dict[str, int]
    num_kv_heads: int
    max_blocks: int
    produces: bool
    consumes: bool
    first_rank: int = 0


class P2PWorkerAdapter:
    """Raises ``PeerError`` if a port is taken, ``LayoutError`` for a cache it cannot serve."""

    def __init__(
        self,
        settings: P2PWorkerSettings,
        kv_caches: dict[str, torch.Tensor],
        clock: Callable[[], float] = time.monotonic,
        transports: dict[str, Transport] | None = None,
        copier: Copier | None = None,
    ) -> None:
        config = settings.config
        self._settings = settings
        paged = _describe(settings, kv_caches)
        if paged.device.type == "cpu":
            ask_for_amx()  # this instance may never compute a prompt
        pinned = paged.device.type == "cuda"
        self._copier = copier or make_copier(paged.device)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        host_buffer = self._host_buffer = HostBuffer(
            config.kv_buffer_size, config.overflow_bytes, pinned=pinned
        )
        self._transports = transports or _transports(config, paged.device, clock)
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._idle = self._waits_for_room = False
        if settings.consumes:
            self._consumer = Consumer(
                ReceiveBufferSettings(
                    settings.own, settings.geometry, settings.max_blocks, config.lease_seconds
                ),
                paged,
                self._copier,
                host_buffer,
                self._connect,
                config.unknown_grace_seconds,
                clock,
            )
        if settings.produces:
            self._producer = Producer(
                self._producer_settings(),
                tuple(_describe(settings, kv_caches, name) for name in settings.layer_widths),
                self._copier,
                host_buffer,
                self._connect,
                self._transports,
                clock,
            )
        self._server: ControlServer | None = None
        try:
            self._open_ports(config.bind_host or config.host)
        except PeerError:
            self.shutdown()
            raise

    def _open_ports(self, host: str) -> None:
        settings = self._settings
        self._card = msgspec.structs.replace(settings.card, transports=self._listen(host))
        self._server = ControlServer(
            self._context,
            host,
            settings.card.port + settings.card.rank,
            self._card,
            settings.config.secret_bytes,
            self._answer,
        )

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, plan: HandoverPlan) -> None:
        if self._producer is not None:
            self._producer.handle_preemptions(plan)

    def start_forward(self, plan: HandoverPlan) -> None:
        self._idle, self._waits_for_room = plan.idle, plan.waits_for_room
        if self._producer is not None:
            self._producer.start_forward(plan)

    def start_loads(self, plan: HandoverPlan) -> None:
        if self._consumer is not None:
            self._consumer.start_loads(plan)

    def save_layer(self, layer_name: str) -> None:
        if self._producer is not None:
            self._producer.save_layer(layer_name)

    def end_forward(self, plan: HandoverPlan) -> None:
        if self._producer is not None:
            self._producer.finish_saves(plan)

    def finish_step(self) -> StepOutput[HandoverReport]:
        """Collect what ended. On an idle step, wait a moment for something to end: spinning would
        keep the interpreter lock from the threads it waits for."""
        if self._idle:
            self._wait()
        loads = self._consumer.take_results() if self._consumer is not None else []
        sent: frozenset[str] = frozenset()
        released: tuple[str, ...] = ()
        unsent: tuple[tuple[str, str], ...] = ()
        if self._producer is not None:
            sent = self._producer.take_released_holds()
            released, unsent = self._producer.send_buffer.take_released()
        report = None
        if loads or released or unsent:
            results = tuple(result for _, result in loads)
            report = HandoverReport(self._settings.own.rank, results, released, unsent)
        return StepOutput(
            finished_sending=sent,
            finished_recving=frozenset(load.request_id for load, _ in loads),
            invalid_block_ids=frozenset(
                block for load, result in loads for block in load.block_ids[result.num_blocks :]
            ),
            report=report,
        )

    def _wait(self) -> None:
        if self._consumer is not None and self._consumer.receive_buffer.num_waiting:
            self._consumer.wait_for_result(_IDLE_WAIT_SECONDS)
        elif self._producer is not None:
            self._producer.wait(_IDLE_WAIT_SECONDS, for_room=self._waits_for_room)

    @property
    def used_bytes(self) -> int:
        """KV on its way in this rank's memory."""
        return self._host_buffer.used_bytes

    def shutdown(self) -> None:
        """Bounded by a few times ``shutdown_seconds``."""
        seconds = self._settings.config.shutdown_seconds
        if self._producer is not None:
            self._producer.close(seconds)
        if self._consumer is not None:
            self._consumer.close(seconds)
        for transport in self._transports.values():
            transport.close(seconds)
        if self._server is not None:
            self._server.close(seconds)
        self._context.destroy(linger=0)
        self._copier.close()

    # -- peers ---------------------------------------------------------------------------------

    def _connect(self, address: PeerAddress) -> ControlClient:
        config = self._settings.config
        if not config.may_talk_to(address):
            raise PeerError(f"{address} is not among the peers this instance may talk to")
        return ControlClient(
            self._context, address, self._card, config.secret_bytes, config.stall_seconds
        )

    def _listen(self, host: str) -> dict[str, int]:
        """Ports by transport, for ranks that receive."""
        if self._consumer is None:
            return {}
        settings = self._settings
        place = settings.first_rank + settings.card.rank
        ports = data_ports(settings.config.data_port, place, list(self._transports))
        return {
            name: transport.listen(host, ports[name], self._consumer.receive_buffer, self._key_of)
            for name, transport in self._transports.items()
        }

    def _key_of(self, session: bytes) -> bytes | None:
        peer = self._server.peer_of_session(session) if self._server is not None else None
        return peer.data_key if peer is not None else None

    def _answer(self, peer: Peer, message: Message) -> Message:
        for side in (self._producer, self._consumer):
            if side is not None and (answer := side.answer(peer, message)) is not None:
                return answer
        if isinstance(message, messages.Forget):
            return messages.Done()
        return messages.Refused("this instance does not play that role")

    def _producer_settings(self) -> ProducerSettings:
        settings, config = self._settings, self._settings.config
        one = settings.geometry
        return ProducerSettings(
            own=settings.own,
            geometry=lambda num_blocks: replace(one, num_tokens=num_blocks * one.num_tokens),
            block_size=one.num_tokens,
            layer_names=tuple(settings.layer_widths),
            lease_seconds=config.lease_seconds,
            stall_seconds=config.stall_seconds,
            checksum=config.checksum,
            waits=config.send_type == "PUT",
        )


def _describe(
    settings: P2PWorkerSettings, kv_caches: dict[str, torch.Tensor], only: str | None = None
) -> PagedLayout:
    """The cache in canonical order, or one layer of it.

    Blocks travel as they are, whatever order the attention backend gives them inside: peers are
    admitted only if theirs is the same.
    """
    names = settings.layer_widths if only is None else (only,)
    specs = {
        name: LayerSpec(
            settings.num_kv_heads, settings.geometry.num_tokens, settings.layer_widths[name]
        )
        for name in names
    }
    return PagedLayout.from_kv_caches({name: kv_caches[name] for name in specs}, specs)


def _transports(
    config: P2PConfig, device: torch.device, clock: Callable[[], float]
) -> dict[str, Transport]:
    """By name, the preferred one first."""
    transports: dict[str, Transport] = {}
    if config.transport != "tcp" and device.type == "cuda":
        from lmcache_connector.p2p.data.process_group import ProcessGroupTransport

        transports["nccl"] = ProcessGroupTransport("nccl", device, config.stall_seconds, clock)
    if config.transport == "nccl" and not transports:
        raise PeerError(f"NCCL needs a GPU, and the KV cache is on {device}")
    if config.transport != "nccl":
        transports["tcp"] = TcpTransport(config.stall_seconds, clock)
    return transports
