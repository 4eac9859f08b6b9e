"""The client of the benchmark, as a process: it sends requests and notes when each has ended.

It opens P's leg first, as the router does. What it sends is made before its clock starts.

A *closed* load keeps a number of requests under way and sends the next when one has ended; an
*open* one sends each at its time, whatever has become of the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import grpc
import grpc.aio

from pd_grpc.bench.legs import BenchRequest, generate_request, prefill_request
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc


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


class _Prepared(NamedTuple):
    """What is sent for a request: to D or the router, and to P unless the router does that."""

    request: BenchRequest
    endpoint: str
    generate: inference_pb2.GenerateRequest
    prefill: prefill_pb2.PrefillRequest | None


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
        prepared = {name: self._prepared(group["requests"]) for name, group in groups.items()}
        begun = time.monotonic()
        ended: list[Ended] = []
        lanes: list[asyncio.Task[None]] = []
        for name, group in groups.items():
            waiting = iter(prepared[name])
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

    def _prepared(self, requests: Sequence[Mapping[str, Any]]) -> list[_Prepared]:
        return [self._prepare(BenchRequest(**request)) for request in requests]

    def _prepare(self, request: BenchRequest) -> _Prepared:
        name, endpoint = ("", self._router) if self._router else request.decodes[0]
        handed_over = None if self._router else prefill_request(request)
        return _Prepared(request, endpoint, generate_request(request, name), handed_over)

    async def _lane(
        self, group: str, waiting: Iterator[_Prepared], begun: float, ended: list[Ended]
    ) -> None:
        for request in waiting:
            ended.append(await self._timed(group, request, begun, None))

    async def _open(
        self, arrivals: Sequence[Mapping[str, Any]], deadline_s: float | None
    ) -> list[Ended]:
        prepared = self._prepared([arrival["request"] for arrival in arrivals])
        begun = time.monotonic()
        tasks = []
        for arrival, request in zip(arrivals, prepared, strict=True):
            await asyncio.sleep(max(0.0, begun + arrival["at_s"] - time.monotonic()))
            tasks.append(asyncio.create_task(self._timed("all", request, begun, deadline_s)))
        return list(await asyncio.gather(*tasks))

    async def _timed(
        self, group: str, sent: _Prepared, begun: float, deadline_s: float | None
    ) -> Ended:
        sent_s = time.monotonic() - begun
        tokens, fault = 0, ""
        try:
            tokens = await self._one(sent, deadline_s)
        except grpc.aio.AioRpcError as error:
            fault = str(rpc.read_error(error))
        if not fault and tokens != sent.request.output:
            fault = f"{tokens} tokens instead of {sent.request.output}"
        return Ended(group, sent_s, time.monotonic() - begun, tokens, fault)

    async def _one(self, sent: _Prepared, deadline_s: float | None) -> int:
        """Tokens of the answer."""
        if sent.prefill is None:
            return await self._generate(sent, deadline_s)
        legs = [
            asyncio.ensure_future(self._hand_over(sent.prefill, deadline_s)),
            asyncio.ensure_future(self._generate(sent, deadline_s)),
        ]
        try:
            _, tokens = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.wait(legs)
        return tokens

    async def _generate(self, sent: _Prepared, deadline_s: float | None) -> int:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(sent.endpoint))
        tokens = 0
        async for answer in stub.Generate(sent.generate, timeout=deadline_s):
            tokens += len(answer.token_ids)
        return tokens

    async def _hand_over(
        self, message: prefill_pb2.PrefillRequest, deadline_s: float | None
    ) -> int:
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(self._prefill[0]))
        async for _ in stub.Prefill(message, timeout=deadline_s):
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
