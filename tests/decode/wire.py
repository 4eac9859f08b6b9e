"""A real D over sockets, and a P that is nothing but protobuf messages and a second sim engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import grpc
import grpc.aio
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.decode.service import DecodeInference
from pd_grpc.engine.base import PrefillChunk, Sampled, SampleSpec
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.messages import layout_to_proto, sampling_from_proto
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2_grpc,
    layout_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)
from tests.decode.messages import BLOCK, Request
from tests.waiting import until

CALL_S = 60.0
SIM: dict[str, Any] = {
    "name": "d",
    "engine": "sim",
    "num_blocks": 24,
    "block_size": BLOCK,
    "chunk_tokens": 4 * BLOCK,
    "sim_vocab": 1000,
    "sim_layers": 3,
}


class GatedEngine(SimEngine):
    """Decodes only while its gate is open."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def decode(self, batch: Any) -> list[Sampled]:
        self.entered.set()
        assert self.gate.wait(CALL_S)
        return super().decode(batch)


@dataclass
class Wire:
    """A running D and stubs to it."""

    server: DecodeServer
    channel: grpc.aio.Channel
    config: DecodeConfig
    names: int = 0
    peers: list[RawPrefill] = field(default_factory=list)

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceStub:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    def request(self, **fields: Any) -> Request:
        """A request that means this D."""
        self.names += 1
        values = {"transfer_id": f"t-{self.names}", "decode_epoch": self.server.instance.epoch}
        return Request(**{**values, **fields})

    def answer(self, request: Request) -> list[int]:
        """What sim must say."""
        sampling = sampling_from_proto(request.sampling)
        return sim_answer(request.prompt, sampling, self.config, request.generated)

    def generate(self, request: Request, timeout_s: float = CALL_S, **fields: Any) -> Any:
        """A client's leg."""
        return self.inference.Generate(request.generate(**fields), timeout=timeout_s)

    async def prefill(self, name: str = "p", **fields: Any) -> RawPrefill:
        """A P with a session."""
        p = RawPrefill(self, name, **fields)
        self.peers.append(p)
        await p.join()
        return p

    async def state(self, request: Request) -> str:
        """As an operator sees it."""
        ask = admin_pb2.GetTransferRequest(transfer_id=request.transfer_id)
        answer = await self.admin.GetTransfer(ask, timeout=CALL_S)
        name = types_pb2.TransferState.Name(answer.transfer.state)
        return name.removeprefix("TRANSFER_STATE_")

    async def until_state(self, request: Request, state: str) -> None:
        """Wait until a request has come so far."""
        machine = self.server.machine

        def there() -> bool:
            found = machine.find(request.transfer_id, 0)
            return found is not None and found.state.name == state

        await until(there)
        assert await self.state(request) == state

    async def settled(self) -> None:
        """Nothing is in flight, and every block is free."""
        pool = self.server.pool
        await until(lambda: pool.free == pool.total)
        pool.check()
        listed = await self.admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=CALL_S)
        assert list(listed.transfers) == []


@contextlib.asynccontextmanager
async def wire(
    engine: Callable[[DecodeConfig], SimEngine] = SimEngine,
    provider: TracerProvider | None = None,
    inference: type[DecodeInference] = DecodeInference,
    **settings: Any,
) -> AsyncIterator[Wire]:
    """A D that must have all its blocks back before it is stopped."""
    config = DecodeConfig(**{**SIM, **settings})
    server = await start_decode(
        config, engine(config), tracer_provider=provider, inference=inference
    )
    try:
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            running = Wire(server, channel, config)
            yield running
            for peer in running.peers:
                await peer.close()
            await running.settled()
    finally:
        await server.stop()


async def tokens_of(call: Any) -> list[int]:
    """Every token a client's leg shows."""
    return [token async for message in call for token in message.token_ids]


async def fault_of(call: Any) -> Fault:
    """Why a call failed; AssertionError when it did not or said nothing of ours."""
    try:
        if hasattr(call, "write"):
            while await call.read():
                pass
        elif hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        fault = read_error(error)
        assert isinstance(fault, Fault), fault
        return fault
    raise AssertionError("the call did not fail")


