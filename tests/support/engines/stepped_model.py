"""A small transformer over a paged KV cache, and an engine that steps it by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmcache_connector.stepwise.connector import Agree, LMCacheConnector
from lmcache_connector.stepwise.model_input import ModelInput, Row

LAYERS, HEADS, HEAD_DIM, VOCABULARY, BLOCK = 3, 2, 16, 97, 16


class SteppedModel(nn.Module):
    """Called with a ``ModelInput`` and the caches, it writes the KV of the query tokens to their
    slots, and returns ``[num_query_tokens, hidden]``."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        torch.manual_seed(seed)
        hidden = HEADS * HEAD_DIM
        self.config = {"hidden": hidden}
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(4096, hidden)
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(LAYERS))
        self.eval()

    @torch.no_grad()
    def forward(self, model_input: ModelInput, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self._row(row, kv_caches) for row in model_input.rows()])

    def _row(self, row: Row, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        places = torch.arange(row.context_len, len(row.token_ids))
        hidden = self.embed(torch.tensor(row.token_ids)[places]) + self.positions(places)
        blocks = torch.tensor(row.blocks)
        mask = places[:, None] >= torch.arange(len(row.token_ids))[None]
        for cache, qkv, out in zip(kv_caches, self.qkv, self.out, strict=True):
            q, k, v = qkv(hidden).view(len(places), 3, HEADS, HEAD_DIM).unbind(1)
            for half, new in zip(cache, (k, v), strict=True):
                half[blocks[places // BLOCK], places % BLOCK] = new.to(half.dtype)
            keys, values = (
                half[blocks].flatten(0, 1)[: len(row.token_ids)].float().transpose(0, 1)
                for half in cache
            )
            found = nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), keys, values, attn_mask=mask
            )
            attended = self.dropout(out(found.transpose(0, 1).flatten(1)))
            hidden = torch.tanh(hidden + attended)
        return hidden


class SteppedEngine:
    """One connector, one model and its caches. ``config`` and ``agree``: the connector's."""

    def __init__(
        self,
        config: Mapping[str, Any],
        num_blocks: int = 64,
        model: nn.Module | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.model = model if model is not None else SteppedModel()
        shape = (2, num_blocks, BLOCK, HEADS, HEAD_DIM)
        self.kv_caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        defaults = {"chunk_size": 32, "cpu_gib": 0.05, "compute_or_load": "always"}
        self.connector = LMCacheConnector(0, 0, defaults | dict(config), agree)

    def __enter__(self) -> SteppedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def step(self, model_input: ModelInput) -> tuple[Any, ModelInput]:
        """Hidden states of what was computed, or ``None``, and the input that was still left."""
        hidden, bypass, left = self.connector.recv_kv_caches_and_hidden_states(
            self.model, model_input, self.kv_caches
        )
        if not bypass:
            hidden = self.model(left, self.kv_caches)
        self.connector.send_kv_caches_and_hidden_states(self.model, left, self.kv_caches, hidden)
        return hidden, left

    def kv_of(self, blocks: Sequence[int], num_tokens: int) -> torch.Tensor:
        """``[layers, 2, num_tokens, heads, head_dim]``."""
        return torch.stack(
            [cache[:, list(blocks)].flatten(1, 2)[:, :num_tokens] for cache in self.kv_caches]
        )


def sequence(tokens: Sequence[int], blocks: Sequence[int], **more: Any) -> ModelInput:
    """One sequence of which nothing has been computed yet."""
    return ModelInput(tuple(tokens), (len(tokens),), (len(tokens),), (tuple(blocks),), **more)
