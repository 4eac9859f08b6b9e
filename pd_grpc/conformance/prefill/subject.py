"""A P under test: what it is, and what a case has in hand to try it with."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from pd_grpc.conformance.calls import answer
from pd_grpc.conformance.case import Broken, NotApplicable, answer_s, expect, expect_equal
from pd_grpc.conformance.channels import connect, new_epoch
from pd_grpc.conformance.kv import KvRule
from pd_grpc.conformance.prefill.caller import Caller
from pd_grpc.conformance.prefill.decode import KitDecode, KitTimes
from pd_grpc.conformance.request import BUDGET_S, Request, prompt_of
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import layout_from_proto
from pd_grpc.protocol.rpc import address
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    layout_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)

LOOK_AGAIN_S = 0.01
"""Between two looks at P's pool."""

_FREE = (admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED)


class PrefillSubject:
    """A P, by its control endpoint."""

    def __init__(
        self,
        endpoint: str,
        info: inference_pb2.GetModelInfoResponse,
        channel: grpc.aio.Channel,
        listen: str,
    ) -> None:
        """`listen` is the address that the kit's Ds bind and are reached at."""
        self.endpoint = endpoint
        self.info = info
        self.listen = listen
        self.layout = layout_from_proto(info.layout)
        self.rule = KvRule(self.layout)
        self.server = admin_pb2.ServerInfo()
        """Empty where AdminService is not served."""
        self.left = False
        """Set by the case after which P exits."""
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)

    @property
    def patience_s(self) -> float:
        t = KitTimes()
        return 6 * answer_s() + 3 * (2 * t.heartbeat + t.lease + t.grace)

    @property
    def instance(self) -> types_pb2.Instance:
        """Who P is, as far as its AdminService tells."""
        return self.server.instance

    @property
    def total_blocks(self) -> int:
        """Blocks of P's pool; 0 where P does not say."""
        return sum(count.blocks for count in self.server.blocks)

    async def look(self) -> bool:
        """Ask P how it is; whether it says so."""
        request = admin_pb2.GetServerInfoRequest()
        try:
            found = await self._admin.GetServerInfo(request, timeout=answer_s())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise
        self.server = found.server
        return True

    @contextlib.asynccontextmanager
    async def case(self, case_id: str, transcript: Transcript) -> AsyncIterator[PrefillHand]:
        """What a case has in hand. At its end no request may be in flight on P, and every block be
        back, as far as P's AdminService tells."""
        async with connect(self.endpoint) as channel:
            hand = PrefillHand(self, case_id, transcript, transcript.channel(channel))
            try:
                yield hand
                await hand.end_calls()
                if not self.left:
                    await self.settled()
            finally:
                await hand.leave()

    async def settled(self) -> None:
        """Broken when P still holds a block or a request that nobody waits for any more."""
        limit = answer_s() + KitTimes().grace
        until = time.monotonic() + limit
        while await self.look():
            held = sum(c.blocks for c in self.server.blocks if c.state not in _FREE)
            flying = sum(c.transfers for c in self.server.transfers)
            if not held and not flying:
                return
            if time.monotonic() > until:
                raise Broken(
                    f"expected every block of P free and no request in flight {limit:g} s after "
                    f"the case; got {held} blocks held and {flying} in flight"
                )
            await asyncio.sleep(LOOK_AGAIN_S)


