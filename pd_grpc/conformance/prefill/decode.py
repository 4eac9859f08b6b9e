"""The kit as D: sessions, grants, KV and first tokens of a P under test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pd_grpc.conformance.case import broken, expect_equal, within
from pd_grpc.conformance.channels import SERVER_OPTIONS
from pd_grpc.conformance.later import later
from pd_grpc.conformance.prefill.grant import Grant, block_ranges
from pd_grpc.conformance.prefill.session import Session
from pd_grpc.conformance.prefill.shard import IncomingKv, ShardService, Steps
from pd_grpc.conformance.prefill.step import Refused, Step, end_with, refusing
from pd_grpc.conformance.request import replaced
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault, bad_request
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import duration, layout_from_proto
from pd_grpc.protocol.refs import TransferKey, key_of, mint_id
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    layout_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)

M = TypeVar("M", bound=Message)

CONNECTION_LOST = TransportFault(Code.UNAVAILABLE, "the connection is lost")
"""What P sees of a D that has gone: a status without ErrorInfo."""


@dataclass(frozen=True)
class KitTimes:
    """What the kit's D announces in Welcome, in seconds."""

    heartbeat: float = 0.3
    lease: float = 0.9
    grace: float = 0.4
    kv_progress: float = 5.0
    first_token: float = 5.0
    attach: float = 5.0
    tombstone: float = 30.0


