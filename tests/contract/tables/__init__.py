"""All that the connector uses of vLLM and of LMCache, by the package's name in `versions`.

Below a module stand the names used of it, each in one line, which an indent continues::

    Class: member member            fields and methods that are used
    Class abstract: method          what whoever derives from it must have, and we do
    Class.method(parameter, ...)    what we call it with
    Class.method <- parameter, ...  what it calls ours with, where we override it

``since 0.32`` behind a name: the first version that has it. Below ``late``, importing a module has
effects: it is read from sources only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.contract import Use

_LINE = re.compile(
    r"(?P<name>[\w.]+)(?: since (?P<since>[\d.]+))?"
    r"(?:\((?P<passes>.*)\)| <-(?P<takes>.*)| abstract:(?P<abstract>.*)|: (?P<members>.*))?"
)


def _read(file: str) -> Iterator[Use]:
    text, module, is_late = (Path(__file__).parent / file).read_text(), "", False
    for line in re.sub(r"\n {8}", " ", text).splitlines():
        if line == "late":
            is_late = True
        elif line.startswith("    "):
            found = _LINE.fullmatch(line.strip())
            assert found is not None, line
            passes, takes, abstract, members = (
                tuple(re.findall(r"\w+", value)) if value is not None else None
                for value in found.group("passes", "takes", "abstract", "members")
            )
            name, since = found.group("name", "since")
            yield Use(module, name, passes, takes, members or (), abstract, since, is_late)
        elif line and not line.startswith("#"):
            module = line


TABLES: dict[str, tuple[Use, ...]] = {
    "vLLM": tuple(_read("vllm.txt")),
    "LMCache": tuple(_read("lmcache.txt")),
}
