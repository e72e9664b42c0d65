"""Chunk keys: a chained BLAKE3 over token ids, the same in every process and on every host.

::

    key_0 = H(root)                    root: everything that makes all KV of a request unique
    key_i = H(key_{i-1} || tokens of chunk i as little-endian u32 || extras of chunk i)

``key_0`` stands before the first chunk; chunk ``i`` (from 0) is named by ``key_{i+1}``. The tokens
of a chunk have a fixed length, so where extras begin is never ambiguous. With a secret, BLAKE3 runs
keyed: nobody without it can guess or forge a key.

Where KV follows from later tokens too, those are among the tokens of the chunk: of a drafter that
reads one token ahead, chunk ``i`` is named by its own tokens and the first of chunk ``i + 1``.

The tail of a prompt that is handed over has fewer tokens than a chunk. Its name stands in a domain
of its own, and holds their number.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence

from blake3 import blake3

CHUNK_KEY_BYTES = 32
"""Keys are never shortened, so nobody finds two chunks with the same one."""
FORMAT_VERSION = 1
IDENTITY_VERSION = 2
"""Of what is in a root: engines of two versions share nothing. 2: weights are named by what is in
memory."""

_ROOT_CONTEXT = "lmcache-connector 2026-11 chunk key root v1"
_SECRET_CONTEXT = "lmcache-connector 2026-11 chunk key secret v1"
# Stands where the key of a chunk has a parent, which is a hash as well: no two are equal.
_TAIL_DOMAIN = blake3(derive_key_context="lmcache-connector 2026-11 tail key v1").digest()


class PrefixHasher:
    """Makes the chunk keys of one model on one instance.

    ``model_root`` names what all requests share (namespace, model fingerprint, ...): a mapping of
    plain JSON values. ``secret`` may have any length; ``None`` leaves BLAKE3 unkeyed. The KV of a
    token follows from ``lookahead`` tokens after it, too.
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
        self._secret = (
            blake3(secret, derive_key_context=_SECRET_CONTEXT).digest() if secret else None
        )
        form = {
            "format": FORMAT_VERSION,
            "identity": IDENTITY_VERSION,
            "chunk_size": chunk_size,
            "model": dict(model_root),
        }
        self._model_root = canonical_bytes(form | ({"lookahead": lookahead} if lookahead else {}))

    def root_key(self, request_root: Mapping[str, object]) -> bytes:
        """``key_0`` of a request: its salt, its LoRA identity, its weights' name, ..."""
        hasher = blake3(derive_key_context=_ROOT_CONTEXT)
        hasher.update(len(self._model_root).to_bytes(8, "little"))
        hasher.update(self._model_root)
        hasher.update(canonical_bytes(request_root))
        return self._digest(hasher.digest())

    def root_digest(self, request_root: Mapping[str, object]) -> str:
        """Twelve hex digits that are equal where ``key_0`` is, and do not tell it."""
        return str(blake3(self.root_key(request_root)).hexdigest(length=6))

    def extend(
        self, parent: bytes, token_ids: Sequence[int], extras: Sequence[bytes] = ()
    ) -> Iterator[bytes]:
        """Keys of the full chunks in ``token_ids``, the first of which follows ``parent``.

        ``extras[i]`` belongs to the i-th of these chunks; missing ones are empty. Tokens past the
        last full chunk and its lookahead are ignored. Raises ``OverflowError`` for an id outside
        u32.
        """
        num_chunks = self.num_chunks(len(token_ids))
        packed = _little_endian_u32(token_ids[: num_chunks * self.chunk_size + self.lookahead])
        step, width = 4 * self.chunk_size, 4 * (self.chunk_size + self.lookahead)
        key = parent
        for index in range(num_chunks):
            chunk = packed[index * step : index * step + width]
            extra = extras[index] if index < len(extras) else b""
            key = self._digest(key + chunk + extra)
            yield key

    def tail_key(self, parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """The key of a tail that follows ``parent``: of all ``token_ids`` but those that are only
        looked ahead to. ``extra``: of the same tokens. Raises ``OverflowError`` as above."""
        count = (len(token_ids) - self.lookahead).to_bytes(4, "little")
        return self._digest(_TAIL_DOMAIN + parent + count + _little_endian_u32(token_ids) + extra)

    def num_chunks(self, num_tokens: int) -> int:
        """The chunks of so many tokens that can be named."""
        return max(0, num_tokens - self.lookahead) // self.chunk_size

    def _digest(self, data: bytes) -> bytes:
        if self._secret is None:
            return bytes(blake3(data).digest())
        return bytes(blake3(data, key=self._secret).digest())


def canonical_bytes(value: object) -> bytes:
    """One byte string per plain JSON value: sorted keys, no spaces. Raises ``TypeError`` else."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _little_endian_u32(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if ids.itemsize != 4:  # pragma: no cover - no platform vLLM runs on
        raise RuntimeError("this platform has no 32-bit array type")
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids.tobytes()