class KitDecode:
    """A D of the kit's, on ports of its own. It does what decode.proto and transfer.proto say;
    a case changes that through its steps, `welcome` and `grant`."""

    def __init__(
        self,
        name: str,
        epoch: int,
        transcript: Transcript,
        times: KitTimes,
        shards: list[layout_pb2.Shard],
    ) -> None:
        """`shards` say which layers each holds; their endpoints are filled in."""
        self.instance = types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_DECODE)
        self.times = times
        self.endpoint = ""
        self.shards = shards
        self.hello: Step[decode_pb2.Hello] = Step("Session", transcript)
        """Its `answer` replaces fields of Welcome."""
        self.allocate: Step[decode_pb2.AllocateRequest] = Step("Allocate", transcript)
        self.kv = Steps(transcript)
        self.first_token: Step[decode_pb2.SendFirstTokenRequest] = Step(
            "SendFirstToken", transcript
        )
        self.release: Step[decode_pb2.ReleaseRequest] = Step("Release", transcript)
        self.sessions: list[Session] = []
        """Every one that was welcomed, in order."""
        self.grants: dict[TransferKey, Grant] = {}
        self.streams: list[IncomingKv] = []
        """Every Transfer, in order."""
        self.cached_blocks: set[int] = set()
        """Logical blocks that it claims to hold of every prompt."""
        self.is_later = False
        """Whether its answers have fields of a later version."""
        self.layout = KvLayout("", "", 1, ())
        self._transcript = transcript
        self._ended: set[TransferKey] = set()
        self._servers: list[grpc.aio.Server] = []
        self._handlers: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._session_id = ""
        self._welcomed = asyncio.Event()

    async def start(self, host: str) -> None:
        """Listen: one port for control, one for each shard."""
        for index, shard in enumerate(self.shards):
            service = ShardService(index, self.kv, self.streams, self.find)
            add_shard = partial(transfer_pb2_grpc.add_TransferServiceServicer_to_server, service)
            shard.endpoint = await self._serve(host, add_shard)
        add_control = partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, _Control(self))
        self.endpoint = await self._serve(host, add_control)

    async def _serve(self, host: str, add: Callable[[Any], None]) -> str:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = rpc.bind(server, host, 0)
        add(self._transcript.server(server))
        await server.start()
        self._servers.append(server)
        return rpc.address(host, port)

    # What a case looks at

    @property
    def session(self) -> Session:
        """The newest session. Broken when P has opened none."""
        if not self.sessions:
            broken("a session of P's", "none")
        return self.sessions[-1]

    @property
    def token(self) -> decode_pb2.FirstToken:
        """The first token that came last. Broken unless it was one, and no more."""
        if not self.first_token.seen:
            broken("SendFirstToken", "none")
        sent = self.first_token.seen[-1]
        if len(sent.tokens) != 1:
            broken("one token in SendFirstToken", sent)
        return sent.tokens[0]

    async def joined(self, number: int = 1, seconds: float | None = None) -> Session:
        """The `number`-th session that was welcomed, from 1."""

        async def wait() -> None:
            while len(self.sessions) < number:
                self._welcomed.clear()
                await self._welcomed.wait()

        await within(seconds, wait(), f"session {number} of P's")
        return self.sessions[number - 1]

    async def granted(self, ref: types_pb2.TransferRef, seconds: float | None = None) -> Grant:
        """The grant of a transfer, once P has asked for it and been answered."""
        what = f"Allocate of {ref.transfer_id}"
        number = 1
        while key_of((await self.allocate.came(what, number, seconds)).ref) != key_of(ref):
            number += 1
        if key_of(ref) not in self.grants:
            broken("an Allocate that could be granted", "one that was refused")
        return self.grants[key_of(ref)]

    def transfers(self, number: int) -> list[IncomingKv]:
        """Every Transfer, in order. Broken unless there were so many."""
        expect_equal(len(self.streams), number, "the number of Transfers")
        return self.streams

    # What a case does

    def go(self) -> None:
        """Let everything pass."""
        for step in (self.hello, self.allocate, self.first_token, self.release, self.kv):
            step.go()

    def forget(self, ref: types_pb2.TransferRef) -> None:
        """Lose a transfer, without a word."""
        self.grants.pop(key_of(ref), None)

    def end(self, ref: types_pb2.TransferRef, fault: Fault, state: types_pb2.TransferState) -> None:
        """End a transfer, and tell P of it."""
        self.grants.pop(key_of(ref), None)
        self._ended.add(key_of(ref))
        whole = types_pb2.TransferRef()
        whole.CopyFrom(ref)
        whole.decode_epoch = self.instance.epoch
        ended = decode_pb2.TransferEnded(ref=whole, status=fault.status(), state=state)
        self.session.say(transfer_ended=ended)

    async def restart(self, epoch: int) -> None:
        """Be a new process under the same name and address, as P sees it."""
        self.instance.epoch = epoch
        self.grants.clear()
        self._session_id = ""
        self._cut = set(self._handlers)
        for handler in self._cut:
            handler.cancel()
        if self._cut:
            await asyncio.wait(self._cut)

    async def leave(self) -> None:
        """Say goodbye and close the ports."""
        self.go()
        for session in self.sessions:
            if not session.over:
                session.say(goodbye=decode_pb2.Goodbye(reason="the case is over"))
                session.end()
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        while self._handlers:
            await asyncio.wait(list(self._handlers))

    # What D does

    @contextlib.asynccontextmanager
    async def handling(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """A call of P's; where `restart` cuts it off it ends as the connection would."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            async with refusing(context):
                yield
        except asyncio.CancelledError:
            if task not in self._cut:
                raise
            await end_with(context, CONNECTION_LOST)
        finally:
            self._handlers.discard(task)

    async def meet(
        self,
        requests: AsyncIterator[decode_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve Session."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise Refused(Fault(Reason.WRONG_STATE, "hello comes first", {"state": "no hello"}))
        await self.hello.take(first.hello)
        if not first.hello.layouts:
            raise Refused(bad_request([FieldError("hello.layouts", "must have at least one")]))
        session = Session(mint_id("s"), first.hello, self._knows)
        for older in self.sessions:
            older.end(Fault(Reason.SUPERSEDED, "a newer session of this P began"))
        welcome = self._welcome(session.session_id, first.hello)
        self.layout = _layout(welcome)
        self.sessions.append(session)
        self._session_id = session.session_id
        self._welcomed.set()
        session.say(welcome=welcome)
        await session.serve(requests, context)

    def _welcome(self, session_id: str, hello: decode_pb2.Hello) -> decode_pb2.Welcome:
        t = self.times
        welcome = decode_pb2.Welcome(
            instance=self.instance,
            session_id=session_id,
            layout=hello.layouts[0],
            transport=layout_pb2.TRANSPORT_INLINE,
            shards=self.shards,
            lease=duration(t.lease),
            grace=duration(t.grace),
            heartbeat=duration(t.heartbeat),
            kv_progress=duration(t.kv_progress),
            first_token=duration(t.first_token),
            attach=duration(t.attach),
            tombstone=duration(t.tombstone),
        )
        return self._later(replaced(welcome, self.hello.answer))

    async def grant(self, request: decode_pb2.AllocateRequest) -> decode_pb2.AllocateResponse:
        """Serve Allocate."""
        await self.allocate.take(request)
        self._check(request.session_id, request.ref)
        self._check_room(request)
        key = key_of(request.ref)
        if key in self._ended:
            raise Refused(Fault(Reason.RELEASED, "the transfer has ended"))
        if key not in self.grants:
            response = self._granted(request)
            self.grants[key] = Grant(response.grant_id, request, response, self.layout)
        return self.grants[key].response

    def _granted(self, request: decode_pb2.AllocateRequest) -> decode_pb2.AllocateResponse:
        response = decode_pb2.AllocateResponse(
            grant_id=mint_id("g"),
            transport=layout_pb2.TRANSPORT_INLINE,
            lease=duration(self.times.lease),
        )
        if request.kv_needed:
            blocks = range(self.layout.blocks_for(request.prompt_tokens))
            response.wanted.extend(block_ranges(set(blocks) - self.cached_blocks))
            response.shards.extend(self.shards)
        return self._later(replaced(response, self.allocate.answer))

    async def take_first_token(
        self, request: decode_pb2.SendFirstTokenRequest
    ) -> decode_pb2.SendFirstTokenResponse:
        """Serve SendFirstToken."""
        await self.first_token.take(request)
        self._check(request.session_id, request.ref)
        grant = self.grants.get(key_of(request.ref))
        if grant is None or grant.grant_id != request.grant_id:
            raise Refused(Fault(Reason.UNKNOWN_TRANSFER, "no such grant"))
        grant.first_token = request
        state = types_pb2.TRANSFER_STATE_RECEIVING
        if any(token.finish_reason for token in request.tokens):
            state = types_pb2.TRANSFER_STATE_FINISHED
        elif grant.complete:
            state = types_pb2.TRANSFER_STATE_DECODING
        answer = decode_pb2.SendFirstTokenResponse(state=state)
        return self._later(replaced(answer, self.first_token.answer))

    async def take_back(self, request: decode_pb2.ReleaseRequest) -> decode_pb2.ReleaseResponse:
        """Serve Release."""
        await self.release.take(request)
        self._check(request.session_id, request.ref)
        self.grants.pop(key_of(request.ref), None)
        self._ended.add(key_of(request.ref))
        state = types_pb2.TRANSFER_STATE_RELEASED
        if request.cause.code:
            state = types_pb2.TRANSFER_STATE_FAILED
        return decode_pb2.ReleaseResponse(state=state)

    def find(self, open_: transfer_pb2.TransferOpen) -> Grant:
        """The grant that a Transfer means. Fault when there is none."""
        try:
            self._check(open_.session_id, open_.ref)
        except Refused as refused:
            if isinstance(refused.refusal, Fault):
                raise refused.refusal from None
            raise
        grant = self.grants.get(key_of(open_.ref))
        if grant is None or grant.grant_id != open_.grant_id:
            raise Fault(Reason.UNKNOWN_TRANSFER, "no such grant")
        return grant

    def _later(self, message: M) -> M:
        return later(message) if self.is_later else message

    def _knows(self, grant_id: str) -> bool:
        return any(grant.grant_id == grant_id for grant in self.grants.values())

    def _check_room(self, request: decode_pb2.AllocateRequest) -> None:
        """Refused where it asks for more than Welcome has said."""
        needed = request.prompt_tokens + request.max_new_tokens
        total = self.hello.answer.get("max_model_len", needed)
        if needed > total:
            metadata = {"needed": str(needed), "total": str(total), "unit": "tokens"}
            raise Refused(Fault(Reason.TOO_LARGE, "longer than D takes", metadata))

    def _check(self, session_id: str, ref: types_pb2.TransferRef) -> None:
        if session_id != self._session_id:
            raise Refused(Fault(Reason.NO_SESSION, "not the newest session"))
        if ref.decode_epoch != self.instance.epoch:
            raise Refused(Fault(Reason.STALE_EPOCH, "the ref means another process"))


def _layout(welcome: decode_pb2.Welcome) -> KvLayout:
    """What P offered, or a case has put in its place. Refused where it cannot be read."""
    try:
        return layout_from_proto(welcome.layout)
    except ValueError as error:
        raise Refused(bad_request([FieldError("hello.layouts", str(error))])) from None


class _Control(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService of one D."""

    def __init__(self, d: KitDecode) -> None:
        self._d = d

    async def Session(
        self,
        request_iterator: AsyncIterator[decode_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async with self._d.handling(context):
            await self._d.meet(request_iterator, context)

    async def Allocate(
        self, request: decode_pb2.AllocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AllocateResponse:
        async with self._d.handling(context):
            return await self._d.grant(request)
        raise AssertionError("refused")

    async def SendFirstToken(
        self,
        request: decode_pb2.SendFirstTokenRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> decode_pb2.SendFirstTokenResponse:
        async with self._d.handling(context):
            return await self._d.take_first_token(request)
        raise AssertionError("refused")

    async def Release(
        self, request: decode_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReleaseResponse:
        async with self._d.handling(context):
            return await self._d.take_back(request)
        raise AssertionError("refused")
