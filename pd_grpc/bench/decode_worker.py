"""D as a process of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from pd_grpc.bench.door import Door, DoorService, Manners, WholeAnswers
from pd_grpc.bench.setup import Timing
from pd_grpc.bench.timed_engine import TimedEngine
from pd_grpc.bench.zmq_door import ZmqDoor
from pd_grpc.blocks.pool import BlockState, Holding
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.protocol.config import DecodeConfig


class DecodeWorker:
    """Behind a door, whose manners can be changed; with a ROUTER beside it where `zmq` says so."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = DecodeConfig(name=spec["name"], **spec["settings"])
        timing = Timing(**spec["timing"])
        self._engine = TimedEngine(self._config, timing.steps, timing.scale)
        self._with_zmq = bool(spec["zmq"])
        self._server: DecodeServer | None = None
        self._door: Door | None = None
        self._zmq: ZmqDoor | None = None
        self._hog: Holding | None = None

    async def start(self) -> Mapping[str, Any]:
        self._door = door = Door()
        self._engine.on_step = door.step
        self._server = server = await start_decode(
            self._config,
            self._engine,
            decode_service=lambda runtime, config: DoorService(runtime, config, door),
            inference=WholeAnswers,
        )
        if self._with_zmq:
            self._zmq = ZmqDoor(server.runtime, door)
        router = self._zmq.endpoint if self._zmq else ""
        return {"endpoint": server.endpoint, "router": router}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "stats":
            process = psutil.Process()
            return {"cpu_s": sum(process.cpu_times()[:2]), "threads": process.num_threads()}
        if command["do"] == "behave":
            self._behave(Manners(**command["manners"]))
            return True
        raise ValueError(f"do: {command['do']!r} is nothing that D does")

    async def stop(self) -> None:
        if self._zmq is not None:
            await self._zmq.stop()
        if self._server is not None:
            await self._server.stop()

    def _behave(self, manners: Manners) -> None:
        """Be full, silent or slow, or none of it any more."""
        assert self._server is not None and self._door is not None
        self._door.manners = manners
        if self._hog is not None:
            self._hog.release()
            self._hog = None
        if manners.full:
            pool = self._server.pool
            self._hog = pool.reserve(pool.free, BlockState.RESERVED, "somebody else")
        # Whoever waits for blocks may have them now.
        self._server.runtime.wake()
