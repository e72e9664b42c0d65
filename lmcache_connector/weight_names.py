"""The name of an engine's weights, determined by what its ranks have in memory.

::

             start, reset, a call that may change weights        all ranks have read them
    (known) ------------------------------------------> unknown ------------------------> known

At start the files name the weights, so that engines of all parallel sizes share KV. Later, the same
bytes keep their name, and other bytes are named by their digests, so that engines updated alike
share KV. While the name is unknown, nothing is stored or loaded.

Files may change while they are loaded. So this host remembers which digest in memory belongs to
the files; weights with another digest are named by that digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from blake3 import blake3

from lmcache_connector.bounded import Latest
from lmcache_connector.change_count import ReadCount
from lmcache_connector.errors import ConfigError
from lmcache_connector.keys.file_digests import content_name
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.plans import WeightsInMemory

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 1.0
_ASKED_SECONDS = 10.0
_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """An engine's weight files. ``name``: a digest of ``files``, or a substitute; "" without
    either."""

    name: str
    files: tuple[Path, ...] = ()

    @property
    def have_code(self) -> bool:
        """Whether the model has code of its own: equal bytes in memory do not tell that the code is
        the same."""
        return any(file.suffix == ".py" for file in self.files)

    def changed_since(self, seconds: float) -> Path | None:
        """A file, or a link or folder on its path, that was written, replaced or renamed after
        ``seconds`` since 1970. Of files that a Hugging Face cache names by content, the folder is
        checked. A folder also counts as renamed if entries of it and of its parent have changed."""
        named = (file.parent if _is_named_by_content(file) else file for file in self.files)
        places = sorted({place for file in named for place in _on_the_way_to(file)})
        return next((place for place in places if _has_changed(place, seconds)), None)


class WeightNames:
    """``name``: of the weights, "" while unknown. ``question``: goes with the next plan; 0: none.
    ``asks_again``: the next plan asks ranks for reports that may be lost. ``acked``: the reported
    version of each rank's weights. ``kept``: digests in memory at earlier starts on this host, by a
    digest of how they were loaded; ``keep`` adds to them without waiting for the disk.

    ``read_label()``: the user's name for the weights after an update; raises ``ConfigError`` if it
    is unreadable. Unlike digests, a label tells that engines of different parallel sizes have the
    same weights.
    """

    def __init__(
        self,
        world_size: int,
        files: WeightFiles,
        kept: Mapping[str, str],
        keep: Callable[[Mapping[str, str]], object],
        read_label: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self.name = ""
        self.question = 0
        self.asks_again = False
        self.acked = (-1,) * world_size
        self._counts = [ReadCount("")] * world_size
        self._files = files
        self._kept = kept
        self._keep = keep
        self._read_label = read_label
        self._clock = clock
        self._ranks: dict[int, WeightsInMemory] = {}
        self._num_questions = 0
        self._asked_until = 0.0
        self._ask_again_at = clock() + _ASKED_SECONDS
        self._give_up_at: float | None = None
        self._is_external = False  # an external reset happened since the weights were named
        self._names: Latest[str, str] = Latest(_MAX_NAMES)  # by digest, of the latest weights
        self._digest_before = ""  # at the last external reset
        self._label = ""
        self._label = self._new_label = self._read()  # a label at start names no update

    def ask_again(self) -> None:
        """A request needs reports that have not come. If the ranks were asked long ago, ask again:
        a user who steps the engine may have interrupted it between a step and vLLM's update from
        it, which workers in other processes do not notice."""
        now = self._clock()
        if now >= self._ask_again_at:
            self._ask_again_at = now + _ASKED_SECONDS
            self.question, self.asks_again = self._num_questions, True

    def is_awaited(self) -> bool:
        """Whether a request should wait for the name; after a moment it is computed instead."""
        now = self._clock()
        if self._give_up_at is None:
            self._give_up_at = now + _WAIT_SECONDS
        return now < self._give_up_at

    @property
    def is_asked_for(self) -> bool:
        """Whether ranks were asked recently and have not answered, so that steps must go on."""
        return not self.name and self._clock() < self._asked_until

    def reset(self, *, is_external: bool) -> None:
        """vLLM's prefix cache was reset: the weights may have changed. ``is_external``: the reset
        included this connector; only then is the label read."""
        self._num_questions += 1
        self.question, self.name = self._num_questions, ""
        self._asked_until = self._ask_again_at = self._clock() + _ASKED_SECONDS
        self._is_external |= is_external
        if is_external:
            self._new_label = self._read()

    def watch(self, rank: int, place: str) -> None:
        """``place``: of the rank's :class:`ChangeCount`."""
        self._counts[rank] = ReadCount(place)

    def are_unchanged(self) -> bool:
        """Whether no call may have changed any rank's weights since its last report. False if
        unknown."""
        return all(
            count.is_there and count.number == version
            for count, version in zip(self._counts, self.acked, strict=True)
        )

    def take_question(self) -> int:
        question, self.question = self.question, 0
        return question

    def take_asks_again(self) -> bool:
        asks_again, self.asks_again = self.asks_again, False
        return asks_again

    def learn(self, rank: int, weights: WeightsInMemory) -> bool:
        """Process a rank's report. Returns whether KV computed since its previous report may belong
        to other weights than the name says."""
        version = self.acked[rank]
        self._ranks[rank] = weights
        self.acked = (*self.acked[:rank], weights.version, *self.acked[rank + 1 :])
        is_doubtful = bool(self.name) and (weights.digest is None or weights.version != version)
        if is_doubtful:
            self.name = ""
        return is_doubtful

    def settle(self, configuration: object) -> bool:
        """Name the weights if all ranks have read them. ``configuration``: further settings that
        affect how files are loaded. Returns whether there is a name."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        have_answered = len(ranks) == len(self.acked) and all(
            each.digest is not None and each.answered >= self._num_questions for each in ranks
        )
        if have_answered and not self.name:
            self._give_up_at = None
            self._name(ranks, configuration)
        return bool(self.name)

    # -- details -------------------------------------------------------------------------------

    def _name(self, ranks: list[WeightsInMemory], configuration: object) -> None:
        digest, why = _hex([each.digest for each in ranks]), ""
        are_visible = all(each.is_visible for each in ranks)
        if not self._names and all(each.first_digest is not None for each in ranks):
            first = self._digest_before = _hex([each.first_digest for each in ranks])
            self._names[first], why = self._first_name(first, ranks, configuration)
        if digest not in self._names:
            self._names[digest] = self._name_of_bytes(digest)
            why = f"the weights in memory {'have changed' if are_visible else 'cannot be read'}"
        if why:
            same = "only with instances of the same memory:... name"
            others = same if are_visible else "with no other instance"
            logger.warning("lmcache-connector: %s: KV is shared %s", why, others)
        if self._is_external:
            self._relabel(digest)
        self.name = self._names[digest]
        logger.info("lmcache-connector: weights %s", self.name)

    def _name_of_bytes(self, digest: str) -> str:
        of_code = _hex([self._files.name, digest]) if self._files.have_code else digest
        return f"memory:{of_code}"

    def _relabel(self, digest: str) -> None:
        """Apply a new label if the weights have changed since the last external reset."""
        self._is_external = False
        before, self._digest_before = self._digest_before, digest
        if digest == before or self._new_label == self._label:
            return
        self._label = self._new_label
        if self._names[digest].startswith("memory:"):
            self._names[digest] = f"label:{_hex([self._files.name, self._label])}"
            logger.warning("lmcache-connector: the weights are named by label: %r", self._label)

    def _first_name(
        self, digest: str, ranks: list[WeightsInMemory], configuration: object
    ) -> tuple[str, str]:
        """The name at start, and why it is not that of the files."""
        own, files = self._name_of_bytes(digest), self._files.name
        if not files:
            return own, ""
        key = ""
        if all(each.is_visible for each in ranks):
            key = _hex([files, configuration, [each.form for each in ranks]])
            if self._kept.get(key, digest) != digest:
                return own, "at earlier starts, the same files gave other weights in memory"
            if key in self._kept and not self._files.have_code:
                return files, ""  # the bytes are as before, whatever has changed on disk
        loaded_after = min(each.loaded_after for each in ranks)
        if (changed := self._files.changed_since(loaded_after)) is not None:
            remedy = "restart without such a change to name the weights by their files"
            return own, f"{changed} changed while the weights were loaded, or later ({remedy})"
        if key:
            self._keep({key: digest})
        return files, ""

    def _read(self) -> str:
        try:
            return self._read_label()
        except ConfigError as error:
            logger.error("%s. The weights get no new label.", error)
            return self._label


def _hex(value: object) -> str:
    return str(blake3(canonical_bytes(value)).hexdigest())


# -- files that change while they are loaded -------------------------------------------------------


def _on_the_way_to(file: Path) -> Iterator[Path]:
    """The file, the folders above it, and everything its links pass through."""
    for place in (file.absolute(), *file.absolute().parents):
        yield place
        if place.is_symlink():
            target = place.parent / place.readlink()
            yield from _on_the_way_to(target)


def _is_named_by_content(file: Path) -> bool:
    try:
        return content_name(file) is not None
    except OSError:
        return False


def _has_changed(place: Path, seconds: float) -> bool:
    """A folder's mtime and ctime both change when entries do. Renaming it changes its ctime and its
    parent's mtime."""
    try:
        found = place.lstat()
        if found.st_ctime <= seconds or not S_ISDIR(found.st_mode):
            return found.st_ctime > seconds
        above = (place / "..").lstat()
    except OSError:
        return True
    if above.st_dev != found.st_dev:  # a mount point, or a subvolume of Btrfs
        return found.st_mtime <= seconds
    is_root = above.st_ino == found.st_ino
    return above.st_mtime > seconds and not is_root
