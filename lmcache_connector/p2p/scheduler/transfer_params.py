"""vLLM's ``kv_transfer_params``, with the names that routers for NIXL use.

A router sends the prefill request with ``{"do_remote_decode": true}``, takes the parameters from
its answer, and passes them on with the decode request::

    do_remote_prefill   true: the KV of this prompt is to be fetched
    remote_host/_port   where the instance that has it takes control messages
    remote_engine_id    its vLLM engine
    remote_request_id   what the hand-over is called there
    remote_block_ids    its blocks; other connectors need them, this one does not

With ``remote_host`` and ``remote_port`` beside ``do_remote_decode`` the router names the decode
instance, and the KV can be pushed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_connector.p2p.control.address import PeerAddress, checked_transfer_id
from lmcache_connector.p2p.errors import AddressError


@dataclass(frozen=True, slots=True)
class Produce:
    """Hand over the prompt's KV. ``target``: push it there; ``None``: keep it until asked for it.
    ``answers``: the router wants parameters to pass on."""

    transfer_id: str
    target: PeerAddress | None
    answers: bool


@dataclass(frozen=True, slots=True)
class Consume:
    """Receive the prompt's KV."""

    transfer_id: str
    source: PeerAddress


def parse_params(request_id: str, params: Mapping[str, Any] | None) -> Produce | Consume | None:
    """``None`` where a request asks for no hand-over. Raises :class:`AddressError`.

    A prompt to be handed over is named by its ``request_id``, which is not checked here.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise AddressError("kv_transfer_params is not an object")
    if _flag(params, "do_remote_prefill"):
        transfer_id = checked_transfer_id(params.get("remote_request_id"))
        source = _address(params)
        if source is None:
            raise AddressError("do_remote_prefill without remote_host and remote_port")
        return Consume(transfer_id, source)
    if _flag(params, "do_remote_decode"):
        return Produce(request_id, _address(params), answers=True)
    return None


def offer_params(
    address: PeerAddress,
    engine_id: str,
    transfer_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    tp_size: int,
) -> dict[str, Any]:
    """What the answer to a prefill request tells the router to pass on."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": transfer_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "remote_block_ids": [list(block_ids)],
        "remote_num_tokens": num_tokens,
        "tp_size": tp_size,
    }


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise AddressError(f"{name} is not true or false")
    return value


def _address(params: Mapping[str, Any]) -> PeerAddress | None:
    host, port = params.get("remote_host"), params.get("remote_port")
    if host is None and port is None:
        return None
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int | str):
        raise AddressError("remote_host and remote_port must be a string and a number")
    if isinstance(port, str):  # some routers pass what they read from a command line
        if not port.isascii() or not port.isdigit() or len(port) > 5:
            raise AddressError("remote_port is not a number")
        port = int(port)
    return PeerAddress(host, port)
