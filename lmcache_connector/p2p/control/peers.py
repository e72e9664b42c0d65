"""Whether two ranks can hand KV to each other, in words, and which part of it concerns them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.kv_layout.topology import RankTopology, TopologyError, all_ranks
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.errors import RefusedError

_DIGEST_CHARACTERS = 16
_MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank as it introduced itself and was admitted. ``session`` names it on the data plane."""

    card: Card
    session: bytes
    data_key: bytes


def model_digests(root: dict[str, object]) -> dict[str, str]:
    """Each part of a model's identity under its name, so that a difference can be named."""
    return {
        name: blake3(canonical_bytes(value)).hexdigest()[:_DIGEST_CHARACTERS]
        for name, value in root.items()
    }


def check_peer(own: Card, peer: Card) -> None:
    """Raises :class:`RefusedError` that says in one clause what does not fit."""
    names = sorted(
        name
        for name in own.model.keys() | peer.model.keys()
        if own.model.get(name) != peer.model.get(name)
    )
    if own.block_size != peer.block_size:
        raise RefusedError(
            f"blocks of {peer.block_size} and of {own.block_size} tokens do not fit: "
            "start both instances with the same --block-size"
        )
    if names:
        raise RefusedError(f"the models differ in {', '.join(names)}")
    if (own.num_kv_heads, own.is_mla) != (peer.num_kv_heads, peer.is_mla):
        raise RefusedError("the models differ in their KV heads")
    if sum(own.layer_counts) != sum(peer.layer_counts):
        raise RefusedError("the models differ in their layers")
    if peer.rank >= len(ranks_of(peer)):
        raise RefusedError(f"there is no rank {peer.rank} in that topology")


def ranks_of(card: Card) -> tuple[RankTopology, ...]:
    """All ranks of a peer's instance. Raises :class:`RefusedError` for an impossible topology."""
    if card.tp_size * len(card.layer_counts) > _MAX_RANKS:
        raise RefusedError(f"more than {_MAX_RANKS} ranks are not believed")
    try:
        return all_ranks(
            tp_size=card.tp_size,
            layer_counts=card.layer_counts,
            num_kv_heads=card.num_kv_heads,
            is_mla=card.is_mla,
        )
    except TopologyError as error:
        raise RefusedError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a producer rank has for a consumer rank: KV heads and layers, counted over the model."""

    heads: tuple[int, ...]
    first_layer: int
    last_layer: int

    def layers(self) -> range:
        return range(self.first_layer, self.last_layer)


def overlap(producer: RankTopology, consumer: RankTopology) -> Overlap | None:
    """``None`` if they have nothing to do with each other. Replicas are sent by one rank only."""
    heads = tuple(h for h in producer.write_shards if h in consumer.read_shards)
    first = max(producer.layer_start, consumer.layer_start)
    last = min(producer.layer_end, consumer.layer_end)
    return Overlap(heads, first, last) if heads and first < last else None


def concerned(own: RankTopology, ranks: Iterable[RankTopology], *, sends: bool) -> tuple[int, ...]:
    """The peer's ranks this one sends to (``sends``), or receives from."""
    return tuple(
        rank.rank
        for rank in ranks
        if (overlap(own, rank) if sends else overlap(rank, own)) is not None
    )
