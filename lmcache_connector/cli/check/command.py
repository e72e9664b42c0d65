"""``check``: would an engine start with this configuration, and would everything it names work?"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_connector.cli.check import audits, p2p, tiered
from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.check.transfer import P2P, check_transfer, connector_meant
from lmcache_connector.cli.engine.scrape import metrics_url
from lmcache_connector.cli.report import BAD_INPUT, UNREACHABLE, CliError, Report
from lmcache_connector.cli.target import read_transfer_config


def run(report: Report, text_or_path: str, engines: Sequence[str] = ()) -> int:
    """``engines``: addresses of running ones, whose audits count as well."""
    for address in engines:
        metrics_url(address)  # a slip of the pen is not the configuration's
    document = read_transfer_config(text_or_path)
    findings = [check_transfer(document)]
    connector = p2p if connector_meant(document) == P2P else tiered
    try:
        for finding in connector.findings(document):
            findings.append(finding)  # noqa: PERF402 - those before an error count
    except CliError as error:
        name = "redis" if error.code == UNREACHABLE else "settings"
        findings.append(Finding(name, "error", str(error), error.hint, code=error.code))
    findings += map(audits.finding, engines)
    codes = {finding.exit_code for finding in findings}
    code = BAD_INPUT if BAD_INPUT in codes else max(codes)
    _show(report, findings, code)
    return code


def _show(report: Report, findings: list[Finding], code: int) -> None:
    if report.as_json:
        document = [finding.as_json() for finding in findings]
        report.emit({"ok": code == 0, "exit_code": code, "findings": document})
        return
    for finding in findings:
        finding.show(report)
    if code == BAD_INPUT:
        report.say("An engine would refuse to start with it, or start without this connector.")
