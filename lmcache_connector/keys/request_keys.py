"""The chunk keys of one request, extended as its tokens grow.

What makes the KV of a request unique beyond its tokens stands in :class:`RequestIdentity`: for the
whole request (salt, LoRA, weights) or for the chunks it touches (images, prompt embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_connector.keys.prefix_hash import PrefixHasher, canonical_bytes


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """An image, audio clip, ... whose placeholder tokens lie at ``[start, end)``.

    ``content_hash`` names the item and how its placeholder takes it up, ``encoder_input`` what the
    model's encoder reads of it.
    """

    content_hash: str
    start: int
    end: int
    encoder_input: str = ""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What separates the KV of this request from that of others with the same tokens.

    ``lora`` is a digest of its adapter, which vLLM knows by ``lora_number``; the number is nobody
    else's. ``weights``: their name. ``embeds_digest(start, end)`` names the prompt embeddings of a
    token range.
    """

    cache_salt: str | None = None
    lora: str | None = None
    lora_number: int = 0
    weights: str = ""
    multimodal: tuple[MultimodalSpan, ...] = ()
    embeds_digest: Callable[[int, int], str] | None = None

    @property
    def has_extras(self) -> bool:
        return bool(self.multimodal) or self.embeds_digest is not None

    def root(self) -> dict[str, object]:
        return {"salt": self.cache_salt, "lora": self.lora, "weights": self.weights}

    @property
    def kv_root(self) -> bytes:
        """What KV depends on before the first token: the root without what only separates tenants
        and resets."""
        separating = ("salt", "weights")
        return canonical_bytes({k: v for k, v in self.root().items() if k not in separating})

    @property
    def kind(self) -> str:
        """In words: plain, salted, with LoRA, images or embeddings."""
        words = {
            "LoRA": self.lora,
            "image": self.multimodal,
            "embeddings": self.embeds_digest,
            "salted": self.cache_salt,
        }
        return " and ".join(word for word, present in words.items() if present) or "plain"

    def extras(self, start: int, end: int) -> bytes:
        """What beside token ids goes into the key of the chunk of tokens ``[start, end)``.

        Offsets are relative to the chunk, as in vLLM's own block hashes, so that a span keeps its
        key wherever the prefix puts it.
        """
        spans = [
            [span.content_hash, span.start - start]
            for span in self.multimodal
            if span.start < end and span.end > start
        ]
        embeds = self.embeds_digest(start, end) if self.embeds_digest else None
        if not spans and embeds is None:
            return b""
        return canonical_bytes({"mm": spans, "embeds": embeds})


class RequestKeys:
    """Chunk keys of the full chunks of one request, up to what they look ahead to."""

    def __init__(self, hasher: PrefixHasher, identity: RequestIdentity) -> None:
        self._hasher = hasher
        self.identity = identity
        self._root = self._tail = hasher.root_key(identity.root())
        self.keys: list[bytes] = []

    @property
    def num_hashed_tokens(self) -> int:
        return len(self.keys) * self._hasher.chunk_size

    @property
    def has_extras(self) -> bool:
        return self.identity.has_extras

    def extras(self, start: int, end: int) -> bytes:
        """What beside token ids goes into a key for the tokens ``[start, end)``."""
        return self.identity.extras(start, end) if self.identity.has_extras else b""

    def parent(self, chunk: int) -> bytes:
        """What the chunk's key is chained to: it names the identity and all tokens before it."""
        return self.keys[chunk - 1] if chunk else self._root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the full chunks of ``token_ids`` (the whole request) not hashed yet."""
        start = self.num_hashed_tokens
        chunk_size, lookahead = self._hasher.chunk_size, self._hasher.lookahead
        end = self._hasher.num_chunks(len(token_ids)) * chunk_size
        if end <= start:
            return
        extras: list[bytes] = []
        if self.identity.has_extras:
            extras = [
                self.identity.extras(at, at + chunk_size + lookahead)
                for at in range(start, end, chunk_size)
            ]
        self.keys += self._hasher.extend(self._tail, token_ids[start : end + lookahead], extras)
        self._tail = self.keys[-1]

    def shorten(self, num_tokens: int) -> None:
        """Forget the keys of chunks that are not whole in the first ``num_tokens``."""
        del self.keys[num_tokens // self._hasher.chunk_size :]
        self._tail = self.keys[-1] if self.keys else self._root
