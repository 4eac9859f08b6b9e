"""A hand-over that a case has brought to some point, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_grpc.conformance.calls import refusal
from pd_grpc.conformance.case import Broken, eventually, expect_equal
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.decode.transfer import Transfer
from pd_grpc.conformance.request import Request, replaced
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2, types_pb2

LIVE = (
    types_pb2.TRANSFER_STATE_READY,
    types_pb2.TRANSFER_STATE_DECODING,
    types_pb2.TRANSFER_STATE_PREEMPTED,
)
"""States of a transfer that was handed off and has not ended."""


@dataclass
class HandOver:
    """A request that D has granted blocks, and its client, if one waits."""

    d: DecodeHand
    p: KitPrefill
    request: Request
    grant: decode_pb2.AllocateResponse
    client: ClientLeg | None
    shards: Sequence[layout_pb2.Shard] = ()
    """P's, where it has several."""

    @property
    def leg(self) -> ClientLeg:
        """The client's leg."""
        if self.client is None:
            raise Broken("expected a client; none has come")
        return self.client

    @property
    def any_token(self) -> int:
        """A token of the vocabulary that ends nothing, where it does not matter which."""
        return self.request.prompt[0]

    def kv(self) -> list[transfer_pb2.KvChunk]:
        """The chunks of everything D wants."""
        return self.p.kv(self.request, self.grant)

    async def receiving(self, **fields: Any) -> Transfer:
        """A Transfer that D has opened."""
        return await self.p.receiving(self.request, self.grant, **fields)

    async def send_kv(self) -> None:
        """Everything D wants, to the end."""
        await self.p.send_kv(self.request, self.grant)

    async def first_token(self, token: int | None = None, **fields: Any) -> types_pb2.TransferState:
        """Hand over the first token, that of the answer unless given; returns D's state."""
        if token is None:
            token = self.d.first_token(self.request)
        return await self.p.first_token(self.request, self.grant, token, **fields)

    def first_token_message(self, **fields: Any) -> decode_pb2.SendFirstTokenRequest:
        """The first token, to be sent; `fields` replace those of the message."""
        message = self.p.first_token_message(self.request, self.grant, self.any_token)
        return replaced(message, fields)

    async def first_token_refused(self, reason: Reason, what: str, **fields: Any) -> Fault:
        """A first token with these fields must be refused."""
        return await refusal(self.p.send_first(self.first_token_message(**fields)), reason, what)

    async def completes(self) -> None:
        """It can still be handed over, and the answer comes to its end."""
        await self.first_token()
        await self.send_kv()
        await self.answers()

    def client_comes(self, **fields: Any) -> ClientLeg:
        """The client's leg, which had not come yet."""
        self.client = self.d.generate(self.request, **fields)
        return self.client

    async def ends_as(self, state: types_pb2.TransferState, limit_s: float | None = None) -> None:
        """Wait until it, which was handed off, has come to this end. Release asks for the state and
        changes nothing any more."""

        async def look() -> types_pb2.TransferState:
            return await self.p.release(self.request)

        what = "the end of the transfer"
        seen = await eventually(look, lambda seen: seen not in LIVE, what, limit_s)
        expect_equal(seen, state, "the state")

    async def answers(self) -> None:
        """The client is shown the answer to its end, from the first token of P's on."""
        await self.d.answered(self.leg, self.request)
        expect_equal(self.leg.tokens[0], self.d.first_token(self.request), "the first token")


async def handed_off(d: DecodeHand, **options: Any) -> HandOver:
    """A transfer that D owns and for which no client has come: `client_comes` brings one."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request, **options)
    await p.first_token(request, grant, d.first_token(request))
    await p.send_kv(request, grant)
    return HandOver(d, p, request, grant, None)


async def granted(
    d: DecodeHand, request: Request | None = None, *, p: KitPrefill | None = None, **fields: Any
) -> HandOver:
    """A request with a grant and a client; `fields` replace those of the Allocate."""
    p = p or await d.prefill()
    request = request or d.request()
    leg = d.generate(request)
    return HandOver(d, p, request, await p.allocate(request, **fields), leg)
