"""A D under test: what it announced, and what a case has in hand to try it with."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from pd_grpc.conformance.calls import answer
from pd_grpc.conformance.case import (
    Broken,
    NotApplicable,
    answer_s,
    eventually,
    expect,
    parsed,
)
from pd_grpc.conformance.channels import CHANNEL_OPTIONS, connect, new_epoch
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.kv import KvRule
from pd_grpc.conformance.names import Names
from pd_grpc.conformance.request import BUDGET_S, Request, prompt_of
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.messages import layout_from_proto, seconds
from pd_grpc.v1 import (
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)

_LONGEST_S = 600.0
_MOST_BLOCK_TOKENS = 1024
_MOST_BLOCK_BYTES = 1 << 28
"""Of a subject that the kit can judge; the tokens are the bound of layout.proto."""


@dataclass(frozen=True)
class Times:
    """The times that Welcome announces, in seconds."""

    lease: float
    grace: float
    heartbeat: float
    kv_progress: float
    first_token: float
    attach: float
    tombstone: float


def times_of(welcome: decode_pb2.Welcome) -> Times:
    """In seconds."""
    return Times(**{name: seconds(getattr(welcome, name)) for name in Times.__dataclass_fields__})


class DecodeSubject:
    """A D, by its control endpoint."""

    def __init__(
        self,
        endpoint: str,
        info: inference_pb2.GetModelInfoResponse,
        watch: KitPrefill,
        total_blocks: int,
    ) -> None:
        self.endpoint = endpoint
        self.info = info
        self.welcome = watch.welcome
        self.times = times_of(watch.welcome)
        self.layout = parsed(layout_from_proto, watch.welcome.layout, "a layout")
        self.rule = KvRule(self.layout)
        self.total_blocks = total_blocks
        self.leaving = False
        """Whether it was asked to drain; it may then go as soon as nothing is left."""
        self.drained: dict[str, Exception | None] = {}
        """What the one drain has shown: why a rule is broken, None where it is kept."""
        self.drain_transcript: Transcript | None = None
        self._watch = watch
        self._settled = True

    @property
    def patience_s(self) -> float:
        t = self.times
        waits = t.lease + t.grace + 2 * t.heartbeat + t.kv_progress + t.first_token + t.attach
        return 6 * answer_s() + 3 * waits

    @property
    def room_tokens(self) -> int:
        """Most tokens of prompt plus output of one request: what the pool holds, or what the model
        takes where D tells that and it is less."""
        pool = self.total_blocks * self.layout.block_size
        return min(pool, self.info.max_model_len or pool)

    @property
    def instance(self) -> types_pb2.Instance:
        """Who D is."""
        return self.welcome.instance

    @contextlib.asynccontextmanager
    async def case(self, case_id: str, transcript: Transcript) -> AsyncIterator[DecodeHand]:
        """What a case has in hand. At its end every block must be back and the queue empty."""
        if not self._settled:
            # A case that failed may have left something; that is not the next one's fault.
            with contextlib.suppress(Broken):
                await self.settled()
        self._settled = False
        async with connect(self.endpoint) as channel:
            hand = DecodeHand(self, case_id, transcript, transcript.channel(channel))
            try:
                yield hand
            finally:
                await hand.leave()
        await self.settled()
        self._settled = True

    async def settled(self) -> None:
        """Broken when a block has not come back, or a request still waits, after the longest time
        that D announced for anything to end by itself. One that was drained may be gone."""
        if self._gone:
            return
        try:
            await self._all_back()
        except Broken:
            if not self._gone:
                raise

    @property
    def _gone(self) -> bool:
        return self.leaving and self._watch.session.is_over

    @property
    def _watch_is_lost(self) -> bool:
        return self._watch.session.is_over and not self.leaving

    async def _watch_again(self) -> None:
        await self._watch.join()
        now = self._watch.welcome.instance.epoch
        if now != self.instance.epoch:
            raise Broken(f"expected the D of epoch {self.instance.epoch}; epoch {now} is there now")

    async def _all_back(self) -> None:
        t = self.times
        limit = answer_s() + max(t.lease, t.grace, t.kv_progress, t.first_token, t.attach)

        async def look() -> decode_pb2.Load:
            # A machine that is busy may have kept the heartbeats back for too long.
            if self._watch_is_lost:
                await self._watch_again()
            try:
                return await self._watch.load_now()
            except Broken:
                if not self._watch_is_lost:
                    raise
                await self._watch_again()
                return await self._watch.load_now()

        def right(load: decode_pb2.Load) -> bool:
            return load.free_blocks == self.total_blocks and not load.queued_requests

        what = f"all {self.total_blocks} blocks free and no Allocate waiting"
        await eventually(look, right, f"{what} {limit:g} s after the case", limit)


@contextlib.asynccontextmanager
async def open_decode(endpoint: str) -> AsyncIterator[DecodeSubject]:
    """Meet a D: read its model, open a session that watches its load. Broken, or grpc.RpcError,
    when that much does not work."""
    transcript = Transcript()
    async with connect(endpoint) as plain:
        channel = transcript.channel(plain)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GetModelInfoRequest()
        info = await answer(stub.GetModelInfo(request, timeout=answer_s()), "GetModelInfo answered")
        watch = KitPrefill(
            channel,
            transcript,
            types_pb2.Instance(
                name=f"kit-watch-{secrets.token_hex(4)}",
                epoch=new_epoch(),
                role=types_pb2.ROLE_PREFILL,
            ),
            [info.layout],
        )
        await watch.join()
        try:
            load = await watch.load()
            expect(
                load.free_blocks == load.total_blocks > 0,
                "a D that serves nobody else, with all its blocks free",
                load,
            )
            subject = DecodeSubject(endpoint, info, watch, load.total_blocks)
            _check_can_be_judged(subject)
            yield subject
        finally:
            await watch.leave()


def _check_can_be_judged(subject: DecodeSubject) -> None:
    """Broken for what would take the kit days, or more memory than it has, and for a D that is cut
    over several shards, which it has no cases for."""
    longest = max(vars(subject.times).values())
    expect(longest <= _LONGEST_S, f"announced times of at most {_LONGEST_S:g} s", f"{longest:g} s")
    layout = subject.layout
    expect(
        0 < layout.block_size <= _MOST_BLOCK_TOKENS and 0 < layout.block_bytes <= _MOST_BLOCK_BYTES,
        f"blocks of 1 to {_MOST_BLOCK_TOKENS} tokens and at most {_MOST_BLOCK_BYTES} bytes",
        f"{layout.block_size} tokens and {layout.block_bytes} bytes",
    )
    shards = len(subject.welcome.shards)
    expect(shards <= 1, "one shard, which the kit sends all KV to", f"{shards}")


class DecodeHand:
    """What a case has in hand: Ps and clients of its own, and requests nobody else has."""

    def __init__(
        self, subject: DecodeSubject, case_id: str, transcript: Transcript, channel: Any
    ) -> None:
        self.subject = subject
        self.times = subject.times
        self.rule = subject.rule
        self.transcript = transcript
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.name = Names(case_id)
        self._prefills: list[KitPrefill] = []
        self._legs: list[ClientLeg] = []

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.subject.layout.block_size

    def needs_blocks(self, blocks: int) -> None:
        """NotApplicable for a D whose pool has fewer."""
        total = self.subject.total_blocks
        if total < blocks:
            raise NotApplicable(f"the case needs {blocks} blocks; D has {total}")

    def new_prefill(self, name: str = "", epoch: int = 0, **options: Any) -> KitPrefill:
        """A P that has not joined yet; see `Prefill` for the options."""
        instance = types_pb2.Instance(
            name=name or self.name("p"), epoch=epoch or new_epoch(), role=types_pb2.ROLE_PREFILL
        )
        layouts = [self.subject.info.layout]
        p = KitPrefill(self.channel, self.transcript, instance, layouts, **options)
        self._prefills.append(p)
        return p

    async def prefill(self, name: str = "", epoch: int = 0, **options: Any) -> KitPrefill:
        """A P with a session."""
        p = self.new_prefill(name, epoch, **options)
        await p.join()
        return p

    def request(self, tokens: int = 0, **fields: Any) -> Request:
        """A request that nobody else has made, `tokens` long: by default a block and a half."""
        transfer_id = f"{self.name('t')}-{secrets.token_hex(16)}"
        prompt = prompt_of(
            transfer_id, tokens or self.block_size * 3 // 2 or 1, self.subject.info.vocab_size
        )
        epoch = self.subject.instance.epoch
        return Request(
            **{"transfer_id": transfer_id, "prompt": prompt, "decode_epoch": epoch, **fields}
        )

    def generate(
        self, request: Request, *, local: bool = False, timeout_s: float = BUDGET_S, **fields: Any
    ) -> ClientLeg:
        """A client's leg."""
        return self.call_generate(request.generate(local=local, **fields), timeout_s)

    def call_generate(
        self, message: inference_pb2.GenerateRequest, timeout_s: float = BUDGET_S
    ) -> ClientLeg:
        """A client's leg with this message."""
        leg = ClientLeg(self.inference.Generate(message, timeout=timeout_s), self.transcript)
        self._legs.append(leg)
        return leg

    @contextlib.asynccontextmanager
    async def channel_with(self, options: tuple[tuple[str, int], ...]) -> AsyncIterator[Any]:
        """A channel of its own to D; its calls are cancelled when it is closed."""
        own = (*CHANNEL_OPTIONS, *options)
        async with grpc.aio.insecure_channel(self.subject.endpoint, options=own) as channel:
            yield self.transcript.channel(channel)

    async def arrived(self) -> None:
        """One round trip: D has before it what was sent before on the channel of clients and Ps."""
        request = inference_pb2.GetModelInfoRequest()
        call = self.inference.GetModelInfo(request, timeout=answer_s())
        await answer(call, "GetModelInfo answered")

    def answer(self, request: Request) -> list[int]:
        """Every token that a client must be shown of a request. NotApplicable where the kit does
        not know the model."""
        if not self.rule.is_sim:
            raise NotApplicable(f"the answers of {self.rule.layout.model} are not known to the kit")
        return self.rule.answer(request.prompt, request.sampling, request.generated)

    def output(self, request: Request, tokens: int) -> list[int]:
        """What the answer begins with: the right tokens where the kit knows the model, otherwise
        tokens of the vocabulary that end nothing."""
        if self.rule.is_sim:
            return self.answer(request)[:tokens]
        return request.prompt[:tokens]

    def first_token(self, request: Request) -> int:
        """The token that P hands over first."""
        return self.output(request, 1)[0]

    async def answered(self, leg: ClientLeg, request: Request) -> None:
        """Read to the end, which must be OK. Broken unless every token is right where the kit knows
        the model, and unless there is one where it does not."""
        if self.rule.is_sim:
            await leg.answers(self.answer(request))
        else:
            expect(bool(await leg.finished()), "at least one token", "none")

    async def leave(self) -> None:
        """End whatever the case left open."""
        for leg in self._legs:
            await leg.leave()
        for p in self._prefills:
            await p.leave()
