"""An OpenAI-compatible front for prefill and decode instances that register themselves.

    python -m examples.disaggregated.proxy --port 8000

Each completion goes to a prefill instance with ``max_tokens`` 1, then to a decode instance, whose
answer is passed on as it comes. Prefill is an optimisation: without a prefill instance, or if it
fails, the decode instance computes the prompt. If a decode instance fails before its answer begins,
another one is called.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from examples.disaggregated.registry import Instance, RegistrationError, Registry, Role
from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.net.address import Address
from lmcache_connector.peers.heartbeat import SIGNATURE_HEADER

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 20
_CONNECT_SECONDS = 2.0
_PREFILL_SECONDS = 300.0
_SILENCE_SECONDS = 300.0
_PASSED_ON = ("Content-Type", "Cache-Control")
_ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """``by_id``: name the instances in the request id rather than in ``kv_transfer_params``."""

    def __init__(self, registry: Registry, *, by_id: bool = False) -> None:
        self._registry = registry
        self._by_id = by_id
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/register", self.register)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        for path in _ENDPOINTS:
            app.router.add_post(path, self.complete)
        app.cleanup_ctx.append(self._client)
        return app

    async def _client(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
        )
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connections) as self._session:
            yield

    # -- routes --------------------------------------------------------------------------------

    async def register(self, request: web.Request) -> web.Response:
        try:
            signature = request.headers.get(SIGNATURE_HEADER, "")
            self._registry.register(await request.read(), signature)
        except RegistrationError as error:
            logger.warning("A registration was refused: %s", error)
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({})

    async def health(self, request: web.Request) -> web.Response:
        """Ready once a decode instance is."""
        counts = {part.name.lower(): len(self._registry.alive(part)) for part in Role}
        return web.json_response(counts, status=200 if counts["decode"] else 503)

    async def models(self, request: web.Request) -> web.Response:
        instance = self._registry.pick(Role.DECODE)
        if instance is None:
            return _no_instance()
        async with self._session.get(f"http://{instance.http}/v1/models") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response(
                {"error": {"message": "the body is not a JSON object"}}, status=400
            )
        # In every mode, only the proxy chooses the instances that transfer KV.
        body.pop("kv_transfer_params", None)
        if isinstance(body.get("vllm_xargs"), dict):
            body["vllm_xargs"].pop("kv_transfer_params", None)
        tried: frozenset[str] = frozenset()
        while (decode := self._registry.pick(Role.DECODE, tried)) is not None:
            name, params = await self._prefill(request, body, decode)
            try:
                return await self._decode(request, body, decode, name, params)
            except _FailedError as error:
                logger.warning("Decode instance %s failed: %s", decode.http, error)
                self._registry.shun(decode)
                tried |= {decode.http}
        return _no_instance()

    # -- the two halves ------------------------------------------------------------------------

    async def _prefill(
        self, request: web.Request, body: dict[str, Any], decode: Instance
    ) -> tuple[str, dict[str, Any] | None]:
        """The request's name, and the parameters with which the decode instance gets the KV.

        vLLM answers several prompts with the parameters of the first: the KV of the others could
        not be fetched, and would fill the prefill instance's memory until its lease ends.
        """
        if not self._by_id and _has_several_prompts(body):
            return uuid.uuid4().hex, None
        tried: frozenset[str] = frozenset()
        while (prefill := self._registry.pick(Role.PREFILL, tried)) is not None:
            name = _name(prefill, decode) if self._by_id else uuid.uuid4().hex
            try:
                return name, await self._compute(request, body, prefill, name)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                logger.warning("Prefill instance %s failed: %r", prefill.http, error)
                self._registry.shun(prefill)
                tried |= {prefill.http}
        return uuid.uuid4().hex, None

    async def _compute(
        self, request: web.Request, body: dict[str, Any], prefill: Instance, name: str
    ) -> dict[str, Any] | None:
        short = {**body, "max_tokens": 1, "stream": False, "n": 1}
        short.pop("stream_options", None)
        short.pop("min_tokens", None)
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        if not self._by_id:
            short["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        with _counted(prefill):
            async with self._session.post(
                f"http://{prefill.http}{request.path}",
                json=short,
                headers=_headers(request, name, prefill),
                timeout=aiohttp.ClientTimeout(
                    total=_PREFILL_SECONDS, sock_connect=_CONNECT_SECONDS
                ),
            ) as answer:
                if answer.status >= 500:
                    raise ValueError(f"status {answer.status}")
                said = await answer.json()
        params = said.get("kv_transfer_params") if isinstance(said, dict) else None
        return params if isinstance(params, dict) else None

    async def _decode(
        self,
        request: web.Request,
        body: dict[str, Any],
        decode: Instance,
        name: str,
        params: dict[str, Any] | None,
    ) -> web.StreamResponse:
        """Pass the answer on as it comes. Once it has begun, an error ends the connection."""
        full = {**body, "kv_transfer_params": params} if params else body
        with _counted(decode):
            call = self._session.post(
                f"http://{decode.http}{request.path}",
                json=full,
                headers=_headers(request, name, decode),
            )
            try:
                answer = await call
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _FailedError(repr(error)) from error
            async with answer:
                if answer.status >= 500:
                    raise _FailedError(f"status {answer.status}")
                headers = {k: answer.headers[k] for k in _PASSED_ON if k in answer.headers}
                is_stream = "event-stream" in headers.get("Content-Type", "")
                if not is_stream:
                    return await _whole(answer, headers)
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response


class _FailedError(Exception):
    """Another instance may still answer the request."""


async def _whole(answer: aiohttp.ClientResponse, headers: dict[str, str]) -> web.Response:
    try:
        data = await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _FailedError(repr(error)) from error
    return web.Response(body=data, status=answer.status, headers=headers)


@contextmanager
def _counted(instance: Instance) -> Any:
    instance.running += 1
    try:
        yield
    finally:
        instance.running -= 1


def _has_several_prompts(body: dict[str, Any]) -> bool:
    """A list of numbers is one prompt, as tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _name(prefill: Instance, decode: Instance) -> str:
    return f"___prefill_addr_{prefill.kv}___decode_addr_{decode.kv}_{uuid.uuid4().hex}"


