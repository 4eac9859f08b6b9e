"""A hand-over that a case has brought to some point, and how it goes on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pd_grpc.conformance.decode.client import ClientLeg
from pd_grpc.conformance.decode.prefill import Prefill
from pd_grpc.conformance.decode.subject import Decode
from pd_grpc.conformance.decode.transfer import Transfer
from pd_grpc.conformance.request import Request
from pd_grpc.v1 import decode_pb2, transfer_pb2, types_pb2


@dataclass
class HandOver:
    """A request that D has granted blocks, and its client, who waits."""

    d: Decode
    p: Prefill
    request: Request
    grant: decode_pb2.AllocateResponse
    leg: ClientLeg

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

    async def first_token(self, token: int | None = None) -> types_pb2.TransferState:
        """Hand over the first token, the right one unless given; returns D's state."""
        if token is None:
            token = self.d.answer(self.request)[0]
        return await self.p.first_token(self.request, self.grant, token)

    async def completes(self) -> None:
        """It can still be handed over, and the answer is right."""
        await self.first_token()
        await self.send_kv()
        await self.answers()

    async def answers(self) -> None:
        """The client is shown the right answer to its end."""
        await self.leg.answers(self.d.answer(self.request))


async def granted(
    d: Decode, request: Request | None = None, *, p: Prefill | None = None, **fields: Any
) -> HandOver:
    """A request with a grant and a client; `fields` replace those of the Allocate."""
    p = p or await d.prefill()
    request = request or d.request()
    leg = d.generate(request)
    return HandOver(d, p, request, await p.allocate(request, **fields), leg)
