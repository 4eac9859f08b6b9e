"""D's end of the ZeroMQ rows: a ROUTER beside the gRPC server, behind the same door."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from opentelemetry.context import Context

from pd_grpc.bench.door import Door
from pd_grpc.bench.zmq_wire import LOOPBACK, load, pack_answer, unpack_request
from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.protocol.faults import Fault

log = logging.getLogger("pd_grpc.bench")


class ZmqDoor:
    """Answers Allocates on D's loop, each in a task of its own."""

    def __init__(self, runtime: DecodeRuntime, door: Door) -> None:
        zmq, zmq_asyncio = load("zmq"), load("zmq.asyncio")
        self._runtime = runtime
        self._door = door
        self._context = zmq_asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port(LOOPBACK)
        self.endpoint = f"{LOOPBACK}:{port}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Answer nothing any more."""
        tasks = [self._reader, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            sender, message = await self._socket.recv_multipart()
            task = asyncio.create_task(self._answer(sender, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, sender: bytes, message: bytes) -> None:
        number, request = unpack_request(message)
        answer: Any
        try:
            await self._door.enter()
            answer = await self._runtime.call_allocate(request, Context())
        except Fault as fault:
            answer = fault.status().SerializeToString()
        await self._socket.send_multipart([sender, pack_answer(number, answer)])
