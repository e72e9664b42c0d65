"""The messages of the control plane, and how they are packed.

::

    packet  =  magic 4s | version u16 | sequence u64 | tag 32s | length u32 |
               body (msgpack, one message)

All versions keep this head, so that a peer of another version is recognised and told so.
``sequence`` grows with every message of a session; ``tag`` authenticates the packet once a session
has a key (see :mod:`handshake`), and is zero before. ``length`` is that of the body, and bounded
before a byte of it is received.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import MAX_WIRE_CHARACTERS, Cause, Reason

VERSION = 3
MAX_BODY_BYTES = 1 << 18
TAG_BYTES = 32
NONCE_BYTES = 32

_MAGIC = b"LMP2"
_HEAD = struct.Struct(f"<4sHQ{TAG_BYTES}sI")
HEAD_BYTES = _HEAD.size
MAX_KEPT = 256
"""Transfers that one :class:`Keep` names."""
MAX_BLOCK_IDS = 1 << 15
"""Blocks of the largest prompt that :class:`Held` describes: they fit into one message."""

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Tag = Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Words = Annotated[str, Meta(max_length=MAX_WIRE_CHARACTERS)]
"""A :class:`Cause`: ``WORD: TEXT``."""
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 16)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Host = Annotated[str, Meta(min_length=1, max_length=253)]
_Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
_BlockIds = Annotated[tuple[_Count, ...], Meta(max_length=MAX_BLOCK_IDS)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Card(Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank introduces itself. ``model``: digests of what makes its KV unique, by name.

    ``host`` and ``port`` are those of the instance (rank 0). ``rank_hosts``: of all ranks, where
    they are on several machines. ``transports`` maps the transports this rank can receive by to
    their ports. ``links``: see :func:`lmcache_connector.p2p.data.links.links`.
    """

    engine_id: _Name
    host: _Name
    port: _Port
    rank: _Count
    model: Annotated[dict[_Name, _Name], Meta(max_length=64)]
    block_size: _Count
    tp_size: _Size
    layer_counts: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=256)]
    num_kv_heads: _Size
    is_mla: bool
    transports: Annotated[dict[_Name, _Port], Meta(max_length=8)]
    rank_hosts: Annotated[tuple[_Host, ...], Meta(max_length=4096)] = ()
    links: Annotated[tuple[_Name, ...], Meta(max_length=8)] = ()

    def address_of(self, rank: int) -> PeerAddress:
        """Where a rank of this instance takes control messages. Raises ``AddressError``."""
        host = self.rank_hosts[rank] if rank < len(self.rank_hosts) else self.host
        return PeerAddress(host, self.port + rank)

    @property
    def address(self) -> PeerAddress:
        """Of this rank. Raises ``AddressError``."""
        return self.address_of(self.rank)


class Hello(_Message, frozen=True):
    """First message of a client. ``host`` and ``port``: whom it dialled, so that nobody between the
    two can lead it elsewhere."""

    nonce: _Nonce
    card: Card
    host: _Host
    port: _Port


class Welcome(_Message, frozen=True):
    """The server introduces itself and proves that it knows the secret."""

    nonce: _Nonce
    card: Card
    proof: _Tag


class Prove(_Message, frozen=True):
    """The client proves the same."""

    proof: _Tag


class Admitted(_Message, frozen=True):
    """From here on every packet carries a tag. ``session`` names it on the data plane."""

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Refused(_Message, frozen=True):
    """No, and why. Also the answer to what cannot be understood."""

    reason: _Words

    @classmethod
    def of(cls, text: str, reason: Reason = Reason.REFUSED) -> Refused:
        return cls(Cause(reason, text).to_wire())

    @property
    def cause(self) -> Cause:
        return Cause.from_wire(self.reason, Reason.REFUSED)


class Offer(_Message, frozen=True):
    """Producer to consumer: KV of a prompt is coming. ``digest`` names the prompt."""

    transfer_id: _Name
    digest: _Digest
    num_tokens: _Count


class Accepted(_Message, frozen=True):
    """There is room; frames carry this ticket.

    No frame may cross a multiple of ``segment_blocks``, or hold blocks past the first
    ``num_blocks``: for those there is no room yet.
    """

    ticket: Annotated[int, Meta(ge=1, lt=1 << 62)]
    num_blocks: _Count
    segment_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]


class More(_Message, frozen=True):
    """Producer to consumer: is there room for further blocks?"""

    ticket: Annotated[int, Meta(ge=1, lt=1 << 62)]


class Room(_Message, frozen=True):
    """The first ``num_blocks`` blocks may be sent by now."""

    num_blocks: _Count


