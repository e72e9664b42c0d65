"""One rank's worker side: its memory, its ports, and the producer and consumer that use them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch

from lmcache_connector.copy_kv_blocks.copier import Copier, make_copier
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import data_ports
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.control.server import ControlServer
from lmcache_connector.p2p.control.sockets import is_of_this_machine
from lmcache_connector.p2p.data.base import Sink, Transport
from lmcache_connector.p2p.data.links import has_rdma, links
from lmcache_connector.p2p.data.nixl import NixlTransport
from lmcache_connector.p2p.data.nixl_agent import Nixl
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.memory.cache_form import form_of
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.plans import (
    OTHER_WEIGHTS,
    Drop,
    HandoverPlan,
    HandoverReport,
    RankHost,
)
from lmcache_connector.p2p.worker.consumer import Consumer
from lmcache_connector.p2p.worker.producer import Producer, Readable
from lmcache_connector.p2p.worker.role import Role
from lmcache_connector.p2p.worker.session import Dialer
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings
from lmcache_connector.plans import StepOutput
from lmcache_connector.vllm_compat.cpu_attention import ask_for_amx
from lmcache_connector.vllm_compat.loaded_weights import FixedWeights, LoadedWeights

if TYPE_CHECKING:
    from lmcache_connector.p2p.config import P2PConfig

logger = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS = 0.005


class P2PWorkerAdapter:
    """Raises ``PeerError`` if a port is taken, ``LayoutError`` for a cache it cannot serve."""

    def __init__(
        self,
        settings: P2PWorkerSettings,
        kv_caches: dict[str, torch.Tensor],
        clock: Callable[[], float] = time.monotonic,
        transports: dict[str, Transport] | None = None,
        copier: Copier | None = None,
        weights: LoadedWeights | FixedWeights | None = None,
    ) -> None:
        self._weights = weights or FixedWeights()
        config = settings.config
        paged = _describe(settings, kv_caches)
        if paged.device.type == "cpu":
            ask_for_amx()  # this instance may never compute a prompt
        pinned = paged.device.type == "cuda"
        self._is_on_cpu = paged.device.type == "cpu"
        self._settings = settings
        self._clock = clock
        self._copier = copier or make_copier(paged.device)
        self._host_buffer = HostBuffer(config.kv_buffer_size, config.overflow_bytes, pinned=pinned)
        self._nixl = None if transports else _nixl(settings, paged, self._host_buffer, clock)
        self._transports = transports or _transports(config, self._nixl, clock)
        self._roles: list[Role] = []
        self._idle = self._waits_for_room = False
        self._is_outdated = False  # the plan: it names other weights than those in memory
        self._server: ControlServer | None = None
        self._host = settings.own_host(is_of_this_machine(config.host))
        self._has_reported = False
        self._settings = settings = _linked(settings, self._nixl)
        self._dialer = Dialer(
            settings.card,
            config.secret_bytes,
            config.may_talk_to,
            self._transports,
            config.stall_seconds,
        )
        try:
            self._open(paged, kv_caches)
        except PeerError:
            self.shutdown()
            raise

    def _open(self, paged: PagedLayout, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take up the roles and listen. Raises ``PeerError``."""
        settings, config, nixl = self._settings, self._settings.config, self._nixl
        host, ports = config.bind_host or self._host, dict[str, int]()
        reads = nixl if self._is_on_cpu else None
        if nixl is not None:
            nixl.start(reads=settings.consumes, is_read=settings.produces)
        consumer: Consumer | None = None
        if settings.consumes:
            consumer = Consumer(
                settings, paged, self._copier, self._host_buffer, self._dialer, self._clock, reads
            )
            self._roles.append(consumer)
            ports = self._listen(host, consumer.receive_buffer)
        if settings.produces:
            layers = tuple(_describe(settings, kv_caches, name) for name in settings.layer_widths)
            producer = Producer(
                settings,
                layers,
                self._copier,
                self._host_buffer,
                self._dialer,
                self._clock,
                Readable(form_of(paged), reads) if reads is not None else None,
                lambda: consumer is not None and consumer.has_line,
            )
            self._roles.append(producer)
        card = msgspec.structs.replace(settings.card, transports=ports)
        self._dialer.card = card
        port = card.port + card.rank
        secret, may_be_at = config.secret_bytes, config.may_be_dialled_from
        self._server = ControlServer(host, port, card, secret, self._answer, self._clock, may_be_at)

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, plan: HandoverPlan) -> None:
        for role in self._roles:
            role.handle_preemptions(plan)

    def start_forward(self, plan: HandoverPlan) -> None:
        self._idle, self._waits_for_room = plan.idle, plan.waits_for_room
        if plan.weights_question:
            self._weights.ask(plan.weights_question)
        if plan.rank_hosts and self._server is not None:
            card = msgspec.structs.replace(self._dialer.card, rank_hosts=plan.rank_hosts)
            self._dialer.card = card
            self._server.introduce_as(card)
        heard = plan.heard_weights[self._settings.card.rank] if plan.heard_weights else None
        self._is_outdated = heard not in (None, self._weights.version)
        others = {start.transfer_id for start in plan.starts}
        others.update(save.transfer_id for save in plan.saves)
        others.update(hold.transfer_id for hold in plan.holds)
        for role in self._roles:
            role.start_forward(plan)
            if others and self._is_outdated:
                # They would have the name of the weights before.
                drops = tuple(Drop(each, OTHER_WEIGHTS) for each in sorted(others))
                role.start_forward(HandoverPlan(drops=drops))

    def save_layer(self, layer_name: str) -> None:
        for role in self._roles:
            role.save_layer(layer_name)

    def start_loads(self, plan: HandoverPlan) -> None:
        for role in self._roles:
            role.start_loads(plan)

    def end_forward(self, plan: HandoverPlan) -> None:
        if self._is_outdated:
            plan = replace(plan, holds=tuple(replace(hold, held=None) for hold in plan.holds))
        for role in self._roles:
            role.end_forward(plan)

    def finish_step(self) -> StepOutput[HandoverReport]:
        """Collect what ended. On an idle step, wait a moment for something to end: spinning would
        keep the interpreter lock from the threads it waits for."""
        if self._idle:
            for role in self._roles:
                if role.wait(_IDLE_WAIT_SECONDS, for_room=self._waits_for_room):
                    break
        output, rank = (
            _merged([role.take_output() for role in self._roles]),
            self._settings.card.rank,
        )
        report = output.report or HandoverReport()
        if (weights := self._weights.take()) is not None:
            output = replace(output, report=(report := replace(report, weights=(rank, weights))))
        if self._has_reported:
            return output
        self._has_reported = True
        start = RankHost(rank, self._host, self._holds)
        return replace(output, report=replace(report, start=start))

    @property
    def _holds(self) -> bool:
        """Whether peers can read its paged cache."""
        return self._nixl is not None and self._is_on_cpu and self._settings.produces

    @property
    def used_bytes(self) -> int:
        """KV on its way in this rank's memory."""
        return self._host_buffer.used_bytes

    def let_go(self) -> bool:
        """Copies into the cache need no waiting for: vLLM resets nothing while a request loads."""
        return all(role.let_go() for role in self._roles)

    def shutdown(self) -> None:
        """Bounded by a few times ``shutdown_seconds``."""
        seconds = self._settings.config.shutdown_seconds
        self._weights.close()
        for role in reversed(self._roles):
            role.close(seconds)
        for transport in self._transports.values():
            transport.close(seconds)
        if self._server is not None:
            self._server.close(seconds)
        self._copier.close()

    # -- peers ---------------------------------------------------------------------------------

    def _listen(self, host: str, sink: Sink) -> dict[str, int]:
        """Ports by transport."""
        settings = self._settings
        place = settings.first_rank + settings.card.rank
        ports = data_ports(settings.config.data_port, place, list(self._transports))
        return {
            name: transport.listen(host, ports[name], sink, self._key_of)
            for name, transport in self._transports.items()
        }

    def _key_of(self, session: bytes) -> bytes | None:
        peer = self._server.peer_of_session(session) if self._server is not None else None
        return peer.data_key if peer is not None else None

    def _answer(self, peer: Peer, message: Message) -> Message:
        for role in reversed(self._roles):  # a producer knows which transfers are its own
            answer = role.answer(peer, message)
            if answer is not None:
                return answer
        if isinstance(message, messages.Forget):
            return messages.Done()
        return messages.Refused.of("this instance does not play that role")


