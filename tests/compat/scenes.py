"""One request between a real P and a real D, with a middleman on everything that they say.

A scene is an edit and what becomes of the request under it. At its end every block is back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.decode.server import DecodeServer
from pd_grpc.engine.base import DecodeSlot, PrefillChunk, Sampled, TokenLogprob
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.v1 import (
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    transfer_pb2,
    types_pb2,
)
from tests.compat.middleman import Cut, Edit, Middleman, between
from tests.prefill.cluster import Cluster, Request, answer_to, request_to, running
from tests.waiting import until

PATIENCE_S = 10.0
"""The budget of a request here. Every scene but the one that waits for it ends long before."""
SETTLE_S = 0.2
"""How long a D that has not heard of P's part is given to hear of its end; then the client leaves,
as it does behind a router."""


@dataclass
class Ended:
    """How a request ended."""

    request: Request
    prefill: Fault | TransportFault | None = None
    """None when P said that it is handed over."""
    client: Fault | TransportFault | None = None
    """None when the answer is complete."""
    left: bool = False
    """The client left, because P had failed and D did not say so."""
    tokens: list[int] = field(default_factory=list)
    finish: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)
    handed: prefill_pb2.HandedOff = field(default_factory=prefill_pb2.HandedOff)

    @property
    def right(self) -> bool:
        """Whether the answer is complete and what it must be."""
        usage = types_pb2.Usage(
            prompt_tokens=len(self.request.tokens),
            completion_tokens=len(self.tokens),
            cached_tokens=self.usage.cached_tokens,
        )
        whole = self.client is None and not self.left
        if self.request.sampling.HasField("logprobs"):
            whole = whole and [_told(p) for p in self.logprobs] == [_meant(t) for t in self.tokens]
        return whole and self.tokens == answer_to(self.request) and self.usage == usage


def _meant(token_id: int) -> list[tuple[int, float]]:
    sure = _half_sure(Sampled(token_id))
    return [(t.token_id, t.logprob) for t in (sure.top[0], *sure.top)]


def _told(position: types_pb2.PositionLogprobs) -> list[tuple[int, float]]:
    return [(t.token_id, t.logprob) for t in (position.chosen, *position.top)]


class HalfSure(SimEngine):
    """Finds its token as likely as another one, and has every feature by its own account."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.features = frozenset(FEATURES)

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        chosen = super().prefill(batch, on_layer)
        return [token and _half_sure(token) for token in chosen]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        return [_half_sure(token) for token in super().decode(batch)]


def _half_sure(sampled: Sampled) -> Sampled:
    half = math.log(0.5)
    other = TokenLogprob(sampled.token_id ^ 1, half)
    return Sampled(sampled.token_id, half, (TokenLogprob(sampled.token_id, half), other))


class Scene:
    """P and D at work. P reaches D through the middleman alone; the client speaks to both."""

    def __init__(
        self, cluster: Cluster, p: PrefillServer, d: DecodeServer, middleman: Middleman
    ) -> None:
        self.cluster = cluster
        self.p = p
        self.d = d
        self.middleman = middleman

    def request(self, **options: Any) -> Request:
        """A request for the D behind the middleman."""
        made = request_to(self.middleman.endpoint, **{"seed": 3, **options})
        made.decodes[0].name = "d"
        return made

    async def run(self, request: Request) -> Ended:
        """Both legs, to their ends."""
        ended = Ended(request)
        client = asyncio.create_task(self.client_leg(request, ended))
        await self.prefill_leg(request, ended)
        if ended.prefill is not None:
            await self.leave_in_vain(client, ended)
        await asyncio.wait([client])
        return ended

    async def leave_in_vain(self, client: asyncio.Task[None], ended: Ended) -> None:
        """Once P has ended: let the client leave a D that knows nothing of P's part."""
        await asyncio.wait([client], timeout=SETTLE_S)
        found = self.d.machine.find(ended.request.ref.transfer_id, 0)
        if not client.done() and found is not None and found.prefill is None:
            ended.left = True
            client.cancel()

    async def prefill_leg(self, request: Request, ended: Ended) -> None:
        """The call of P, to its end."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self.cluster.channel(self.p.endpoint))
        message = request.prefill()
        message.request_id = "r-1"
        try:
            async for said in stub.Prefill(message, timeout=PATIENCE_S):
                if said.HasField("handed_off"):
                    ended.handed = said.handed_off
        except grpc.aio.AioRpcError as error:
            ended.prefill = rpc.read_error(error)

    async def client_leg(self, request: Request, ended: Ended) -> None:
        """The call of D, to its end."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.cluster.channel(self.d.endpoint))
        try:
            async for said in stub.Generate(request.generate(), timeout=PATIENCE_S):
                ended.tokens += said.token_ids
                ended.logprobs += said.logprobs
                ended.finish, ended.usage = said.finish_reason, said.usage
        except grpc.aio.AioRpcError as error:
            ended.client = rpc.read_error(error)

    async def until_computing(self, request: Request) -> None:
        """Wait until P computes a request."""
        await until(lambda: self._state(request) == types_pb2.TRANSFER_STATE_COMPUTING)

    def _state(self, request: Request) -> types_pb2.TransferState | None:
        listed = self.p.view.transfers()
        mine = (t for t in listed if t.ref.transfer_id == request.ref.transfer_id)
        return next((t.state for t in mine), None)