def _headers(request: web.Request, name: str, instance: Instance) -> dict[str, str]:
    headers = {"X-Request-Id": name}
    if instance.data_parallel_rank >= 0:
        headers["X-data-parallel-rank"] = str(instance.data_parallel_rank)
    if "Authorization" in request.headers:
        headers["Authorization"] = request.headers["Authorization"]
    return headers


def _no_instance() -> web.Response:
    return web.json_response(
        {"error": {"message": "no decode instance is registered, or all have failed"}}, status=503
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    parser.add_argument(
        "--heartbeat-seconds",
        type=float,
        default=2.0,
        help="seconds between heartbeats of instances (2)",
    )
    parser.add_argument(
        "--missed",
        type=int,
        default=3,
        help="missed heartbeats before an instance is forgotten (3)",
    )
    parser.add_argument(
        "--secret",
        default="",
        help="secret shared with the instances: a value, env:NAME or file:PATH",
    )
    parser.add_argument("--by-id", action="store_true", help="name the instances in the request id")
    parser.add_argument("--insecure", action="store_true", help="accept registrations from anybody")
    args = parser.parse_args(arguments)
    try:
        secret = resolve_secret(args.secret, os.environ).encode()
    except ValueError as error:
        parser.error(f"--secret: {error}")
    place = Address(args.host, args.port)
    if not (secret or args.insecure or place.is_loopback):
        parser.error(
            "whoever reaches this port could register and read prompts: give the instances' "
            "--secret, or --insecure on a network that only you use"
        )
    if reason := place.why_not_listen():
        parser.error(f"cannot listen on {place}: {reason}")
    registry = Registry(args.heartbeat_seconds, args.missed, secret)
    logging.basicConfig(level=logging.INFO)
    web.run_app(Proxy(registry, by_id=args.by_id).app(), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
