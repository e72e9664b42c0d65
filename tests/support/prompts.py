"""Prompts of random tokens, which share nothing unless they have the same seed."""

from __future__ import annotations

import random

_VOCABULARY = 2000  # less than any model's here


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids for the tiny model, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(1, _VOCABULARY) for _ in range(num_tokens)]
