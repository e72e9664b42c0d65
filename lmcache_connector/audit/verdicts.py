"""Which hits are audited, what a difference between computed and stored KV means, and what follows.

Two measures are taken of a chunk's layers: the *median* and the *largest* relative error. Wrong
settings, weights or inputs change most layers by about their own size. Arithmetic in another order
(another batch, another number of ranks, another kernel) changes each a little, now and then a
single layer a little more: one whose values are small. So the median has the strict limit and the
largest a wide one, and a chunk that is beyond either is wrong.

The limit comes from *noise*, which this instance measures as it runs: chunks that it computed
itself, and computes again. A few times the largest noise is the limit. It has a floor, since what
was computed in another batch, with other ranks or on other hardware may differ by more. Until
anything is measured, a prior holds that wrong settings exceed many times.

A mismatch separates its *root*: what KV depends on before the first token, the model and a
request's adapter. Salts are no part of a root, they separate tenants whose KV is the same. A
separated root has a *nonce* in place of the weights' name, which nobody else will ever have, until
the weights are replaced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from lmcache_connector.bounded import Latest
from lmcache_connector.plans import LayerDifference

KEPT_SAMPLES = 32
"""Noise samples that count: the latest ones."""
_FACTOR = 4.0
_LARGEST_TO_MEDIAN = 4.0
# Measured in bfloat16, median layer. 4 random layers: 0.002 between processes with other batches,
# 0.006 between one rank and two. 30 trained layers on text: 0 computed again in the same batch,
# 0.0001 to 0.016 in another, by the prompt, and the same in one process as in two. So zeros say
# nothing of the next batch, and whose chunk it is says little.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class _Format:
    """``step``: relative rounding step of an element, or of what it was computed with."""

    prior: float
    step: float


_WIDE = _Format(prior=0.1, step=2.0**-8)  # computed in bfloat16, mostly
_FORMATS = {
    "float32": _WIDE,
    "float16": _WIDE,
    "bfloat16": _WIDE,
    "float8_e4m3fn": _Format(prior=0.25, step=2.0**-4),
    "float8_e5m2": _Format(prior=0.25, step=2.0**-3),
    "int8": _Format(prior=0.25, step=2.0**-5),
}
_OPAQUE = _Format(prior=0.7, step=0.06)  # half of the bytes differ; of a few in a thousand


@dataclass(frozen=True, slots=True)
class ChunkError:
    """Relative L2 errors of one chunk over all ranks.

    ``layers``: number and error of each layer, the larger one of its halves.
    """

    layers: tuple[tuple[int, float], ...]

    @property
    def largest(self) -> float:
        return max(error for _, error in self.layers)

    @property
    def median(self) -> float:
        return median(error for _, error in self.layers)

    def __str__(self) -> str:
        worst = max(self.layers, key=lambda layer: layer[1])
        return (
            f"relative error {self.median:.2g} (median of {len(self.layers)} layers), "
            f"at most {worst[1]:.2g} (layer {worst[0]})"
        )


def combine(differences: Iterable[LayerDifference]) -> ChunkError:
    """Of all ranks' differences. Relative to the larger of both chunks, so that zeros in one of
    them are an error of 1. Raises ``ValueError`` without any."""
    sums: dict[tuple[int, int], list[float]] = {}
    for found in differences:
        total = sums.setdefault((found.layer, found.half), [0.0, 0.0, 0.0])
        total[0] += found.difference
        total[1] += found.computed
        total[2] += found.stored
    if not sums:
        raise ValueError("nothing was compared")
    layers: dict[int, float] = {}
    for (layer, _), (difference, computed, stored) in sums.items():
        error = _relative(difference, max(computed, stored))
        layers[layer] = max(error, layers.get(layer, 0.0))
    return ChunkError(tuple(sorted(layers.items())))


def _relative(difference: float, whole: float) -> float:
    if difference == 0:
        return 0.0
    if not (math.isfinite(difference) and math.isfinite(whole)) or whole == 0:
        return math.inf
    return math.sqrt(difference / whole)


class Verdict(Enum):
    """What an audit found. The values are labels of the metric."""

    MATCH = "match"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"


class NoiseGauge:
    """The noise of this model's arithmetic on this machine, and the limits that follow.

    ``formats``: how the elements of each layer are stored; the coarsest one decides.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        self.learn_formats(formats)
        self._samples: deque[ChunkError] = deque(maxlen=KEPT_SAMPLES)

    def learn_formats(self, formats: Sequence[str]) -> None:
        """Of all ranks, once they are known better. Before anything is judged."""
        found = [_FORMATS.get(name, _OPAQUE) for name in formats]
        self._prior = max(each.prior for each in found)
        self._step = max(each.step for each in found)

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def judge(self, error: ChunkError, *, is_own: bool) -> Verdict:
        """``is_own``: this instance computed the stored chunk too. Such a chunk is a sample of
        noise, unless it is beyond the limit."""
        limit = self.limit()
        if error.median > limit or error.largest > _LARGEST_TO_MEDIAN * limit:
            return Verdict.MISMATCH
        if is_own:
            self._samples.append(error)
        return Verdict.MATCH

    def limit(self) -> float:
        """Of the median layer's error; the largest may be four times that."""
        if not self._samples:
            return self._prior
        noise = max(max(s.median, s.largest / _LARGEST_TO_MEDIAN) for s in self._samples)
        return min(self._prior, max(_STEPS * self._step, _FACTOR * noise))


