"""The input of one step of an engine that is stepped by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a :class:`ModelInput`. Counts are in tokens.

    ``blocks`` hold the KV of the first ``context_len`` of ``token_ids``; this step computes the
    rest. ``wanted_from``: first position whose hidden state the caller reads, or the sequence's
    length if none. The tokens behind ``num_prompt_tokens`` count as generated.
    """

    token_ids: tuple[int, ...]
    context_len: int
    blocks: tuple[int, ...]
    wanted_from: int
    cache_salt: str | None
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The sequences of one step, in the same order in all fields. Raises ``ValueError`` if fields
    disagree. Each field of numbers may be a tensor. If a step computes one token of a sequence,
    this counts as generated and those before it as the prompt; else all are the prompt.

    - ``token_ids``, ``[sum(seq_lens)]``: all tokens of all sequences, one sequence after the other,
      including those with KV, since a chunk's key depends on all tokens before it.
    - ``seq_lens``, ``[sequences]``: tokens of each.
    - ``query_lens``, ``[sequences]``: number of last tokens of each that this step computes. The
      sequence's blocks hold the KV of the others.
    - ``block_tables``, ``[sequences][blocks]``: token ``t`` is in block number ``t // block_size``
      of its sequence, at position ``t % block_size``. Blocks exist for all tokens.
    - ``sampling_positions``, ``[sequences][any number]``: positions in the sequence whose hidden
      states the caller reads; they are always computed. ``None``: the last one of each sequence.
      An empty tuple in place of a sequence's positions: none.
    - ``cache_salts``, ``[sequences]`` or empty: KV is shared between sequences of equal salts.
    """

    token_ids: Sequence[int]
    seq_lens: Sequence[int]
    query_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    sampling_positions: Sequence[Sequence[int]] | None = None
    cache_salts: Sequence[str | None] = ()

    def __post_init__(self) -> None:
        for name in ("token_ids", "seq_lens", "query_lens", "block_tables", "sampling_positions"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        number = len(self.seq_lens)
        salts = self.cache_salts or (None,) * number
        listed = (self.query_lens, self.block_tables, self.sampling_positions, salts)
        if any(each is not None and len(each) != number for each in listed):
            raise ValueError(f"{number} sequences, but other fields have another length")
        if len(self.token_ids) != sum(self.seq_lens):
            raise ValueError(f"{len(self.token_ids)} tokens for lengths {list(self.seq_lens)}")
        for seq_len, query_len in zip(self.seq_lens, self.query_lens, strict=True):
            if not 0 <= query_len <= seq_len:
                raise ValueError(f"{query_len} tokens to compute of a sequence of {seq_len}")
        for index, positions in enumerate(self.sampling_positions or ()):
            computed = range(self.seq_lens[index] - self.query_lens[index], self.seq_lens[index])
            if any(position not in computed for position in positions):
                raise ValueError(f"a sampling position of sequence {index} is not computed")

    def rows(self) -> Iterator[Row]:
        start = 0
        for index, seq_len in enumerate(self.seq_lens):
            context_len = seq_len - self.query_lens[index]
            last = (seq_len - 1,) if context_len < seq_len else ()
            wanted = last if self.sampling_positions is None else self.sampling_positions[index]
            yield Row(
                token_ids=tuple(self.token_ids[start : start + seq_len]),
                context_len=context_len,
                blocks=tuple(self.block_tables[index]),
                wanted_from=min(wanted, default=seq_len),
                cache_salt=self.cache_salts[index] if self.cache_salts else None,
                num_prompt_tokens=context_len if seq_len - context_len == 1 else seq_len,
            )
            start += seq_len

    def with_query_lens(self, query_lens: Sequence[int]) -> ModelInput:
        return replace(self, query_lens=tuple(query_lens))

    @property
    def num_query_tokens(self) -> int:
        """Tokens that this step computes, over all sequences."""
        return sum(self.query_lens)

    @property
    def query_token_ids(self) -> list[int]:
        """``[num_query_tokens]``: the model's input, one sequence after the other."""
        return [token for row in self.rows() for token in row.token_ids[row.context_len :]]

    @property
    def query_positions(self) -> list[int]:
        """``[num_query_tokens]``: position of each in its sequence."""
        return [p for row in self.rows() for p in range(row.context_len, len(row.token_ids))]

    def slot_mapping(self, block_size: int) -> list[int]:
        """``[num_query_tokens]``: ``block * block_size + position in the block``, for its KV."""
        return [
            row.blocks[position // block_size] * block_size + position % block_size
            for row in self.rows()
            for position in range(row.context_len, len(row.token_ids))
        ]


def _plain(values: Any) -> Any:
    """Tensors as lists, which compare as numbers do."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    if isinstance(values, list | tuple) and values and isinstance(values[0], torch.Tensor):
        return [_plain(each) for each in values]
    return values
