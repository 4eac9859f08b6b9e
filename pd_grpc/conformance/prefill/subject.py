"""A P under test: what it is, and what a case has in hand to try it with."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pd_grpc.conformance.calls import answer, if_served
from pd_grpc.conformance.case import (
    NotApplicable,
    answer_s,
    eventually,
    expect,
    expect_equal,
    parsed,
)
from pd_grpc.conformance.channels import connect, new_epoch
from pd_grpc.conformance.kv import KvRule
from pd_grpc.conformance.names import Names
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

UNTOLD = 2**31
"""Of a limit that P does not tell."""
MAX_NEW_TOKENS = 8
"""That a request of the kit asks for."""
HOP_MARGIN_S = 0.1
"""A hop answers so long before its budget ends."""

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
        self.layout = parsed(layout_from_proto, info.layout, "the layout of GetModelInfo")
        self.rule = KvRule(self.layout)
        self.server = admin_pb2.ServerInfo()
        """Empty where AdminService is not served."""
        self.left = False
        """Set by the case after which P exits."""
        self.undisturbed_s: float | None = None
        """How long a request takes that nothing holds up, once a case has measured it."""
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

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have. NotApplicable where P does not say."""
        if not self.info.max_model_len:
            raise NotApplicable("P's GetModelInfo does not tell max_model_len")
        return int(self.info.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. NotApplicable where P does not say."""
        if not self.info.vocab_size:
            raise NotApplicable("P's GetModelInfo does not tell vocab_size")
        return int(self.info.vocab_size)

    async def look(self) -> admin_pb2.ServerInfo:
        """Ask P how it is. NotApplicable where it does not say."""
        call = self._admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=answer_s())
        self.server = (await if_served(call, "GetServerInfo")).server
        return self.server

    @property
    def held_blocks(self) -> int:
        """Blocks of P's that are not free, when it was looked at last."""
        return sum(c.blocks for c in self.server.blocks if c.state not in _FREE)

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

        def idle(server: admin_pb2.ServerInfo) -> bool:
            return not self.held_blocks and not sum(c.transfers for c in server.transfers)

        limit = answer_s() + KitTimes().grace
        what = f"every block of P free and no request in flight {limit:g} s after the case"
        with contextlib.suppress(NotApplicable):
            await eventually(self.look, idle, what, limit)


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
        self.name = Names(case_id)
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

    def blocks(self, number: float) -> int:
        """Tokens of so many blocks. NotApplicable where P takes no prompt so long."""
        tokens = int(number * self.block_size)
        if tokens > self.longest_prompt:
            raise NotApplicable(
                f"it takes a prompt of {tokens} tokens, and P takes {self.longest_prompt}"
            )
        return tokens

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that P's pool and model have room for, with the output that
        `request` asks for; as far as P tells."""
        pool = self.subject.total_blocks * self.block_size
        model = self.subject.info.max_model_len
        return min(pool or UNTOLD, model - MAX_NEW_TOKENS if model else UNTOLD)

    def filling(self, most: int) -> tuple[int, int]:
        """So many prompts of so many tokens each, two at least, leave no room in P's pool for
        another. NotApplicable where it takes more than `most`, or P does not tell."""
        blocks = min(self.total_blocks // 2, self.longest_prompt // self.block_size)
        if not blocks or self.total_blocks // blocks > most:
            raise NotApplicable(
                f"P's pool has {self.total_blocks} blocks, and a prompt takes {blocks} at most"
            )
        return self.total_blocks // blocks, blocks * self.block_size

    def request(self, tokens: int = 0, **fields: Any) -> Request:
        """A request that nobody else has made, `tokens` long: by default two blocks and a half."""
        transfer_id = f"{self.name('t')}-{secrets.token_hex(16)}"
        prompt = self.tokens(tokens or self.block_size * 5 // 2 or 1, transfer_id)
        return Request(**{"transfer_id": transfer_id, "prompt": prompt, **fields})

    def tokens(self, number: int, name: str = "") -> list[int]:
        """So many token ids that nobody else has sent."""
        return prompt_of(name or self.name("tokens"), number, self.subject.info.vocab_size)

    async def brief_s(self) -> float:
        """A budget within which P does all of its part of a request, and which is soon over."""
        if self.subject.undisturbed_s is None:
            began = time.monotonic()
            await self.call(self.request(), await self.decode()).handed_off()
            self.subject.undisturbed_s = time.monotonic() - began
        return 3 * self.subject.undisturbed_s + HOP_MARGIN_S + answer_s() / 20

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
        return int(d.token.token_id)

    def answer(self, request: Request) -> list[int]:
        """Every token of the answer by the sim's rule; NotApplicable where P does not follow it."""
        if not self.rule.is_sim:
            raise NotApplicable("the kit knows no other answers than the sim model's")
        return self.rule.answer(request.prompt, request.sampling, request.generated)

    def check_first_token(self, request: Request, d: KitDecode) -> None:
        """Broken unless D has been given the right first token, last of all."""
        token = d.token.token_id
        size = self.subject.info.vocab_size
        expect(not size or token < size, "a token of the vocabulary", token)
        if self.rule.is_sim:
            expect_equal(token, self.answer(request)[0], "the first token")

    async def gone(self, ref: types_pb2.TransferRef) -> None:
        """Wait until P has ended a request. NotApplicable where its AdminService does not tell."""

        async def flying() -> list[str]:
            call = self.admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=answer_s())
            found: admin_pb2.ListTransfersResponse = await if_served(call, "ListTransfers")
            return [each.ref.transfer_id for each in found.transfers]

        ended = f"{ref.transfer_id} ended on P"
        await eventually(flying, lambda ids: ref.transfer_id not in ids, ended)

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