class Busy(_Message, frozen=True):
    """There is no room now: offer it again later."""


class Settled(_Message, frozen=True):
    """The consumer does not need it any more."""


class Want(_Message, frozen=True):
    """Consumer to producer: a request waits for this, from block ``first_block`` on. ``reads``: it
    can be read where it lies."""

    transfer_id: _Name
    digest: _Digest
    first_block: _Count
    reads: bool = False


class Coming(_Message, frozen=True):
    """It is here or being computed, and is sent to the rank that asked."""


class LayerForm(Struct, frozen=True, forbid_unknown_fields=True):
    """A layer of a paged cache: its address, sizes and strides in bytes."""

    address: _Address
    num_heads: _Size
    token_bytes: _Size
    row_stride: _Address
    head_stride: _Address
    token_stride: _Address


class CacheForm(Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's paged cache. Rows and blocks in tokens, layers in the model's order."""

    row_tokens: _Size
    block_size: _Size
    num_blocks: _Count
    layers: Annotated[tuple[LayerForm, ...], Meta(min_length=1, max_length=1024)]


class Show(_Message, frozen=True):
    """Consumer to producer: how can your cache be read?"""


class Shown(_Message, frozen=True):
    """Like this. ``metadata``: NIXL's, which opens all of the memory to who has it."""

    metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 17)]
    form: CacheForm


class Held(_Message, frozen=True):
    """It lies in these blocks of the producer's cache, from ``first_block`` on, and stays there."""

    block_ids: _BlockIds


class HaveRead(_Message, frozen=True):
    """Consumer to producer: this rank has read what it wanted, from ``first_block`` on."""

    transfer_id: _Name
    first_block: _Count


class Proof(_Message, frozen=True):
    """The blocks held it until now. ``digests``: of what was read, layer by layer; none where the
    producer makes none."""

    digests: Annotated[
        tuple[Annotated[bytes, Meta(min_length=8, max_length=32)], ...], Meta(max_length=1024)
    ]


class Sent(_Message, frozen=True):
    """All of it has left here already."""


class Unknown(_Message, frozen=True):
    """The producer has never heard of it."""


class Gone(_Message, frozen=True):
    """It will not come."""

    reason: _Words

    @property
    def cause(self) -> Cause:
        return Cause.from_wire(self.reason)


class Forget(_Message, frozen=True):
    """In either direction: this transfer is over, free its memory."""

    transfer_id: _Name
    reason: _Words

    @property
    def cause(self) -> Cause:
        return Cause.from_wire(self.reason)


class Keep(_Message, frozen=True):
    """Consumer to producer: requests for these are waiting in line. Renews their leases."""

    transfer_ids: Annotated[tuple[_Name, ...], Meta(max_length=MAX_KEPT)]


class Done(_Message, frozen=True):
    """Understood."""


Message = (
    Hello
    | Welcome
    | Prove
    | Admitted
    | Refused
    | Offer
    | Accepted
    | More
    | Room
    | Busy
    | Settled
    | Want
    | Coming
    | Show
    | Shown
    | Held
    | HaveRead
    | Proof
    | Sent
    | Unknown
    | Gone
    | Forget
    | Keep
    | Done
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Head:
    """A packet whose ``num_bytes`` of body are still to come."""

    sequence: int
    tag: bytes
    num_bytes: int

    def with_body(self, body: bytes) -> Packet:
        return Packet(self.sequence, self.tag, body)


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet taken apart. ``signed``: the bytes its tag covers."""

    sequence: int
    tag: bytes
    body: bytes

    @property
    def signed(self) -> bytes:
        return self.sequence.to_bytes(8, "little") + self.body


class ProtocolError(PeerError):
    """Not a message of this protocol."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Reason.PROTOCOL)


def encode(message: Message | Card) -> bytes:
    return _encoder.encode(message)


def pack(sequence: int, body: bytes, tag: bytes = bytes(TAG_BYTES)) -> bytes:
    return _HEAD.pack(_MAGIC, VERSION, sequence, tag, len(body)) + body


def unpack_head(data: bytes) -> Head:
    """Parses ``HEAD_BYTES`` bytes. Raises :class:`ProtocolError`, with words the peer may hear."""
    magic, version, sequence, tag, num_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("these bytes are not of this protocol")
    if version != VERSION:
        raise ProtocolError(f"you speak version {version} of the protocol, I speak {VERSION}")
    if num_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a message of {num_bytes} bytes is not one of this protocol")
    return Head(sequence, tag, num_bytes)


def decode(body: bytes) -> Message:
    """Raises :class:`ProtocolError`."""
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {str(error)[:200]}") from error
    return message
