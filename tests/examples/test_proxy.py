"""The example's proxy: the instances that it calls, and the fields that it drops."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.disaggregated.proxy import Proxy, main
from examples.disaggregated.registry import Registry
from tests.support.redis.servers import free_port


class FakeApi:
    """Answers as a vLLM instance, and records its requests."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body, headers = await request.json(), request.headers
        self.asked.append((headers["X-Request-Id"], headers.get("X-data-parallel-rank"), body))
        if self.status != 200:
            return web.json_response({}, status=self.status)
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


async def ask_through_proxy(by_id: bool, instances: dict[str, FakeApi]) -> bytes:
    """The answer to a client that names peers of its own wherever it can. ``instances``: by role,
    each at another address and data-parallel rank."""
    async with AsyncExitStack() as stack:
        registry = Registry(10.0)
        for number, (role, api) in enumerate(instances.items()):
            app = web.Application()
            app.router.add_post("/v1/completions", api.complete)
            place: dict[str, Any] = {
                "role": role,
                "http": await serve(stack, app),
                "kv": f"127.0.0.1:{number}",
            }
            place |= {"engine_id": role, "data_parallel_rank": number - 1}
            registry.register(json.dumps(place | {"leaves": False, "time": 1000.0}).encode())
        address = await serve(stack, Proxy(registry, by_id=by_id).app())
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}"))
        headers = {"X-Request-Id": "___prefill_addr_evil:1___decode_addr_evil:2_x"}
        async with session.post("/v1/completions", json=BODY, headers=headers) as answer:
            assert answer.status == 200
            return await answer.read()


BODY = {
    **{"model": "m", "prompt": "p", "max_tokens": 9, "stream": True},
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
    "vllm_xargs": {"kv_transfer_params": "x", "other": 1},
}


@pytest.mark.parametrize("by_id", [False, True])
def test_prefill_first_then_decode_streamed(by_id: bool) -> None:
    prefill, decode = FakeApi(), FakeApi()
    instances = {"kv_producer": prefill, "kv_consumer": decode}
    answer = asyncio.run(asyncio.wait_for(ask_through_proxy(by_id, instances), 60))
    assert answer == b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"
    ((name, rank, short),), ((same_name, other_rank, full),) = prefill.asked, decode.asked
    assert name == same_name
    assert (rank, other_rank) == (None, "0")
    assert (short["max_tokens"], short["stream"], full["max_tokens"]) == (1, False, 9)
    assert full["vllm_xargs"] == short["vllm_xargs"] == {"other": 1}
    assert "evil" not in f"{prefill.asked} {decode.asked}"
    if by_id:
        assert name.startswith("___prefill_addr_127.0.0.1:0___decode_addr_127.0.0.1:1_")
        assert "kv_transfer_params" not in short | full
    else:
        assert short["kv_transfer_params"]["do_remote_decode"] is True
        assert full["kv_transfer_params"] == {"remote_host": "h"}


def test_a_client_names_no_peer() -> None:
    alone = FakeApi()
    asyncio.run(asyncio.wait_for(ask_through_proxy(False, {"kv_consumer": alone}), 60))
    assert "kv_transfer_params" not in alone.asked[0][2]
    assert "evil" not in str(alone.asked)


def test_another_instance_answers_for_one_that_fails() -> None:
    failing, well = FakeApi(503), FakeApi()
    instances = {"kv_consumer": failing, "kv_both": well}
    answer = asyncio.run(asyncio.wait_for(ask_through_proxy(False, instances), 60))
    assert answer.endswith(b"data: [DONE]\n\n")
    assert failing.asked


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "proxy.example"])
def test_other_hosts_need_a_secret(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--host", host])
    assert "--secret" in capsys.readouterr().err