MAX_SUBJECTS = 4096
"""Answered or tried, the latest ones. One that is forgotten counts as never audited."""
MAX_FIRST_TRIES = 4
"""A first audit that ends without an answer is tried again so often."""


class AuditSampler:
    """Audits one hit per *subject* until that has an answer, then ``share`` of all hits.

    A share of 0 switches all of it off. ``random()`` returns a number in ``[0, 1)``.
    """

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        self.share = share
        self._random = random
        # Tries left, oldest first; 0: answered, or given up.
        self._first: Latest[Hashable, int] = Latest(MAX_SUBJECTS)
        self._open: set[Hashable] = set()

    def wants(self, subject: Hashable) -> bool:
        """Whether to audit this hit. While one of the subject is under way, only by chance."""
        if self.share <= 0:
            return False
        if subject not in self._open and self._first.get(subject, MAX_FIRST_TRIES) > 0:
            return True
        return self._random() < self.share

    def begin(self, subject: Hashable) -> None:
        self._open.add(subject)

    def end(self, subject: Hashable, *, is_answered: bool) -> None:
        self._open.discard(subject)
        tries = self._first.get(subject, MAX_FIRST_TRIES)
        self._first[subject] = 0 if is_answered else max(0, tries - 1)

    def abandon(self) -> None:
        """What is under way will have no answer."""
        self._open.clear()

    def forget(self) -> None:
        """All subjects count as never audited."""
        self._first.clear()
        self._open.clear()


MAX_ROOTS = 4096
"""Remembered one by one. An engine may meet any number of adapters."""


class RootEpochs:
    """``name``: of the weights. ``new_nonce()`` returns a string that nobody else will ever get.

    Remembers one entry per root that is apart, ``MAX_ROOTS`` at most: with more, all are.
    """

    def __init__(self, new_nonce: Callable[[], str]) -> None:
        self.name = ""
        self._new_nonce = new_nonce
        self._nonces: dict[bytes, str] = {}
        self._nonce_of_all = ""

    def epoch(self, root: bytes) -> str:
        return self._nonces.get(root) or self._nonce_of_all or self.name

    def separate(self, root: bytes) -> None:
        """What was loaded under the root may be wrong: it gets new keys."""
        self._nonces[root] = self._new_nonce()
        if len(self._nonces) > MAX_ROOTS:
            self._nonces.clear()
            self._nonce_of_all = self._new_nonce()

    def rename(self, name: str) -> None:
        """The weights are others: nothing is known of any root."""
        self.name = name
        self._nonces.clear()
        self._nonce_of_all = ""

    def num_apart(self) -> int:
        """Roots that are not shared, at least 1 if new ones would not be."""
        return len(self._nonces) or int(bool(self._nonce_of_all))
