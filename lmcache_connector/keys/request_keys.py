"""The chunk keys of one request, extended as its tokens grow.

:class:`RequestIdentity` holds what makes a request's KV unique beyond its tokens: for the whole
request (salt, LoRA, weights), or for some chunks (images, prompt embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_connector.keys.prefix_hash import PrefixHasher, canonical_bytes


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """An image, audio clip, ... whose placeholder tokens lie at ``[start, end)``.

    ``content_hash`` names the item and its placeholder's length and mask. ``encoder_input`` names
    the item's input to the model's encoder.
    """

    content_hash: str
    start: int
    end: int
    encoder_input: str = ""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What separates this request's KV from that of others with the same tokens.

    ``lora``: name of its adapter, by content; ``lora_number``: vLLM's number for the adapter.
    ``weights``: their name. ``embeds_digest(start, end)``: digest of a range's prompt embeddings.
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
        """The root without the weights' name and the salt: a salt separates tenants, not KV."""
        separating = ("salt", "weights")
        return canonical_bytes({k: v for k, v in self.root().items() if k not in separating})

    @property
    def kind(self) -> str:
        """For display: plain, salted, with LoRA, image or embeddings."""
        words = {
            "LoRA": self.lora,
            "image": self.multimodal,
            "embeddings": self.embeds_digest,
            "salted": self.cache_salt,
        }
        return " and ".join(word for word, present in words.items() if present) or "plain"

    def extras(self, start: int, end: int) -> bytes:
        """What a chunk key covers besides the tokens ``[start, end)``. Offsets are relative to the
        chunk, as in vLLM's block hashes: the same image gives the same extras after any prefix.
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
    """The end of a transferred prompt, from the last chunk border before its last token: tokens of
    chunk ``chunk`` up to, but not including, token ``end``, under a key of its own."""

    chunk: int
    end: int
    key: bytes


class RequestKeys:
    """Keys of the full chunks of one request, considering the lookahead. ``tail``: of a prompt that
    is transferred; it may be loaded if ``loads_tail``."""

    def __init__(self, hasher: PrefixHasher, identity: RequestIdentity) -> None:
        self._hasher = hasher
        self.identity = identity
        self._root = hasher.root_key(identity.root())
        self.keys: list[bytes] = []
        self.tail: Tail | None = None
        self.loads_tail = False

    @property
    def num_hashed_tokens(self) -> int:
        return len(self.keys) * self._hasher.chunk_size

    def parent(self, chunk: int) -> bytes:
        """The key that the chunk's key is chained to."""
        return self.keys[chunk - 1] if chunk else self._root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the new full chunks of ``token_ids``, which are all tokens of the request."""
        start = self.num_hashed_tokens
        chunk_size, lookahead = self._hasher.chunk_size, self._hasher.lookahead
        end = self._hasher.num_chunks(len(token_ids)) * chunk_size
        if end <= start:
            return
        starts = range(start, end, chunk_size) if self.identity.has_extras else ()
        extras = [self.identity.extras(at, at + chunk_size + lookahead) for at in starts]
        parent = self.parent(len(self.keys))
        self.keys += self._hasher.extend(parent, token_ids[start : end + lookahead], extras)

    def name_tail(self, prompt: Sequence[int], *, loads: bool) -> None:
        """Name the tail of a transferred prompt, whose last token the receiver computes."""
        size, lookahead = self._hasher.chunk_size, self._hasher.lookahead
        end = len(prompt) - max(1, lookahead)
        chunk = end // size
        start, known = chunk * size, end + lookahead
        if end > start:
            key = self._hasher.tail_key(
                self.parent(chunk), prompt[start:known], self.identity.extras(start, known)
            )
            self.tail, self.loads_tail = Tail(chunk, end, key), loads

    @property
    def loadable(self) -> list[bytes]:
        """Keys of loadable chunks; the last may be the tail's. Once a chunk with generated tokens
        is full, the keys of full chunks are used instead of the tail's."""
        tail = self.loaded_tail
        return self.keys if tail is None else [*self.keys[: tail.chunk], tail.key]

    def end_of(self, chunk: int) -> int:
        """The token at which a load of the :attr:`loadable` chunks before this one ends."""
        end, tail = chunk * self._hasher.chunk_size, self.loaded_tail
        return end if tail is None else min(end, tail.end)

    @property
    def loaded_tail(self) -> Tail | None:
        """The tail at the end of :attr:`loadable`, if any."""
        tail = self.tail if self.loads_tail else None
        return tail if tail is None or self.num_hashed_tokens <= tail.end + 1 else None

    def shorten(self, num_tokens: int) -> None:
        """Forget keys of chunks that are incomplete in the first ``num_tokens``."""
        del self.keys[num_tokens // self._hasher.chunk_size :]
