"""The kit as P: a session with heartbeats, and every call that P makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from google.rpc import status_pb2

from pd_grpc.conformance.calls import Stream, answer, refusal
from pd_grpc.conformance.case import Broken, answer_s, broken, expect
from pd_grpc.conformance.decode.told import Told
from pd_grpc.conformance.decode.transfer import Transfer, connect_transfer
from pd_grpc.conformance.kv import KvRule
from pd_grpc.conformance.request import BUDGET_S, Request, replaced
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import layout_from_proto, seconds
from pd_grpc.v1 import decode_pb2, decode_pb2_grpc, layout_pb2, types_pb2

_MOST_BLOCKS = 1 << 20
"""A million tokens at one to a block."""


class KitPrefill:
    """A P of the kit's. Its heartbeats list what is in `held`; with `beats=False` it sends only
    those that a case asks for."""

    def __init__(
        self,
        channel: Any,
        transcript: Transcript,
        instance: types_pb2.Instance,
        layouts: Sequence[layout_pb2.KvLayout],
        *,
        beats: bool = True,
    ) -> None:
        self.instance = instance
        self.layouts = list(layouts)
        self.transcript = transcript
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.welcome = decode_pb2.Welcome()
        self.held: set[str] = set()
        self._told = Told()
        self._channel = channel
        self._beats = beats
        self._sequence = 0
        # A beat on its way while D ends the session would hide how D ended it.
        self._beating: Stream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._session: Stream | None = None
        self._streams: list[Stream] = []
        self._transfers: list[Transfer] = []

    # The session

    def hello(self, **fields: Any) -> decode_pb2.Hello:
        """How it introduces itself; `fields` replace what they name."""
        message = decode_pb2.Hello(instance=self.instance, layouts=self.layouts)
        return replaced(message, fields)

    def open_session(self) -> Stream:
        """A Session call on which nothing has been said."""
        stream = Stream(self.decode.Session(), "Session", self.transcript)
        self._streams.append(stream)
        return stream

    async def join(self, **fields: Any) -> decode_pb2.Welcome:
        """Open a session, the newest of this P, and go on listening."""
        self._beating = None
        stream = self.open_session()
        await stream.send(decode_pb2.SessionRequest(hello=self.hello(**fields)))
        first: decode_pb2.SessionResponse = await stream.read("welcome")
        expect(first.HasField("welcome"), "welcome as the first message", first)
        self.welcome = first.welcome
        self._session = stream
        self._sequence = 0
        self._told.begin()
        self._tasks.append(asyncio.create_task(self._listen(stream)))
        if self._beats:
            self._beating = stream
            self._tasks.append(asyncio.create_task(self._keep_beating(stream)))
        return self.welcome

    async def refused(self, reason: Reason, what: str, **fields: Any) -> Fault:
        """Open a session that must be refused."""
        stream = self.open_session()
        await stream.offer(decode_pb2.SessionRequest(hello=self.hello(**fields)))
        message = await stream.next(f"{reason.value}: {what}")
        if message is not None:
            broken(f"{reason.value}: {what}", message)
        return await stream.refused(reason, what)

    @property
    def session(self) -> Stream:
        """The session that was welcomed last."""
        if self._session is None:
            raise Broken("expected a session; none was welcomed")
        return self._session

    async def heartbeat(self, *grants: str) -> decode_pb2.HeartbeatAck:
        """Send a heartbeat that lists these grants and no others; returns its ack."""
        sequence = await self._beat(self.session, grants)
        what = f"the ack of heartbeat {sequence}"
        return await self._told.once(lambda: self._told.ack(sequence), what, None)

    async def load(self) -> decode_pb2.Load:
        """D's load, by a heartbeat: the one sent last, which may not have come yet where it has
        changed a moment ago."""
        await self.heartbeat(*sorted(self.held))
        what = "D's load after the ack of the first heartbeat"
        return await self._told.once(lambda: self._told.load, what, None)

    async def load_now(self) -> decode_pb2.Load:
        """D's load as it is: what the ack of one heartbeat has brought is here with the next."""
        await self.heartbeat(*sorted(self.held))
        return await self.load()

    def load_with(self, ack: decode_pb2.HeartbeatAck) -> decode_pb2.Load:
        """D's load when it sent an ack: what it told right after it, or last where that had not
        changed. Known for sure once the next ack is here."""
        return self._told.load_with(ack)

    async def goodbye(self) -> None:
        """Leave on purpose."""
        self._beating = None
        bye = decode_pb2.Goodbye(reason="the case is over")
        await self.session.offer(decode_pb2.SessionRequest(goodbye=bye))

    async def break_session(self) -> None:
        """The connection is lost, as D sees it."""
        await self.session.leave()

    async def hears(self, kind: str, what: str, limit_s: float | None = None) -> Any:
        """The first message of a kind, such as "drain", that D sent on any session of this P."""
        return await self._told.once(lambda: self._told.first(kind), what, limit_s)

    async def told_of(
        self, request: Request, what: str, limit_s: float | None = None
    ) -> decode_pb2.TransferEnded:
        """What D says of a transfer's end."""
        return await self._told.once(lambda: self._told.end_of(request.ref), what, limit_s)

    # Calls

    async def allocate(
        self, request: Request, *, hold: bool = True, timeout_s: float = BUDGET_S, **fields: Any
    ) -> decode_pb2.AllocateResponse:
        """Blocks for a request. Broken when D refuses. Heartbeats list the grant with `hold`."""
        call = self.ask(request, timeout_s=timeout_s, **fields)
        grant: decode_pb2.AllocateResponse = await answer(call, "a grant")
        if hold:
            self.held.add(grant.grant_id)
        return grant

    def ask(
        self,
        request: Request,
        *,
        timeout_s: float = BUDGET_S,
        session_id: str | None = None,
        **fields: Any,
    ) -> Any:
        """An Allocate call that is not awaited here; in the session's name unless told another."""
        name = self.welcome.session_id if session_id is None else session_id
        message = request.allocate(name, **fields)
        return self.decode.Allocate(message, timeout=timeout_s)

    async def allocate_refused(
        self, request: Request, reason: Reason, what: str, **fields: Any
    ) -> Fault:
        """An Allocate that must be refused."""
        return await refusal(self.ask(request, **fields), reason, what)

    def first_token_message(
        self, request: Request, grant: decode_pb2.AllocateResponse, token: int, **fields: Any
    ) -> decode_pb2.SendFirstTokenRequest:
        """The first token, to be sent; `fields` go into the FirstToken."""
        return decode_pb2.SendFirstTokenRequest(
            session_id=self.welcome.session_id,
            ref=request.ref,
            grant_id=grant.grant_id,
            tokens=[decode_pb2.FirstToken(token_id=token, **fields)],
            computed_tokens=len(request.tokens),
        )

    def send_first(self, message: decode_pb2.SendFirstTokenRequest) -> Any:
        """A SendFirstToken call that is not awaited here."""
        return self.decode.SendFirstToken(message, timeout=answer_s())

    async def first_token(
        self, request: Request, grant: decode_pb2.AllocateResponse, token: int, **fields: Any
    ) -> types_pb2.TransferState:
        """Hand over the first token; returns D's state of the transfer."""
        message = self.first_token_message(request, grant, token, **fields)
        taken: decode_pb2.SendFirstTokenResponse = await answer(
            self.send_first(message), "the first token taken"
        )
        return taken.state

    def give_back(
        self, request: Request, cause: Fault | status_pb2.Status | None = None, **fields: Any
    ) -> Any:
        """A Release call that is not awaited here."""
        message = decode_pb2.ReleaseRequest(
            session_id=self.welcome.session_id,
            ref=request.ref,
            cause=cause.status() if isinstance(cause, Fault) else cause,
            writes_stopped=True,
        )
        return self.decode.Release(replaced(message, fields), timeout=answer_s())

    async def release(
        self, request: Request, cause: Fault | status_pb2.Status | None = None
    ) -> types_pb2.TransferState:
        """Give a transfer back; returns D's state of it."""
        taken: decode_pb2.ReleaseResponse = await answer(
            self.give_back(request, cause), "the transfer taken back"
        )
        return taken.state

    # KV

    async def open(
        self, request: Request, grant: decode_pb2.AllocateResponse, **fields: Any
    ) -> Transfer:
        """A Transfer on which `open` has been sent; `fields` replace those of the message."""
        transfer = self.connect(grant)
        session_id = self.welcome.session_id
        await transfer.offer_open(request.ref, session_id, grant.grant_id, **fields)
        return transfer

    def connect(self, grant: decode_pb2.AllocateResponse) -> Transfer:
        """A Transfer on which nothing has been said yet."""
        if not grant.shards:
            broken("a shard in the grant", grant)
        transfer = connect_transfer(grant, self.transcript)
        self._transfers.append(transfer)
        return transfer

    async def receiving(
        self, request: Request, grant: decode_pb2.AllocateResponse, **fields: Any
    ) -> Transfer:
        """A Transfer that D has answered with `opened`."""
        transfer = await self.open(request, grant, **fields)
        await transfer.opened()
        return transfer

    async def send_kv(self, request: Request, grant: decode_pb2.AllocateResponse) -> None:
        """All KV that D wants, to the end."""
        transfer = await self.receiving(request, grant)
        await transfer.send_all(self.kv(request, grant))
        await transfer.complete()

    def kv(self, request: Request, grant: decode_pb2.AllocateResponse) -> list[Any]:
        """The chunks of everything D wants."""
        rule = KvRule(layout_from_proto(self.welcome.layout))
        return rule.chunks(request.tokens, wanted_blocks(grant.wanted))

    async def hand_over(self, request: Request, token: int) -> decode_pb2.AllocateResponse:
        """Everything P does for a request whose first token is `token`."""
        grant = await self.allocate(request)
        await self.first_token(request, grant, token)
        await self.send_kv(request, grant)
        return grant

    async def leave(self) -> None:
        """End everything; D must take back what was not handed off."""
        for task in self._tasks:
            task.cancel()
        for transfer in self._transfers:
            await transfer.leave()
        if self._session is not None and not self._session.is_over:
            await self.goodbye()
            await self._session.half_close()
        for stream in self._streams:
            await stream.leave()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, stream: Stream) -> None:
        while (message := await stream.wait_for_message()) is not None:
            self._told.add(message)

    async def _keep_beating(self, stream: Stream) -> None:
        while stream is self._beating and not stream.is_over:
            await self._beat(stream, self.held)
            await asyncio.sleep(seconds(self.welcome.heartbeat) / 2)

    async def _beat(self, stream: Stream, grants: Iterable[str]) -> int:
        self._sequence += 1
        sequence = self._sequence
        beat = decode_pb2.Heartbeat(sequence=sequence, grant_ids=sorted(grants))
        await stream.offer(decode_pb2.SessionRequest(heartbeat=beat))
        return sequence


def wanted_blocks(wanted: Iterable[types_pb2.BlockRange]) -> list[int]:
    """The logical blocks of ranges. Broken when they are more than any prompt has."""
    runs = list(wanted)
    if sum(run.count for run in runs) > _MOST_BLOCKS:
        broken("ranges within the prompt", runs)
    return [b for run in runs for b in range(run.start, run.start + run.count)]
