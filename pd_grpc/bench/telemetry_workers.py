"""The processes of the telemetry benchmark: the three servers as `pd-grpc serve` makes them, and
the client that asks them."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pd_grpc.bench.legs import BenchRequest, generate_request
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import (
    DecodeConfig,
    EngineConfig,
    PrefillConfig,
    RouterConfig,
    ServerConfig,
    Sizes,
    Timeouts,
)
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.telemetry.exporting import Telemetry, make_telemetry
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc

_CONFIGS: Mapping[str, type[ServerConfig]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
}


class ObservedServer:
    """A server of `role`; `settings` are those of its configuration, by name, and `environment` is
    what OpenTelemetry's SDK reads."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        os.environ.update(spec["environment"])
        self._role: str = spec["role"]
        self._config = config = _CONFIGS[self._role](**spec["settings"])
        self._telemetry: Telemetry = make_telemetry(
            f"pd-grpc-{self._role}", config.name or self._role, config.otlp, config.prometheus
        )
        self._server: Any = None

    async def start(self) -> Mapping[str, Any]:
        module = importlib.import_module(f"pd_grpc.servers.{self._role}")
        self._server = await module.start(self._config, self._telemetry)
        return {"endpoint": self._server.endpoint}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "flush":
            return await asyncio.to_thread(self._flush)
        if command["do"] == "ready" and self._role == "router":
            return self._server.ready
        raise ValueError(f"do: {command['do']!r} is nothing that a {self._role} does")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self._telemetry.shutdown)

    def _flush(self) -> bool:
        tracers = self._telemetry.tracers
        return tracers is None or tracers.force_flush()


@dataclass(frozen=True)
class Asked:
    """What became of a load: when each right answer had ended, in seconds since the first request
    was sent; and what was wrong with the others."""

    ended_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Asker:
    """Asks routers for answers that it knows. `settings` are those of the sim engine."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = EngineConfig(**spec["settings"])
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._requests: list[tuple[inference_pb2.GenerateRequest, list[int]]] = []

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "prepare":
            self._requests = [self._with_answer(*each) for each in command["requests"]]
            return len(self._requests)
        if command["do"] == "ask":
            asked = await self._ask(command["endpoint"], command["at_once"], command["limit_s"])
            return {"ended_s": asked.ended_s, "wrong": asked.wrong}
        raise ValueError(f"do: {command['do']!r} is nothing that a client does")

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    def _with_answer(
        self, name: str, prompt: int, output: int
    ) -> tuple[inference_pb2.GenerateRequest, list[int]]:
        request = BenchRequest(name, prompt, output, ())
        message = generate_request(request, "")
        sampling = sampling_from_proto(message.sampling)
        return message, sim_answer(request.token_ids, sampling, self._config)

    async def _ask(self, endpoint: str, at_once: int, limit_s: float) -> Asked:
        """All requests that were prepared, `at_once` under way; what has not ended in time is
        wrong."""
        asked = Asked()
        waiting = iter(self._requests)
        begun = time.monotonic()
        lanes = [
            asyncio.create_task(self._lane(endpoint, waiting, begun, asked)) for _ in range(at_once)
        ]
        _, late = await asyncio.wait(lanes, timeout=limit_s)
        for lane in late:
            lane.cancel()
        for result in await asyncio.gather(*lanes, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        asked.wrong.extend(f"no answer within {limit_s:g} s" for _ in late)
        return asked

    async def _lane(
        self,
        endpoint: str,
        waiting: Iterator[tuple[inference_pb2.GenerateRequest, list[int]]],
        begun: float,
        asked: Asked,
    ) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(endpoint))
        for request, wanted in waiting:
            tokens: list[int] = []
            try:
                async for answer in stub.Generate(request):
                    tokens.extend(answer.token_ids)
            except grpc.aio.AioRpcError as error:
                asked.wrong.append(str(rpc.read_error(error)))
                continue
            if tokens == wanted:
                asked.ended_s.append(time.monotonic() - begun)
            else:
                asked.wrong.append(f"{request.request_id}: not the tokens that it should have")

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = rpc.aio_channel(endpoint, Timeouts(), Sizes())
        return self._channels[endpoint]
