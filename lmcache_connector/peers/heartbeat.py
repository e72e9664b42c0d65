"""Registers this instance with a router, again and again.

The engine starts before its API server, and may outlive it. While ``/health`` does not answer, no
heartbeat is sent, and the router forgets the instance. The example's proxy is addressed by HTTP,
vLLM's own router (``--vllm-discovery-address``) by ``tcp://HOST:PORT``, with ZeroMQ.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass

import msgspec
import zmq

from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0
_START_SECONDS = 300.0
"""The API server listens by then."""
DISCOVERY = "tcp://"
SIGNATURE_HEADER = "X-LMCache-Signature"
# Instances and their router reach each other directly, whatever proxy the environment names. A
# redirection is an error: its body would be read, of any size, and a POST would become a GET.
_DIRECTLY = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
):
    _DIRECTLY.add_handler(_handler())


@dataclass(frozen=True, slots=True)
class Registration:
    """``role`` as vLLM's ``kv_role``; ``http``: HOST:PORT of the API, ``kv`` of the peer server.
    ``data_parallel_rank``: -1 for an engine with an API server of its own."""

    role: str
    http: str
    kv: str
    engine_id: str
    data_parallel_rank: int = -1


def sign(body: bytes, secret: bytes) -> str:
    """The ``SIGNATURE_HEADER`` that a router with the same secret expects."""
    return hmac.digest(secret, body, "sha256").hex()


class Heartbeat:
    """A thread that sends the registration to ``router`` and revokes it on `close`. Failures are
    retried; the log has the first of a series."""

    def __init__(
        self, registration: Registration, router: str, seconds: float, secret: bytes
    ) -> None:
        self._registration = registration
        self._router = router
        self._seconds = seconds
        self._secret = secret
        self._stopping = threading.Event()
        self._is_silent = False
        self._listens_by = time.monotonic() + _START_SECONDS
        self._thread = start_thread("lmc-p2p-heartbeat", self._work)

    def close(self) -> None:
        """Leave the router. Takes a few seconds at most."""
        self._stopping.set()
        self._thread.join(2 * _ANSWER_SECONDS)

    def _work(self) -> None:
        while True:
            if self._stopping.is_set():
                self._post(leaves=True)
                return
            if self._is_serving():
                self._post(leaves=False)
            self._stopping.wait(self._seconds)

    def _is_serving(self) -> bool:
        try:
            _open(urllib.request.Request(f"http://{self._registration.http}/health"))
        except (OSError, ValueError) as error:
            is_refused = isinstance(getattr(error, "reason", None), ConnectionRefusedError)
            if not is_refused or time.monotonic() > self._listens_by:
                what = f"http://{self._registration.http}/health; check http_address"
                self._tell(f"{what}: {error}")
            return False
        return True

    def _post(self, *, leaves: bool) -> None:
        try:
            register(self._router, self._registration, self._secret, leaves=leaves)
            self._is_silent = False
        except (OSError, ValueError) as error:
            self._tell(f"check router, and router_secret at both: {error}")

    def _tell(self, why: str) -> None:
        if not self._is_silent:
            logger.warning("The router %s is not told of this instance: %.256r", self._router, why)
        self._is_silent = True


def register(router: str, registration: Registration, secret: bytes, *, leaves: bool) -> None:
    """Register, or leave. Raises ``OSError`` or ``ValueError``, for a refusal ``HTTPError``. vLLM's
    router neither confirms a registration nor can be left."""
    if router.startswith(DISCOVERY):
        if not leaves:
            _send_to_vllms_router(router, registration)
        return
    # The time prevents replay of an old registration.
    fields = {**asdict(registration), "leaves": leaves, "time": time.time()}
    body = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    if secret:
        headers[SIGNATURE_HEADER] = sign(body, secret)
    _open(urllib.request.Request(f"{router}/register", body, headers))


def _send_to_vllms_router(router: str, registration: Registration) -> None:
    kind = {"kv_producer": "P", "kv_consumer": "D"}[registration.role]
    said = {"type": kind, "http_address": registration.http, "zmq_address": registration.kv}
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, int(_ANSWER_SECONDS * 1000))
        sock.setsockopt(zmq.IDENTITY, registration.kv.encode())
        try:
            sock.connect(router)
            sock.send(msgspec.msgpack.encode(said), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise OSError(str(error)) from error


def _open(request: urllib.request.Request) -> None:
    try:
        _DIRECTLY.open(request, timeout=_ANSWER_SECONDS).close()
    except http.client.HTTPException as error:  # neither an OSError nor a ValueError
        raise OSError(f"it does not speak HTTP: {str(error)[:80]}") from error