class RawPrefill:
    """A P: raw stubs, and an engine of its own to compute KV with."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        epoch: int = 10,
        shards: Sequence[layout_pb2.Shard] = (),
    ) -> None:
        """`shards` are what it says of itself; whatever they are it has all KV."""
        self.wire = wire
        self.instance = types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_PREFILL)
        self.channel = grpc.aio.insecure_channel(wire.server.endpoint)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self.channel)
        self.bulk: dict[str, grpc.aio.Channel] = {}
        self.shards = shards
        self.welcome = decode_pb2.Welcome()
        self.heard: list[decode_pb2.SessionResponse] = []
        self.session: Any = None
        self.engine = SimEngine(wire.config.model_copy(update={"tp": 1, "pp": 1}))
        self._listener: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Open a session, and go on listening."""
        self.session = self.decode.Session()
        hello = decode_pb2.Hello(
            instance=self.instance,
            layouts=[layout_to_proto(self.engine.layout)],
            shards=self.shards,
        )
        await self.session.write(decode_pb2.SessionRequest(hello=hello))
        first = await self.session.read()
        assert isinstance(first, decode_pb2.SessionResponse), first
        self.welcome = first.welcome
        self._listener = asyncio.create_task(self._listen(self.session))

    async def _listen(self, session: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while isinstance(message := await session.read(), decode_pb2.SessionResponse):
                self.heard.append(message)

    async def close(self) -> None:
        """The process is gone."""
        if self.session is not None:
            self.session.cancel()
        if self._listener is not None:
            await self._listener
        for channel in self.bulk.values():
            await channel.close(None)
        await self.channel.close(None)

    def allocate(self, request: Request, timeout_s: float = CALL_S, **fields: Any) -> Any:
        message = request.allocate(self.welcome.session_id, **fields)
        return self.decode.Allocate(message, timeout=timeout_s)

    def first_token(self, request: Request, grant_id: str, token: int, finish: int = 0) -> Any:
        message = decode_pb2.SendFirstTokenRequest(
            session_id=self.welcome.session_id,
            ref=request.ref,
            grant_id=grant_id,
            tokens=[decode_pb2.FirstToken(token_id=token)],
        )
        message.tokens[0].finish_reason = finish  # type: ignore[assignment]
        return self.decode.SendFirstToken(message, timeout=CALL_S)

    def release(self, request: Request, cause: Fault | None = None) -> Any:
        message = decode_pb2.ReleaseRequest(
            session_id=self.welcome.session_id,
            ref=request.ref,
            cause=None if cause is None else cause.status(),
        )
        return self.decode.Release(message, timeout=CALL_S)

    def compute(self, request: Request) -> tuple[int, list[transfer_pb2.KvChunk]]:
        """Prefill in blocks that lie backwards; returns the first token and all KV."""
        tokens = request.tokens
        table = list(reversed(range(-(-len(tokens) // BLOCK))))
        spec = SampleSpec(
            sampling_from_proto(request.sampling), len(tokens), len(request.generated)
        )
        (sampled,) = self.engine.prefill(
            [PrefillChunk(tuple(tokens), 0, table, spec)], lambda group, layer: None
        )
        assert sampled is not None
        return sampled.token_id, self._chunks(table)

    def _chunks(self, table: list[int]) -> list[transfer_pb2.KvChunk]:
        """The KV layer by layer, at most two blocks at a time."""
        found = []
        groups = enumerate(self.engine.layout.groups)
        for g, layer in [(g, layer) for g, group in groups for layer in range(group.layers)]:
            for start in range(0, len(table), 2):
                blocks = table[start : start + 2]
                payload = b"".join(self.engine.memory.read(blocks, g, layer, 1))
                found.append(
                    transfer_pb2.KvChunk(
                        group=g,
                        layer_start=layer,
                        layer_count=1,
                        block_start=start,
                        block_count=len(blocks),
                        crc32c=google_crc32c.value(payload),
                        payload=payload,
                    )
                )
        return found

    async def open(
        self,
        request: Request,
        grant: decode_pb2.AllocateResponse,
        shard: int = 0,
        sender: layout_pb2.Shard | None = None,
        sends: layout_pb2.KvPart | None = None,
    ) -> Any:
        """A Transfer that has been opened; returns the call."""
        endpoint = grant.shards[shard].endpoint
        if endpoint not in self.bulk:
            self.bulk[endpoint] = grpc.aio.insecure_channel(endpoint)
        call = transfer_pb2_grpc.TransferServiceStub(self.bulk[endpoint]).Transfer(timeout=CALL_S)
        message = transfer_pb2.TransferOpen(
            session_id=self.welcome.session_id,
            ref=request.ref,
            grant_id=grant.grant_id,
            shard_index=shard,
            sender=sender,
            sends=sends,
        )
        await call.write(transfer_pb2.TransferRequest(open=message))
        return call

    async def send_kv(
        self,
        request: Request,
        grant: decode_pb2.AllocateResponse,
        chunks: list[transfer_pb2.KvChunk],
        **opening: Any,
    ) -> None:
        """All KV of a grant, or of one stream of several, `opening` says which."""
        call = await self.open(request, grant, **opening)
        opened = await call.read()
        assert opened.HasField("opened")
        for chunk in chunks:
            await call.write(transfer_pb2.TransferRequest(chunk=chunk))
            ack = await call.read()
            assert ack.ack.ranges[0].block_start == chunk.block_start
        end = transfer_pb2.TransferEnd(
            chunks=len(chunks), bytes=sum(len(c.payload) for c in chunks)
        )
        await call.write(transfer_pb2.TransferRequest(end=end))
        completed = await call.read()
        assert completed.completed.bytes == end.bytes
        assert not await call.read(), "nothing follows"
        assert await call.code() is grpc.StatusCode.OK

    async def hand_over(self, request: Request) -> None:
        """Everything P does for a request."""
        grant = await self.allocate(request)
        token, chunks = self.compute(request)
        await self.first_token(request, grant.grant_id, token)
        await self.send_kv(request, grant, chunks)

    async def told_of(self, request: Request) -> decode_pb2.TransferEnded:
        """What D says of its end."""

        def found() -> list[decode_pb2.TransferEnded]:
            ended = [m.transfer_ended for m in self.heard if m.HasField("transfer_ended")]
            return [e for e in ended if e.ref == request.ref]

        await until(lambda: bool(found()))
        return found()[0]