@asynccontextmanager
async def scene(
    edit: Edit, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[Scene]:
    """P and D with a middleman that edits; at the end every block is back."""
    async with running() as cluster:
        p = await cluster.prefill(name="p", **(prefill or {}))
        d = await cluster.decode(name="d", **(decode or {}))
        ways = {"DecodeService": d.endpoint, "TransferService": d.bulk.endpoint}
        async with between(ways) as middleman:
            middleman.edit = edit
            yield Scene(cluster, p, d, middleman)
            await cluster.all_returned()


# A chunk is half of what the engine computes at once.
_IN_PIECES = {"chunk_bytes": 4096, "chunk_tokens": 64, "sim_time_scale": 3.0}


async def plain(edit: Edit) -> Ended:
    """A request as most are."""
    async with scene(edit) as made:
        return await made.run(made.request())


async def in_pieces(edit: Edit) -> Ended:
    """KV in several chunks, over layers and over blocks."""
    async with scene(edit, _IN_PIECES) as made:
        return await made.run(made.request(tokens=300))


async def sampled(edit: Edit) -> Ended:
    """Every sampling field that is built has a value of its own."""
    options = {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 40,
        "min_tokens": 2,
        "stop": ["never said"],
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    async with scene(edit) as made:
        return await made.run(made.request(**options))


async def reopened(edit: Edit) -> Ended:
    """The stream breaks after an ack, and is opened again."""
    acks = 0

    def cut(message: Message) -> None:
        nonlocal acks
        if isinstance(message, transfer_pb2.TransferResponse) and message.HasField("ack"):
            acks += 1
            if acks == 1:
                raise Cut
        edit(message)

    async with scene(cut, _IN_PIECES) as made:
        return await made.run(made.request(tokens=300))


async def again(edit: Edit) -> Ended:
    """A prompt that begins as one before did, under a salt: D and P have its beginning."""
    salt = sampling_pb2.RequestScope(cache_salt=b"salt")
    async with scene(edit) as made:
        before = made.request()
        before.scope = salt
        first = await made.run(before)
        if not first.right:
            return first
        request = made.request()
        request.scope = salt
        request.tokens[30:] = [token - 1 for token in request.tokens[30:]]
        ended = await made.run(request)
        assert not ended.right or ended.usage.cached_tokens == 28
        return ended


async def with_logprobs(edit: Edit) -> Ended:
    """The client asks for log-probabilities, the first token's among them."""
    async with scene(edit, {"engine": HalfSure}, {"engine": HalfSure}) as made:
        return await made.run(made.request(logprobs=2))


async def with_features(edit: Edit) -> Ended:
    """Every sampling field that needs a feature has a value of its own."""
    async with scene(edit, {"engine": HalfSure}, {"engine": HalfSure}) as made:
        return await made.run(made.request(**{**FEATURES, "logprobs": 2}))


async def one_token(edit: Edit) -> Ended:
    """The first token is the last."""
    async with scene(edit) as made:
        return await made.run(made.request(max_tokens=1))


_SLOW = {"chunk_tokens": 64, "sim_time_scale": 100.0}


async def beating(edit: Edit) -> Ended:
    """P computes for several heartbeats."""
    beats = {"heartbeat_s": 0.1}
    async with scene(edit, {**_SLOW, **beats}, beats) as made:
        return await made.run(made.request())


async def slow(edit: Edit) -> Ended:
    """P computes for longer than the lease, so that heartbeats must renew it."""
    beats = {"heartbeat_s": 0.3, "lease_s": 1.5}
    slower = {"chunk_tokens": 64, "sim_time_scale": 400.0}
    async with scene(edit, {**slower, **beats}, beats) as made:
        return await made.run(made.request())


async def client_gone(edit: Edit) -> Ended:
    """The client leaves D while P computes, and P hears of it from D."""
    async with scene(edit, _SLOW) as made:
        ended = Ended(made.request())
        client = asyncio.create_task(made.client_leg(ended.request, ended))
        prefill = asyncio.create_task(made.prefill_leg(ended.request, ended))
        await made.until_computing(ended.request)
        client.cancel()
        ended.left = True
        await asyncio.wait([client, prefill])
        return ended


async def caller_gone(edit: Edit) -> Ended:
    """The caller of P leaves while it computes, and D hears of it from P."""
    async with scene(edit, _SLOW) as made:
        ended = Ended(made.request())
        client = asyncio.create_task(made.client_leg(ended.request, ended))
        prefill = asyncio.create_task(made.prefill_leg(ended.request, ended))
        await made.until_computing(ended.request)
        prefill.cancel()
        await asyncio.wait([prefill, client])
        return ended


async def drained(edit: Edit) -> Ended:
    """D drains while P computes, and finishes what it has."""
    async with scene(edit, _SLOW) as made:
        ended = Ended(made.request())
        legs = asyncio.create_task(made.run(ended.request))
        await made.until_computing(ended.request)
        made.d.drain(5.0)
        await asyncio.wait([legs])
        return legs.result()


async def p_leaves(edit: Edit) -> Ended:
    """P answers, then goes."""
    async with scene(edit) as made:
        ended = await made.run(made.request())
        await made.cluster.stop(made.p)
        return ended


async def d_leaves(edit: Edit) -> Ended:
    """D answers, then goes."""
    async with scene(edit) as made:
        ended = await made.run(made.request())
        await made.cluster.stop(made.d)
        return ended


Play = Callable[[Edit], Awaitable[Ended]]
