"""Chunk keys: a chained BLAKE3 over token ids, equal in every process and on every host.

::

    key_0     = H(root)                root: all that KV depends on besides tokens and extras
    key_{i+1} = H(key_i || tokens of chunk i as little-endian u32 || extras of chunk i)

Chunk ``i`` (from 0) is named by ``key_{i+1}``. A chunk's tokens have a fixed length, so the start
of the extras is unambiguous. With a secret, BLAKE3 is keyed, and nobody without it can guess or
forge a key.

If KV depends on later tokens too, these are among the chunk's tokens: with a drafter that reads one
token ahead, chunk ``i`` is named by its own tokens and the first of chunk ``i + 1``.

The tail of a prompt that is transferred has fewer tokens than a chunk. Its key is in a separate
domain, and depends on the number of tokens.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from blake3 import blake3

CHUNK_KEY_BYTES = 32
"""Nobody can find collisions, even if the last byte is a part's number: see ``part_key``."""
FORMAT_VERSION = 1
IDENTITY_VERSION = 2
"""Version of the root's content: engines of different versions share nothing. 2: weights are named
by what is in memory."""

_ROOT_CONTEXT = "lmcache-connector 2026-11 chunk key root v1"
_SECRET_CONTEXT = "lmcache-connector 2026-11 chunk key secret v1"
# Takes the place of a chunk key's parent. Being a hash itself, it equals no parent.
_TAIL_DOMAIN = blake3(derive_key_context="lmcache-connector 2026-11 tail key v1").digest()


class PrefixHasher:
    """Makes the chunk keys of one model on one instance.

    ``model_root``: what all requests share (namespace, model fingerprint, ...), a mapping of plain
    JSON values. ``secret``: any length; BLAKE3 is unkeyed if it is ``None`` or empty.
    ``lookahead``: number of later tokens that the KV of a token depends on.
    """

    def __init__(
        self,
        model_root: Mapping[str, object],
        chunk_size: int,
        secret: bytes | None = None,
        *,
        lookahead: int = 0,
    ) -> None:
        if chunk_size <= 0:
            raise ValueError(f"chunk_size must be positive, not {chunk_size}")
        self.chunk_size = chunk_size
        self.lookahead = lookahead
        self._hash: Callable[[bytes], Any] = blake3
        if secret:
            key = blake3(secret, derive_key_context=_SECRET_CONTEXT).digest()
            self._hash = partial(blake3, key=key)
        form = {
            "format": FORMAT_VERSION,
            "identity": IDENTITY_VERSION,
            "chunk_size": chunk_size,
            "model": dict(model_root),
        }
        self._model_root = canonical_bytes(form | ({"lookahead": lookahead} if lookahead else {}))

    def root_key(self, request_root: Mapping[str, object]) -> bytes:
        """``key_0`` of a request: its salt, LoRA digest, name of the weights, ..."""
        hasher = blake3(derive_key_context=_ROOT_CONTEXT)
        hasher.update(len(self._model_root).to_bytes(8, "little"))
        hasher.update(self._model_root)
        hasher.update(canonical_bytes(request_root))
        return bytes(self._hash(hasher.digest()).digest())

    def root_digest(self, request_root: Mapping[str, object]) -> str:
        """Twelve hex digits that identify ``key_0`` without revealing it."""
        return str(blake3(self.root_key(request_root)).hexdigest(length=6))

    def extend(
        self, parent: bytes, token_ids: Sequence[int], extras: Sequence[bytes] = ()
    ) -> Iterator[bytes]:
        """Keys of the full chunks in ``token_ids``; the first chunk follows ``parent``.

        ``extras[i]``: of the i-th chunk, empty if missing. Tokens behind the last full chunk and
        its lookahead are ignored. Raises ``OverflowError`` for an id outside u32.
        """
        num_chunks = self.num_chunks(len(token_ids))
        packed = _little_endian_u32(token_ids[: num_chunks * self.chunk_size + self.lookahead])
        step, width = 4 * self.chunk_size, 4 * (self.chunk_size + self.lookahead)
        key = parent
        for index in range(num_chunks):
            chunk = packed[index * step : index * step + width]
            extra = extras[index] if index < len(extras) else b""
            key = self._hash(key + chunk + extra).digest()
            yield key

    def tail_key(self, parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """Key of a tail that follows ``parent``. ``token_ids`` end with the lookahead; ``extra``
        covers the same tokens. Raises ``OverflowError`` like `extend`."""
        count = (len(token_ids) - self.lookahead).to_bytes(4, "little")
        tokens = _little_endian_u32(token_ids)
        return bytes(self._hash(_TAIL_DOMAIN + parent + count + tokens + extra).digest())

    def num_chunks(self, num_tokens: int) -> int:
        """Number of chunks that have a key, given ``num_tokens``."""
        return max(0, num_tokens - self.lookahead) // self.chunk_size


def canonical_bytes(value: object) -> bytes:
    """Unique bytes of a plain JSON value. Raises ``TypeError`` or ``ValueError`` for others."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _little_endian_u32(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if ids.itemsize != 4:  # pragma: no cover - no platform vLLM runs on
        raise RuntimeError("this platform has no 32-bit array type")
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids.tobytes()
