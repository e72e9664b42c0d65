"""Digests of a model's inputs other than token ids: multimodal items and prompt embeddings.

vLLM identifies an item by a hash, a counter or a string of the client; here its content identifies
it: the tensors given to the model. Content that is not in this process's memory (``None``, a handle
to another process's memory, a tensor on a device) has no digest.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.requests.request_fields import KNOWN_FIELDS

_ELEM_FIELDS = KNOWN_FIELDS["MultiModalFieldElem"]


class NoContentError(Exception):
    """The content is not readable in this process."""


class ItemDigests:
    """Hexadecimal digests of multimodal items, cached by object for its lifetime. vLLM's cache
    hands the same object to every request with the same item. One thread calls it.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def digest(self, item: Any) -> str:
        """``item``: a ``MultiModalKwargsItem``. Raises :class:`NoContentError`."""
        if id(item) not in self._known:
            self._known[id(item)] = item_digest(item)
            weakref.finalize(item, self._known.pop, id(item)).atexit = False
        return self._known[id(item)]

    def __len__(self) -> int:
        return len(self._known)


def item_digest(item: Any) -> str:
    """Hexadecimal digest of an item's keyword arguments for the model: names, types, values.
    Raises :class:`NoContentError` if it has no tensor, or a part that cannot be read here.
    """
    if not isinstance(item, Mapping) or "address" in item:
        raise NoContentError("the item is in another process")
    hasher = blake3()
    num_tensor_bytes = 0
    for name in sorted(item):
        elem = item[name]
        if vars(elem).keys() != _ELEM_FIELDS:
            raise NoContentError("a value has fields that this release does not know")
        _feed_plain(hasher, [name, type(elem.field).__name__])
        num_tensor_bytes += _feed(hasher, elem.data)
    if num_tensor_bytes == 0:
        raise NoContentError("the item holds no tensor")
    return hasher.hexdigest()


class EmbedsDigest:
    """Digests of prompt embeddings by token range, cached.

    ``embeds``: [tokens, hidden size], on the host. ``is_token[i]``: row i stands for a token id;
    ``None``: none. A range shorter than ``chunk_size`` tokens has the digest of the whole chunk.
    """

    def __init__(self, embeds: Any, is_token: Sequence[bool] | None, chunk_size: int) -> None:
        if embeds.device.type != "cpu":
            raise NoContentError("the embeddings are on a device")
        self._embeds = embeds
        self._is_token = is_token
        self._chunk_size = chunk_size
        self._known: dict[tuple[int, int], str] = {}

    def read(self) -> None:
        """Read all chunks ahead of :meth:`__call__`."""
        for start in range(0, len(self._embeds), self._chunk_size):
            self(start, start)

    def __call__(self, start: int, end: int) -> str:
        """Hexadecimal digest of the existing rows in ``[start, end)``."""
        end = max(end, start + self._chunk_size)
        known = self._known.get((start, end))
        if known is None:
            hasher = blake3()
            mask = None if self._is_token is None else list(map(bool, self._is_token[start:end]))
            _feed_plain(hasher, mask)
            _feed(hasher, self._embeds[start:end])
            known = self._known[(start, end)] = hasher.hexdigest()
        return known


def mask_digest(mask: Any) -> str | None:
    if mask is None:
        return None
    hasher = blake3()
    _feed(hasher, mask)
    return str(hasher.hexdigest())


def _feed(hasher: blake3, value: Any) -> int:
    """Hash a value with type and shape. Returns the number of tensor bytes in it."""
    import torch

    if isinstance(value, torch.Tensor):
        return _feed_tensor(hasher, value)
    if isinstance(value, list | tuple):
        _feed_plain(hasher, ["sequence", len(value)])
        return sum(_feed(hasher, each) for each in value)
    if value is None:
        raise NoContentError("a value is missing in this process")
    if not isinstance(value, bool | int | float | str):
        raise NoContentError(f"a {type(value).__name__} cannot be read")
    _feed_plain(hasher, [type(value).__name__, repr(value)])
    return 0


def _feed_tensor(hasher: blake3, tensor: Any) -> int:
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise NoContentError("a tensor is not in plain memory of this process")
    _feed_plain(hasher, ["tensor", str(tensor.dtype), list(tensor.shape)])
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One long call, which releases the GIL.
    hasher.update(memoryview(values.view(torch.uint8).numpy()))
    return int(values.nbytes)


def _feed_plain(hasher: blake3, value: object) -> None:
    data = canonical_bytes(value)
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)