def _merged(outputs: Sequence[StepOutput[HandoverReport]]) -> StepOutput[HandoverReport]:
    """What all roles say, as one output of this rank."""
    reports = [output.report for output in outputs if output.report is not None]
    return StepOutput(
        frozenset[str]().union(*(output.finished_sending for output in outputs)),
        frozenset[str]().union(*(output.finished_recving for output in outputs)),
        HandoverReport(
            tuple(result for report in reports for result in report.loads),
            tuple(transfer_id for report in reports for transfer_id in report.released),
            tuple(unsent for report in reports for unsent in report.unsent),
        )
        if reports
        else None,
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
        name: LayerSpec(settings.num_kv_heads, settings.block_size, settings.layer_widths[name])
        for name in names
    }
    return PagedLayout.from_kv_caches({name: kv_caches[name] for name in specs}, specs)


def _nixl(
    settings: P2PWorkerSettings,
    paged: PagedLayout,
    host_buffer: HostBuffer,
    clock: Callable[[], float],
) -> Nixl | None:
    """With all memory that KV leaves from or lands in. Raises ``PeerError`` if it must be there and
    is not."""
    config = settings.config
    if config.transport == "tcp" or config.secret is None:  # peers read and write all of it
        return None
    try:
        nixl = Nixl(f"lmcache-{settings.card.rank}", clock, is_local=_is_local(config))
    except PeerError as error:
        if config.transport == "nixl":
            raise
        logger.info("KV is handed over by TCP: %s", error)
        return None
    nixl.register(*host_buffer.place)
    if paged.device.type == "cpu":
        for start, end in paged.spans.tolist():
            nixl.register(start, end - start)
    return nixl


def _is_local(config: P2PConfig) -> bool:
    """Whether NIXL is for peers on this machine only."""
    return config.is_loopback or (config.transport == "auto" and not has_rdma())


def _linked(settings: P2PWorkerSettings, nixl: Nixl | None) -> P2PWorkerSettings:
    """The card says over what this rank can read and be read."""
    if nixl is None:
        return settings
    config = settings.config
    found = links(is_local=_is_local(config), anywhere=config.transport == "nixl")
    return replace(settings, card=msgspec.structs.replace(settings.card, links=found))


def _transports(
    config: P2PConfig, nixl: Nixl | None, clock: Callable[[], float]
) -> dict[str, Transport]:
    """By name, the preferred one first."""
    transports: dict[str, Transport] = {}
    if nixl is not None:
        transports["nixl"] = NixlTransport(nixl, config.stall_seconds, clock)
    if config.transport != "nixl":
        transports["tcp"] = TcpTransport(config.stall_seconds, clock)
    return transports
