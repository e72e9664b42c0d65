"""The example's proxy: the instances that it calls, and the fields that it drops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.disaggregated.proxy import Proxy, main
from examples.disaggregated.registry import Registry
from tests.support.redis.servers import free_port


def registration(**changes: Any) -> bytes:
    fields = {
        "role": "kv_producer",
        "http": "127.0.0.1:8100",
        "kv": "127.0.0.1:14579",
        "engine_id": "one",
        "data_parallel_rank": -1,
        "leaves": False,
        "time": 1000.0,
    }
    return json.dumps(fields | changes).encode()


class FakeApi:
    """Answers as a vLLM instance, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ranks: list[str | None] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.headers["X-Request-Id"], body))
        self.ranks.append(request.headers.get("X-data-parallel-rank"))
        if not body.get("stream"):
            params = {"remote_host": "h"} if body.get("kv_transfer_params") else None
            return web.json_response({"text": "one", "kv_transfer_params": params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"):
            await response.write(piece)
        return response


async def serve(stack: AsyncExitStack, app: web.Application) -> str:
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return f"127.0.0.1:{port}"


async def serve_api(stack: AsyncExitStack, api: FakeApi) -> str:
    app = web.Application()
    app.router.add_post("/v1/completions", api.complete)
    return await serve(stack, app)


def with_proxy(
    test: Callable[[AsyncExitStack, Registry, aiohttp.ClientSession], Awaitable[None]],
    *,
    by_id: bool = False,
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            registry = Registry(10.0)
            address = await serve(stack, Proxy(registry, by_id=by_id).app())
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}"))
            await test(stack, registry, session)

    asyncio.run(asyncio.wait_for(run(), 60))


BODY = {"model": "m", "prompt": "p", "max_tokens": 9, "stream": True}


class TestProxy:
    @pytest.mark.parametrize("by_id", [False, True])
    def test_prefill_first_then_decode_streamed(self, by_id: bool) -> None:
        prefill, decode = FakeApi(), FakeApi()

        async def test(
            stack: AsyncExitStack, registry: Registry, session: aiohttp.ClientSession
        ) -> None:
            for role, api, kv, rank in (
                ("kv_producer", prefill, "127.0.0.1:11", -1),
                ("kv_consumer", decode, "127.0.0.1:22", 1),
            ):
                http = await serve_api(stack, api)
                place = {"http": http, "kv": kv, "data_parallel_rank": rank}
                registry.register(registration(role=role, **place))
            forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
            body = BODY | forged | {"vllm_xargs": {"kv_transfer_params": "x", "other": 1}}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
                assert await answer.read() == b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"

        with_proxy(test, by_id=by_id)
        ((name, short),), ((same_name, full),) = prefill.asked, decode.asked
        assert name == same_name
        assert (short["max_tokens"], short["stream"]) == (1, False)
        assert full["max_tokens"] == 9
        assert full["vllm_xargs"] == short["vllm_xargs"] == {"other": 1}
        assert (prefill.ranks, decode.ranks) == ([None], ["1"])
        if by_id:
            route = "___prefill_addr_127.0.0.1:11___decode_addr_127.0.0.1:22_"
            assert name.startswith(route)
            assert "kv_transfer_params" not in full
            assert "kv_transfer_params" not in short
        else:
            assert short["kv_transfer_params"]["do_remote_decode"] is True
            assert full["kv_transfer_params"] == {"remote_host": "h"}

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "proxy.example"])
    def test_other_hosts_need_a_secret(self, host: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--host", host])
        assert "--secret" in capsys.readouterr().err

    def test_a_client_names_no_peer(self) -> None:
        decode = FakeApi()

        async def test(
            stack: AsyncExitStack, registry: Registry, session: aiohttp.ClientSession
        ) -> None:
            registry.register(registration(role="kv_consumer", http=await serve_api(stack, decode)))
            route = "___prefill_addr_evil:1___decode_addr_evil:2_x"
            forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
            headers = {"X-Request-Id": route}
            async with session.post("/v1/completions", json=BODY | forged, headers=headers) as a:
                assert a.status == 200

        with_proxy(test)
        ((name, body),) = decode.asked
        assert "kv_transfer_params" not in body
        assert "evil" not in name
