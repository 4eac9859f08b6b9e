"""The client of the benchmark, as a process: it sends requests and notes when each has ended.

A *closed* load keeps a number of requests under way and sends the next when one has ended; an
*open* one sends each at its time, whatever has become of the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio

from pd_grpc.bench.legs import BenchRequest, generate_request, prefill_request
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.v1 import inference_pb2_grpc, prefill_pb2_grpc


@dataclass(frozen=True)
class Ended:
    """One request: when it was sent and when it ended, in seconds since the load began; how many
    tokens came; and what went wrong, empty for nothing."""

    group: str
    sent_s: float
    ended_s: float
    tokens: int
    fault: str

    @property
    def finished(self) -> bool:
        """Whether the answer came whole."""
        return not self.fault


class Driver:
    """Through a router, or by both legs itself."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._prefill: Sequence[str] = spec["prefill"]
        self._router: str = spec["router"]
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "closed":
            ended = await self._closed(command["groups"], command["limit_s"])
        elif command["do"] == "open":
            ended = await self._open(command["arrivals"], command["deadline_s"])
        elif command["do"] == "cancel":
            return await self._cancel_after(BenchRequest(**command["request"]), command["tokens"])
        else:
            raise ValueError(f"do: {command['do']!r} is nothing that the driver does")
        return [asdict(each) for each in ended]

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def _closed(self, groups: Mapping[str, Mapping[str, Any]], limit_s: float) -> list[Ended]:
        """Every request of every group; what has not ended after `limit_s` is cancelled and left
        out."""
        begun = time.monotonic()
        ended: list[Ended] = []
        lanes: list[asyncio.Task[None]] = []
        for name, group in groups.items():
            waiting = iter([BenchRequest(**request) for request in group["requests"]])
            lanes += [
                asyncio.create_task(self._lane(name, waiting, begun, ended))
                for _ in range(group["at_once"])
            ]
        await asyncio.wait(lanes, timeout=limit_s)
        for lane in lanes:
            lane.cancel()
        for result in await asyncio.gather(*lanes, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return ended

    async def _lane(self, group: str, waiting: Any, begun: float, ended: list[Ended]) -> None:
        for request in waiting:
            ended.append(await self._timed(group, request, begun, None))

    async def _open(
        self, arrivals: Sequence[Mapping[str, Any]], deadline_s: float | None
    ) -> list[Ended]:
        begun = time.monotonic()
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun + arrival["at_s"] - time.monotonic()))
            request = BenchRequest(**arrival["request"])
            tasks.append(asyncio.create_task(self._timed("all", request, begun, deadline_s)))
        return list(await asyncio.gather(*tasks))

    async def _timed(
        self, group: str, request: BenchRequest, begun: float, deadline_s: float | None
    ) -> Ended:
        sent_s = time.monotonic() - begun
        tokens, fault = 0, ""
        try:
            tokens = await self._one(request, deadline_s)
        except grpc.aio.AioRpcError as error:
            fault = str(rpc.read_error(error))
        if not fault and tokens != request.output:
            fault = f"{tokens} tokens instead of {request.output}"
        return Ended(group, sent_s, time.monotonic() - begun, tokens, fault)

    async def _one(self, request: BenchRequest, deadline_s: float | None) -> int:
        """Tokens of the answer."""
        if self._router:
            return await self._generate(self._router, request, "", deadline_s)
        name, endpoint = request.decodes[0]
        legs = [
            asyncio.ensure_future(self._generate(endpoint, request, name, deadline_s)),
            asyncio.ensure_future(self._hand_over(request, deadline_s)),
        ]
        try:
            tokens, _ = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.wait(legs)
        return tokens

    async def _generate(
        self, endpoint: str, request: BenchRequest, decode_name: str, deadline_s: float | None
    ) -> int:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(endpoint))
        tokens = 0
        message = generate_request(request, decode_name)
        async for answer in stub.Generate(message, timeout=deadline_s):
            tokens += len(answer.token_ids)
        return tokens

    async def _hand_over(self, request: BenchRequest, deadline_s: float | None) -> int:
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(self._prefill[0]))
        async for _ in stub.Prefill(prefill_request(request), timeout=deadline_s):
            pass
        return 0

    async def _cancel_after(self, request: BenchRequest, tokens: int) -> int:
        """Cancel P's leg once so many tokens are computed; how many were."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(self._prefill[0]))
        call = stub.Prefill(prefill_request(request))
        computed = 0
        async for message in call:
            computed = max(computed, message.progress.computed_tokens)
            if computed >= tokens:
                call.cancel()
                break
        return computed

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = rpc.aio_channel(endpoint, Timeouts(), Sizes())
        return self._channels[endpoint]
