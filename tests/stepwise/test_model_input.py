"""The input of a step: its derived fields, and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.stepwise.model_input import ModelInput

# Two sequences: of the first, 3 of 5 tokens are there.
BOTH: dict[str, Any] = {
    "token_ids": (1, 2, 3, 4, 5, 7, 8, 9),
    "seq_lens": (5, 3),
    "query_lens": (2, 3),
    "block_tables": ((6, 4), (1,)),
}


def test_derived_fields() -> None:
    both = ModelInput(**BOTH)
    assert both.query_token_ids == [4, 5, 7, 8, 9]
    assert both.query_positions == [3, 4, 0, 1, 2]
    assert both.slot_mapping(4) == [6 * 4 + 3, 4 * 4 + 0, 4, 5, 6]
    assert [row.wanted_from for row in both.rows()] == [4, 2]


def test_shorter_queries() -> None:
    left = ModelInput(**BOTH).with_query_lens((1, 0))
    assert (left.num_query_tokens, left.query_token_ids) == (1, [5])
    assert [row.context_len for row in left.rows()] == [4, 3]


def test_unsampled_rows() -> None:
    rows = ModelInput(**BOTH, sampling_positions=((), (1, 2))).rows()
    assert [row.wanted_from for row in rows] == [5, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": (1, 2)},
        {"query_lens": (6, 3)},
        {"query_lens": (-1, 3)},
        {"query_lens": (2,)},
        {"block_tables": ((6, 4),)},
        {"sampling_positions": ((1,), ())},
        {"sampling_positions": ((), (3,))},
        {"sampling_positions": ((),)},
        {"sampling_positions": ()},
        {"cache_salts": ("a",)},
    ],
)
def test_sequences_that_disagree_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sequence|tokens"):
        ModelInput(**(BOTH | wrong))