@contextlib.asynccontextmanager
async def open_prefill(endpoint: str, listen: str = "127.0.0.1") -> AsyncIterator[PrefillSubject]:
    """Meet a P: read its model, see that it is idle. Broken, or grpc.RpcError, when that much does
    not work."""
    async with connect(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GetModelInfoRequest()
        info = await answer(stub.GetModelInfo(request, timeout=answer_s()), "GetModelInfo answered")
        subject = PrefillSubject(endpoint, info, channel, listen)
        await subject.settled()
        yield subject


class PrefillHand:
    """What a case has in hand: Ds of its own, and requests nobody else has."""

    def __init__(
        self, subject: PrefillSubject, case_id: str, transcript: Transcript, channel: Any
    ) -> None:
        self.subject = subject
        self.rule = subject.rule
        self.layout = subject.layout
        self.transcript = transcript
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._case = f"{case_id.lower()}-{secrets.token_hex(4)}"
        self._numbers = 0
        self._decodes: list[KitDecode] = []
        self._callers: list[Caller] = []

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layout.block_size

    @property
    def total_blocks(self) -> int:
        """Blocks of P's pool. NotApplicable where P does not say."""
        if not self.subject.total_blocks:
            raise NotApplicable("P's AdminService does not tell the size of its pool")
        return self.subject.total_blocks

    def name(self, what: str) -> str:
        """A name that nothing else has."""
        self._numbers += 1
        return f"kit-{self._case}-{what}{self._numbers}"

    async def decode(
        self,
        times: KitTimes | None = None,
        shards: list[layout_pb2.Shard] | None = None,
        name: str = "",
    ) -> KitDecode:
        """A D that P does not know yet."""
        shards = shards or [layout_pb2.Shard(tp_size=1)]
        d = KitDecode(
            name or self.name("d"), new_epoch(), self.transcript, times or KitTimes(), shards
        )
        self._decodes.append(d)
        await d.start(self.subject.listen)
        return d

    def closed_endpoint(self) -> str:
        """An address where nobody listens."""
        family = socket.AF_INET6 if ":" in self.subject.listen else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((self.subject.listen, 0))
            return address(self.subject.listen, probe.getsockname()[1])

    def request(self, tokens: int = 0, **fields: Any) -> Request:
        """A request that nobody else has made, `tokens` long: by default two blocks and a half."""
        transfer_id = f"{self.name('t')}-{secrets.token_hex(16)}"
        prompt = prompt_of(
            transfer_id, tokens or self.block_size * 5 // 2 or 1, self.subject.info.vocab_size
        )
        return Request(**{"transfer_id": transfer_id, "prompt": prompt, **fields})

    def call(
        self,
        request: Request,
        *decodes: KitDecode | str,
        timeout_s: float = BUDGET_S,
        **fields: Any,
    ) -> Caller:
        """Prefill, with the Ds that may have it; `fields` replace those of the message."""
        targets = [
            prefill_pb2.DecodeTarget(name=d.instance.name, endpoint=d.endpoint)
            if isinstance(d, KitDecode)
            else prefill_pb2.DecodeTarget(endpoint=d)
            for d in decodes
        ]
        message = request.prefill(**{"decodes": targets, **fields})
        return self.call_with(message, timeout_s)

    def call_with(self, message: prefill_pb2.PrefillRequest, timeout_s: float = BUDGET_S) -> Caller:
        """Prefill with a message as it is."""
        caller = Caller(self.prefill.Prefill(message, timeout=timeout_s), self.transcript)
        self._callers.append(caller)
        return caller

    async def refused(
        self, request: Request, reason: Reason, what: str, field: str = "", **fields: Any
    ) -> Fault:
        """A Prefill that must be refused before any D is asked; `field` must be named where the
        reason is BAD_REQUEST."""
        d = await self.decode()
        fault = await self.call(request, d, **fields).fails(reason, what)
        expect(not d.hello.seen, "no D asked for a request that is refused", d.hello.seen)
        if field:
            named = [violation.field for violation in fault.fields]
            expect(field in named, f"a violation of {field}", named)
        return fault

    async def first_token(self, request: Request) -> int:
        """The first token that P computes for the prompt of a request, with another ref."""
        d = await self.decode()
        twin = self.request(prompt=request.prompt, sampling=request.sampling)
        await self.call(twin, d).handed_off()
        return d.first_token.seen[0].tokens[0].token_id

    def answer(self, request: Request) -> list[int]:
        """Every token of the answer by the sim's rule; NotApplicable where P does not follow it."""
        if not self.rule.is_sim:
            raise NotApplicable("the kit knows no other answers than the sim model's")
        return self.rule.answer(request.prompt, request.sampling, request.generated)

    def check_first_token(self, request: Request, d: KitDecode) -> None:
        """Broken unless D has been given the right first token, last of all."""
        token = d.first_token.seen[-1].tokens[0].token_id
        expect(token < self.subject.info.vocab_size, "a token of the vocabulary", token)
        if self.rule.is_sim:
            expect_equal(token, self.answer(request)[0], "the first token")

    async def gone(self, ref: types_pb2.TransferRef) -> None:
        """Wait until P has ended a request. NotApplicable where its AdminService does not tell."""
        until = time.monotonic() + answer_s()
        request = admin_pb2.ListTransfersRequest()
        while True:
            try:
                found = await self.admin.ListTransfers(request, timeout=answer_s())
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise NotApplicable("P's AdminService does not list its transfers") from None
                raise
            if all(each.ref.transfer_id != ref.transfer_id for each in found.transfers):
                return
            expect(time.monotonic() < until, f"{ref.transfer_id} to end on P", "it has not")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def end_calls(self) -> None:
        """Let every D answer, and leave every call that is still open."""
        for d in self._decodes:
            d.go()
        for caller in self._callers:
            await caller.leave()

    async def leave(self) -> None:
        """End whatever the case left open."""
        await self.end_calls()
        for d in self._decodes:
            await d.leave()
