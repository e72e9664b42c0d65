"""What a running engine has found out about the KV it shares."""

from __future__ import annotations

from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.engine.scrape import fetch, summarize
from lmcache_connector.cli.report import CliError


def finding(url: str) -> Finding:
    """Of the engine at that address."""
    name = f"audits of {url}"
    try:
        engine = summarize(fetch(url))
    except CliError as error:
        return Finding(name, "error", str(error), error.hint, code=error.code)
    audits = engine["audits"]
    root = f"root {', '.join(engine['roots'])}; " if engine["roots"] else ""
    counted = f"{root}{sum(audits.values()):.0f} audits, {audits.get('match', 0):.0f} match"
    if wrong := audits.get("mismatch"):
        detail = f"{counted}, {wrong:.0f} do not: stored KV was not what this engine computes"
        hint = "its log names the requests; the troubleshooting guide says what to do"
        return Finding(name, "error", detail, hint)
    if engine["roots_apart"]:
        detail = f"{counted}; since an audit found other KV some of it is shared with no engine"
        hint = "its log names the requests; it is shared again once the weights are others"
        return Finding(name, "warning", detail, hint)
    return Finding(name, "ok", counted)
