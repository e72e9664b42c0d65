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


@dataclass(frozen=True, slots=True)
class Tail:
    """What a prompt that is handed over has behind its last full chunk: the tokens of chunk number
    ``chunk`` up to token ``end``, under a key of its own."""

    chunk: int
    end: int
    key: bytes


class RequestKeys:
    """Chunk keys of the full chunks of one request, up to what they look ahead to.

    ``tail``: of a prompt that is handed over. It may be loaded if ``loads_tail``.
    """

    def __init__(self, hasher: PrefixHasher, identity: RequestIdentity) -> None:
        self._hasher = hasher
        self.identity = identity
        self._root = self._tail = hasher.root_key(identity.root())
        self.keys: list[bytes] = []
        self.tail: Tail | None = None
        self.loads_tail = False

    @property
    def num_hashed_tokens(self) -> int:
        return len(self.keys) * self._hasher.chunk_size

    @property
    def has_extras(self) -> bool:
        return self.identity.has_extras

    def extras(self, start: int, end: int) -> bytes:
        """What beside token ids goes into a key for the tokens ``[start, end)``."""
        return self.identity.extras(start, end) if self.has_extras else b""

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
        starts = range(start, end, chunk_size) if self.has_extras else ()
        extras = [self.identity.extras(at, at + chunk_size + lookahead) for at in starts]
        self.keys += self._hasher.extend(self._tail, token_ids[start : end + lookahead], extras)
        self._tail = self.keys[-1]

    def name_tail(self, prompt: Sequence[int], *, loads: bool) -> None:
        """The prompt is handed over: its last token is computed by whoever loads the rest."""
        size, lookahead = self._hasher.chunk_size, self._hasher.lookahead
        end = len(prompt) - max(1, lookahead)
        chunk = end // size
        start, known = chunk * size, end + lookahead
        if end > start:
            key = self._hasher.tail_key(
                self.parent(chunk), prompt[start:known], self.extras(start, known)
            )
            self.tail, self.loads_tail = Tail(chunk, end, key), loads

    @property
    def loadable(self) -> list[bytes]:
        """Keys of what a load may bring, chunk by chunk; the last one may be the tail's. Of a
        request that has an answer behind its prompt those of full chunks are worth more."""
        tail = self.loaded_tail
        return self.keys if tail is None else [*self.keys[: tail.chunk], tail.key]

    def end_of(self, chunk: int) -> int:
        """The token at which a load of what is :attr:`loadable` before this chunk ends."""
        end, tail = chunk * self._hasher.chunk_size, self.loaded_tail
        return end if tail is None else min(end, tail.end)

    @property
    def loaded_tail(self) -> Tail | None:
        """Whether, and where, what is :attr:`loadable` ends with a tail."""
        tail = self.tail if self.loads_tail else None
        return tail if tail is None or self.num_hashed_tokens <= tail.end + 1 else None

    def shorten(self, num_tokens: int) -> None:
        """Forget the keys of chunks that are not whole in the first ``num_tokens``."""
        del self.keys[num_tokens // self._hasher.chunk_size :]
        self._tail = self.keys[-1] if self.keys else self._root
