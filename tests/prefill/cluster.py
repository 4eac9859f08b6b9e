"""Ps and Ds of one test, in this process and on real sockets, over the sim engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol import interception, rpc
from pd_grpc.protocol.config import DecodeConfig, EngineConfig, PrefillConfig
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.interception import Interceptors
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.refs import mint_id
from pd_grpc.testing.faults import Injector
from pd_grpc.testing.faults_wiring import injected
from pd_grpc.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    types_pb2,
)
from tests.waiting import LIMIT_S, until

SMALL: dict[str, object] = {
    # What these tests look at are the bytes of chunks.
    "transports": ("inline",),
    "engine": "sim",
    "block_size": 4,
    "num_blocks": 256,
    "chunk_tokens": 16,
    "heartbeat_s": 2.0,
    "lease_s": 8.0,
    "grace_s": 0.5,
    "kv_progress_s": 8.0,
}


@dataclass
class Request:
    """A request as a router would split it into its two legs."""

    tokens: list[int]
    sampling: sampling_pb2.SamplingParams
    decodes: list[prefill_pb2.DecodeTarget]
    generated: list[int] = field(default_factory=list)
    scope: sampling_pb2.RequestScope | None = None
    ref: types_pb2.TransferRef = field(
        default_factory=lambda: types_pb2.TransferRef(transfer_id=mint_id("t"), attempt=1)
    )

    def prefill(self) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            ref=self.ref,
            token_ids=self.tokens,
            generated_token_ids=self.generated,
            sampling=self.sampling,
            decodes=self.decodes,
            scope=self.scope,
        )

    def generate(self) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=self.tokens),
            generated_token_ids=self.generated,
            sampling=self.sampling,
            scope=self.scope,
            handoff=inference_pb2.Handoff(ref=self.ref),
        )


@dataclass
class Outcome:
    """What became of one leg: its messages, and the fault it ended with, if any."""

    messages: list[prefill_pb2.PrefillResponse] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    fault: Fault | TransportFault | None = None


class Cluster:
    """Starts and stops instances; opens the legs of requests."""

    def __init__(self) -> None:
        self.prefills: list[PrefillServer] = []
        self.decodes: list[DecodeServer] = []
        self.pools: list[BlockPool] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def prefill(
        self,
        provider: TracerProvider | None = None,
        engine: type[SimEngine] = SimEngine,
        faults: Injector | None = None,
        interceptors: Interceptors = interception.NONE,
        **settings: object,
    ) -> PrefillServer:
        config = PrefillConfig.model_validate({**SMALL, **settings})
        server = await start_prefill(
            config,
            engine(config),
            tracer_provider=provider,
            interceptors=interceptors if faults is None else injected(faults),
        )
        self.prefills.append(server)
        self.pools.append(server.pool)
        return server

    async def decode(
        self,
        provider: TracerProvider | None = None,
        engine: type[SimEngine] = SimEngine,
        faults: Injector | None = None,
        **settings: object,
    ) -> DecodeServer:
        config = DecodeConfig.model_validate({**SMALL, **settings})
        server = await start_decode(
            config,
            engine(config),
            tracer_provider=provider,
            interceptors=interception.NONE if faults is None else injected(faults),
        )
        self.decodes.append(server)
        self.pools.append(server.pool)
        return server

    async def run_prefill(
        self, server: PrefillServer, request: Request, timeout_s: float = 60
    ) -> Outcome:
        """The Prefill leg, to its end."""
        outcome = Outcome()
        stub = prefill_pb2_grpc.PrefillServiceStub(self.channel(server.endpoint))
        try:
            async for message in stub.Prefill(request.prefill(), timeout=timeout_s):
                outcome.messages.append(message)
        except grpc.aio.AioRpcError as error:
            outcome.fault = rpc.read_error(error)
        return outcome

    async def run_generate(
        self, server: DecodeServer, request: Request, timeout_s: float = 60
    ) -> Outcome:
        """The Generate leg, to its end."""
        outcome = Outcome()
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel(server.endpoint))
        try:
            async for message in stub.Generate(request.generate(), timeout=timeout_s):
                outcome.tokens += message.token_ids
                outcome.finish = message.finish_reason
                outcome.usage = message.usage
        except grpc.aio.AioRpcError as error:
            outcome.fault = rpc.read_error(error)
        return outcome

    async def run(
        self, p: PrefillServer, d: DecodeServer, request: Request, timeout_s: float = 60
    ) -> tuple[Outcome, Outcome]:
        """Both legs at once, as a router opens them."""
        prefill, generate = await asyncio.gather(
            self.run_prefill(p, request, timeout_s), self.run_generate(d, request, timeout_s)
        )
        return prefill, generate

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = grpc.aio.insecure_channel(endpoint)
        return self._channels[endpoint]

    async def stop(self, *servers: PrefillServer | DecodeServer) -> None:
        for server in servers:
            await server.stop()
            if isinstance(server, PrefillServer):
                self.prefills.remove(server)
            else:
                self.decodes.remove(server)
                if server.pool in self.pools:
                    # Its memory has gone with it.
                    self.pools.remove(server.pool)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        await self.stop(*self.prefills, *self.decodes)

    async def all_returned(self, within_s: float = LIMIT_S) -> None:
        """Wait until every block of every pool is free and nothing is in flight."""
        await until(lambda: all(_idle(pool) for pool in self.pools), within_s)
        for pool in self.pools:
            pool.check()
        # A cancel that has just been made is still on its way to P, whose request holds no block.
        await until(lambda: not any(p.view.transfers() for p in self.prefills), within_s)


def request_to(
    *decodes: DecodeServer | str,
    tokens: int = 50,
    max_tokens: int = 8,
    seed: int | None = None,
    random_seed: int = 1,
    generated: tuple[int, ...] = (),
    **sampling: object,
) -> Request:
    """A request of random tokens to the decode instances named, the first one first."""
    numbers = random.Random(random_seed * 1000 + tokens)
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    if seed is None:
        params.temperature = 0
    else:
        params.seed = seed
    targets = [d if isinstance(d, str) else d.endpoint for d in decodes]
    return Request(
        tokens=[numbers.randrange(3, 32000) for _ in range(tokens)],
        sampling=params,
        decodes=[prefill_pb2.DecodeTarget(endpoint=target) for target in targets],
        generated=list(generated),
    )


def answer_to(request: Request) -> list[int]:
    """What the sim model must answer."""
    config = EngineConfig.model_validate({"engine": "sim", "block_size": SMALL["block_size"]})
    sampling = sampling_from_proto(request.sampling)
    return sim_answer(request.tokens, sampling, config, request.generated)


@asynccontextmanager
async def running() -> AsyncIterator[Cluster]:
    """A cluster in which, at the end, every block of every pool is free."""
    cluster = Cluster()
    try:
        yield cluster
        await cluster.all_returned()
    finally:
        await cluster.close()
    for pool in cluster.pools:
        assert _idle(pool)


def _idle(pool: BlockPool) -> bool:
    return pool.free == pool.total
