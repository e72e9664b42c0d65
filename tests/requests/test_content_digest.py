"""The digest of a multimodal item: names, types, shapes and bytes of the model's input."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

from lmcache_connector.requests import content_digest
from lmcache_connector.requests.content_digest import ItemDigests, NoContentError, item_digest


def item(field: Any = None, **values: Any) -> MultiModalKwargsItem:
    field = field or MultiModalBatchedField()
    return MultiModalKwargsItem({k: MultiModalFieldElem(v, field) for k, v in values.items()})


PIXELS = torch.arange(12, dtype=torch.float32)


def test_equal_content_in_other_order_and_memory_is_equal() -> None:
    strided = torch.stack([PIXELS, PIXELS], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert item_digest(item(a=PIXELS, b=1)) == item_digest(item(b=1, a=strided))
    flat = MultiModalFlatField(slices=[slice(0, 3)]), MultiModalFlatField(slices=[slice(3, 6)])
    assert item_digest(item(flat[0], a=PIXELS)) == item_digest(item(flat[1], a=PIXELS))


def test_any_difference_is_another_item() -> None:
    changed = PIXELS.clone()
    changed[11] += 1
    items = [
        item(a=PIXELS),
        item(b=PIXELS),
        item(a=changed),
        item(a=PIXELS.reshape(3, 4)),
        item(a=PIXELS.view(torch.int32)),
        item(a=PIXELS, b=1),
        item(a=PIXELS, b=1.0),
        item(a=PIXELS, b=True),
        item(a=PIXELS, b="1"),
        item(a=[PIXELS]),
        item(a=[PIXELS[:6], PIXELS[6:]]),
        item(a=[[PIXELS[:6]], PIXELS[6:]]),
        item(a=PIXELS.to(torch.bfloat16)),
        item(MultiModalFlatField(slices=[]), a=PIXELS),
        item(a=torch.tensor(3.0)),
    ]
    assert len(set(map(item_digest, items))) == len(items)


@pytest.mark.parametrize(
    "missing",
    [
        None,
        item(),
        item(a=None),
        item(a=[PIXELS, None]),
        item(address=8, monotonic_id=1, signature=[1, 2]),
        item(grid=[1, 2]),
        item(a=torch.empty(0)),
        item(a=PIXELS.to("meta")),
        item(a=object()),
        item(a=PIXELS.to_sparse()),
    ],
)
def test_absent_content_has_no_digest(missing: Any) -> None:
    """A handle to shared memory, for one: its digest would be that of an address."""
    with pytest.raises(NoContentError):
        item_digest(missing)


def test_each_object_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    def counted(wanted: Any) -> str:
        reads.append(None)
        return item_digest(wanted)

    monkeypatch.setattr(content_digest, "item_digest", counted)
    digests, one = ItemDigests(), item(a=PIXELS)
    assert digests.digest(one) == digests.digest(one)
    assert len(reads) == 1
    other = item(a=PIXELS + 1)
    assert digests.digest(other) != digests.digest(one)
    assert (len(reads), len(digests)) == (2, 2)
    del one, other
    gc.collect()
    assert len(digests) == 0, "no other object may inherit its place in memory and its digest"
