"""Who a peer is, whether it can exchange KV with this rank, and which part of the KV."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.kv_layout.topology import RankTopology, TopologyError, all_ranks
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.errors import RefusedError
from lmcache_connector.p2p.reasons import Reason

_DIGEST_CHARACTERS = 16
_MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank as it introduced itself and was admitted. ``session`` names it on the data plane."""

    card: Card
    session: bytes
    data_key: bytes


def model_digests(root: dict[str, object]) -> dict[str, str]:
    """Digests of the parts of a model's identity by name, so that a difference can be named."""
    return {
        name: blake3(canonical_bytes(value)).hexdigest()[:_DIGEST_CHARACTERS]
        for name, value in root.items()
    }


def check_peer(own: Card, peer: Card) -> None:
    """Raises :class:`RefusedError`, which says in one clause what does not fit."""
    names = sorted(
        name
        for name in own.model.keys() | peer.model.keys()
        if own.model.get(name) != peer.model.get(name)
    )
    if own.block_size != peer.block_size:
        raise _mismatch(
            f"blocks of {peer.block_size} and of {own.block_size} tokens do not fit: "
            "start both instances with the same --block-size"
        )
    if names:
        raise _mismatch(f"the models differ in {', '.join(names)}")
    if (own.num_kv_heads, own.is_mla) != (peer.num_kv_heads, peer.is_mla):
        raise _mismatch("the models differ in their KV heads")
    if sum(own.layer_counts) != sum(peer.layer_counts):
        raise _mismatch("the models differ in their layers")
    num_ranks = len(ranks_of(peer))
    if peer.rank >= num_ranks or len(peer.rank_hosts) not in (0, num_ranks):
        raise _mismatch(f"there is no rank {peer.rank} in that topology")


def ranks_of(card: Card) -> tuple[RankTopology, ...]:
    """All ranks of a peer's instance. Raises :class:`RefusedError` for an impossible topology."""
    if card.tp_size * len(card.layer_counts) > _MAX_RANKS:
        raise _mismatch(f"more than {_MAX_RANKS} ranks are not believed")
    try:
        return all_ranks(
            tp_size=card.tp_size,
            layer_counts=card.layer_counts,
            num_kv_heads=card.num_kv_heads,
            is_mla=card.is_mla,
        )
    except TopologyError as error:
        raise _mismatch(str(error)) from error


def _mismatch(text: str) -> RefusedError:
    return RefusedError(text, Reason.MISMATCH)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a producer rank has for a consumer rank: KV heads and layers, counted over the model."""

    heads: tuple[int, ...]
    first_layer: int
    last_layer: int

    def layers(self) -> range:
        return range(self.first_layer, self.last_layer)


def overlap(producer: RankTopology, consumer: RankTopology) -> Overlap | None:
    """``None`` if the producer has nothing for the consumer. One rank alone sends a replica."""
    heads = tuple(h for h in producer.write_shards if h in consumer.read_shards)
    first = max(producer.layer_start, consumer.layer_start)
    last = min(producer.layer_end, consumer.layer_end)
    return Overlap(heads, first, last) if heads and first < last else None
