"""What the scheduler side and the worker sides of one engine exchange, once per step."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.plans import WeightsInMemory

OTHER_WEIGHTS = Cause(Reason.RESET, "its weights may be others")


@dataclass(frozen=True, slots=True)
class Start:
    """A hand-over begins at the producer.

    ``digest`` names the prompt with everything that makes its KV unique. ``target``: the
    instance it is pushed to; ``None``: it waits until a consumer wants it.
    """

    transfer_id: str
    digest: bytes
    num_tokens: int
    target: PeerAddress | None


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a prompt that this step completes, layer by layer.

    ``block_ids[i]`` holds block ``first_block + i`` of the prompt. ``is_last``: no more follow.
    """

    transfer_id: str
    first_block: int
    block_ids: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """A prompt that stays in the paged cache until it is read there. ``digest``: see
    :class:`Start`. ``block_ids``: of all of it."""

    digest: bytes
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandoverHold:
    """A finished request whose blocks wait until its saves have been copied, or until what is
    ``held`` in them has been read."""

    request_id: str
    transfer_id: str
    held: HeldPrompt | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """A hand-over that will not be finished. The consumer is told the cause."""

    transfer_id: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class HandoverLoad:
    """Fill blocks ``first_block`` and on of a prompt from a hand-over.

    ``block_ids[i]`` takes block ``first_block + i``. ``source``: the producer's rank 0.
    """

    request_id: str
    transfer_id: str
    digest: bytes
    num_tokens: int
    source: PeerAddress
    first_block: int
    block_ids: tuple[int, ...]
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will want a hand-over waits in line: its lease is to be renewed until the
    request's load or release."""

    transfer_id: str
    source: PeerAddress


@dataclass(frozen=True, slots=True)
class Release:
    """The consumer does not need a hand-over; its producer may forget it."""

    transfer_id: str
    source: PeerAddress


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """One step of all ranks. ``announced``: transfers whose requests wait to be computed.
    ``vacated``: transfers whose blocks vLLM takes back before this step (preemption).
    ``cancelled_loads``: by request. ``idle``: no forward pass runs. ``waits_for_room``: a prompt
    is not begun because the buffers are full. ``reset``: let go of all prompts that are held.
    ``rank_hosts``: where the ranks of this instance
    listen, told once, if they are on several machines. ``weights_question``, ``heard_weights``: see
    :class:`StepPlan`."""

    announced: tuple[str, ...] = ()
    starts: tuple[Start, ...] = ()
    saves: tuple[Save, ...] = ()
    holds: tuple[HandoverHold, ...] = ()
    drops: tuple[Drop, ...] = ()
    vacated: tuple[str, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    loads: tuple[HandoverLoad, ...] = ()
    cancelled_loads: tuple[str, ...] = ()
    releases: tuple[Release, ...] = ()
    idle: bool = False
    waits_for_room: bool = False
    reset: bool = False
    rank_hosts: tuple[str, ...] = ()
    weights_question: int = 0
    heard_weights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """``num_blocks`` of the load's blocks arrived, from its first on. ``cause``: why not all.

    ``seconds`` since vLLM asked. ``wire_bytes`` came within ``wire_seconds``, perhaps earlier.
    """

    request_id: str
    num_blocks: int
    seconds: float
    wire_bytes: int = 0
    wire_seconds: float = 0.0
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank listens. ``holds``: peers can read its paged cache."""

    rank: int
    host: str
    holds: bool = False


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """One rank's news. ``released``: transfers whose memory is free again. ``unsent``: those of
    them that reached nobody, or not whole, with the reason. ``start``: in the first report.
    ``weights``: of a rank, if there is something to tell of them."""

    loads: tuple[HandoverResult, ...] = ()
    released: tuple[str, ...] = ()
    unsent: tuple[tuple[str, Reason], ...] = ()
    start: RankHost | None = None
    weights: tuple[int, WeightsInMemory] | None = None
