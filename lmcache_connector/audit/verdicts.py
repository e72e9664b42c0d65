"""Which hits are audited, how a difference between computed and stored KV is judged, and the
consequences.

An audit takes two measures over a chunk's layers: the *median* and the *largest* relative error.
Wrong settings, weights or inputs change most layers by about their own size. Arithmetic in another
order (another batch, number of ranks or kernel) changes all layers slightly, and now and then a
single layer with small values more. So the median has a strict limit and the largest error a wide
one; a chunk beyond either is wrong.

The limit is a few times the largest *noise*, measured while the instance runs: the error of chunks
that it computed twice itself. A floor allows for larger differences between batches, ranks or
hardware. A *prior* bounds it, and is the limit before any measurement and of narrower formats.

A mismatch separates the *root*: everything that KV depends on before the first token, i.e. the
model and the request's adapter. Salts are no part of a root: they separate tenants whose KV is the
same. Until the weights are replaced, the keys of a separated root contain a unique *nonce* in place
of the weights' name.
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
"""The number of latest noise samples that count."""
_FACTOR = 4.0
_LARGEST_TO_MEDIAN = 4.0
# Measured in bfloat16, median layer. 4 random layers: 0.002 between processes with other batches,
# 0.006 between one rank and two. 30 trained layers on text: 0 in the same batch, 0.0001 to 0.016 in
# another batch, depending on the prompt, in one process or two. So a noise of zero says nothing of
# the next batch, and it matters little which instance computed the chunk.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class _Format:
    """``step``: relative rounding step of an element, or of the type that computed it."""

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
_OPAQUE = _Format(prior=0.7, step=0.06)  # roots of shares of differing bytes: 1/2, 4 in a thousand


@dataclass(frozen=True, slots=True)
class ChunkError:
    """Relative L2 errors of one chunk over all ranks. ``layers``: number and error of each layer,
    the larger error of its two halves."""

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
    """Combine all ranks' differences into errors relative to the larger of both chunks, so that an
    all-zero chunk has an error of 1. Raises ``ValueError`` without any difference."""
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
    """The result of an audit. The values are metric labels."""

    MATCH = "match"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"


class NoiseGauge:
    """Measures the noise of this model's arithmetic on this machine, and sets the limits.

    ``formats``: storage format of each layer; the coarsest one decides.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        self.learn_formats(formats)
        self._samples: deque[ChunkError] = deque(maxlen=KEPT_SAMPLES)

    def learn_formats(self, formats: Sequence[str]) -> None:
        """Set the formats that the ranks report, before any verdict."""
        found = [_FORMATS.get(name, _OPAQUE) for name in formats]
        self._prior = max(each.prior for each in found)
        self._step = max(each.step for each in found)

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def judge(self, error: ChunkError, *, is_own: bool) -> Verdict:
        """``is_own``: this instance computed the stored chunk. A match then is a noise sample."""
        limit = self.limit()
        if error.median > limit or error.largest > _LARGEST_TO_MEDIAN * limit:
            return Verdict.MISMATCH
        if is_own:
            self._samples.append(error)
        return Verdict.MATCH

    def limit(self) -> float:
        """Limit of the median error; the largest error may be four times as high."""
        if not self._samples:
            return self._prior
        noise = max(max(s.median, s.largest / _LARGEST_TO_MEDIAN) for s in self._samples)
        return min(self._prior, max(_STEPS * self._step, _FACTOR * noise))


MAX_SUBJECTS = 4096
"""Only the latest subjects are remembered; a forgotten one counts as never audited."""
MAX_FIRST_TRIES = 4
"""How often a first audit is tried, until one has a verdict."""


class AuditSampler:
    """Audits hits of each *subject* (a kind of hit: ``AuditSubject``) until one has a verdict, or
    ``MAX_FIRST_TRIES`` had none, then ``share`` of all hits. A share of 0 turns all audits off.
    ``random()`` returns a number in ``[0, 1)``.
    """

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        self.share = share
        self._random = random
        # Tries left, oldest first; 0: done, or given up.
        self._first: Latest[Hashable, int] = Latest(MAX_SUBJECTS)
        self._open: set[Hashable] = set()

    def wants(self, subject: Hashable) -> bool:
        """Whether to audit this hit; only by chance while an audit of the subject is open."""
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
        """Audits in progress will have no verdict."""
        self._open.clear()

    def forget(self) -> None:
        self._first.clear()
        self._open.clear()


MAX_ROOTS = 4096
"""Limit of roots remembered one by one, as an engine may meet any number of adapters."""


class RootEpochs:
    """What the keys of each root contain now: ``name``, the name of the weights, or a nonce.
    ``new_nonce()`` returns a unique string.

    Remembers up to ``MAX_ROOTS`` separated roots; beyond that, all roots are separated.
    """

    def __init__(self, new_nonce: Callable[[], str]) -> None:
        self.name = ""
        self._new_nonce = new_nonce
        self._nonces: dict[bytes, str] = {}
        self._nonce_of_all = ""

    def epoch(self, root: bytes) -> str:
        return self._nonces.get(root) or self._nonce_of_all or self.name

    def separate(self, root: bytes) -> None:
        """KV loaded under the root may be wrong: give the root new keys."""
        self._nonces[root] = self._new_nonce()
        if len(self._nonces) > MAX_ROOTS:
            self._nonces.clear()
            self._nonce_of_all = self._new_nonce()

    def rename(self, name: str) -> None:
        """The weights have changed: all roots start over."""
        self.name = name
        self._nonces.clear()
        self._nonce_of_all = ""

    def num_apart(self) -> int:
        """Number of roots not shared; at least 1 if new roots would not be."""
        return len(self._nonces) or int(bool(self._nonce_of_all))
