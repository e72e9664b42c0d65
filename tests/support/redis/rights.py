"""The ACL rules that docs/security.md asks for."""

from __future__ import annotations

import re

from tests.support import ROOT
from tests.support.redis.servers import Server

PASSWORD = "pass-word"


def documented_rules(user: str) -> list[list[str]]:
    """Those of each line about ``user``, with `PASSWORD` filled in."""
    text = (ROOT / "docs" / "security.md").read_text()
    lines = re.findall(rf"^ACL SETUSER {user} (.*)$", text, re.MULTILINE)
    assert lines
    return [line.replace("PASSWORD", PASSWORD).split() for line in lines]


def grant(server: Server, user: str, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Give the user its documented rights, but for lines with a rule to ``leave_out``."""
    with server.client() as client:
        for rules in documented_rules(user):
            if leave_out.isdisjoint(rules):
                client.execute_command("ACL", "SETUSER", user, *rules)
