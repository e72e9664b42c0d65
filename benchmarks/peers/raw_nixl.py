"""Two processes and one NIXL read with no work around it: the limit for transfers by NIXL."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.peers.places import num_places, places


class RawNixl:
    """Another process whose ``num_bytes`` are read, at one place after the other."""

    def __init__(self, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_offer, args=(theirs, num_bytes))
        self._num_bytes, self._places = num_bytes, places(num_bytes)
        self._memory = np.ones(num_bytes * num_places(num_bytes), np.uint8)

    def __enter__(self) -> RawNixl:
        self._process.start()
        self._agent = _agent("raw-reader", self._memory)
        self._peer = self._agent.add_remote_agent(self._pipe.recv_bytes())
        self._address = json.loads(self._pipe.recv_bytes())
        for _ in range(num_places(self._num_bytes)):
            self.gbps()  # unmeasured
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send_bytes(b"end")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        del self._agent

    def gbps(self) -> float:
        """From the request to read until all bytes have arrived."""
        size, place = self._num_bytes, next(self._places)
        here = self._agent.get_xfer_descs([(self._memory.ctypes.data + place, size, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(self._address + place, size, 0)], "DRAM")
        started = time.perf_counter()
        handle = self._agent.initialize_xfer("READ", here, there, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        if state != "DONE":
            raise RuntimeError(f"a plain NIXL read ended with {state}")
        self._agent.release_xfer_handle(handle)
        return size / seconds / 1e9


def _agent(name: str, memory: np.ndarray[Any, Any]) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")
    return agent


def _offer(pipe: Connection, num_bytes: int) -> None:
    memory = np.ones(num_bytes * num_places(num_bytes), np.uint8)
    agent = _agent("raw-source", memory)
    pipe.send_bytes(agent.get_agent_metadata())
    pipe.send_bytes(json.dumps(memory.ctypes.data).encode())
    while not pipe.poll(0.001):
        agent.get_new_notifs()
