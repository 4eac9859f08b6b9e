"""One request with its client and its two legs."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.conformance.case import expect_equal
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.router.answers import handed_off, last, tokens
from pd_grpc.conformance.router.instance import DecodeLeg, Instances, PrefillLeg
from pd_grpc.v1 import types_pb2


class Routed:
    """A request whose legs have come to the kit's instances. `decode` is the leg of the D that
    has it, after Placing the new one."""

    def __init__(
        self, instances: Instances, client: ClientLeg, prefill: PrefillLeg, decode: DecodeLeg
    ) -> None:
        self.instances = instances
        self.client = client
        self.prefill = prefill
        self.decode = decode

    @property
    def ref(self) -> types_pb2.TransferRef:
        """As P heard it."""
        ref: types_pb2.TransferRef = self.prefill.request.ref
        return ref

    @property
    def prompt(self) -> list[int]:
        """As P heard it."""
        return list(self.prefill.request.token_ids)

    @property
    def usage(self) -> types_pb2.Usage:
        """What D says at the end."""
        return types_pb2.Usage(prompt_tokens=len(self.prompt), completion_tokens=8)

    def hand_over(self) -> None:
        """P says that D has it, and ends."""
        decode = next(i for i in self.instances.all if i.name == self.decode.instance)
        self.prefill.send(handed_off(decode, len(self.prompt)))
        self.prefill.end()

    def say(self, *ids: int) -> None:
        """D sends these tokens in one message."""
        self.decode.send(tokens(ids))

    def say_last(
        self, *ids: int, reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_LENGTH
    ) -> None:
        """D sends these tokens in its last message, and ends."""
        self.decode.send(last(ids, self.usage, self.decode.instance, reason))
        self.decode.end()

    async def shows(self, wanted: Sequence[int], what: str = "the tokens shown") -> None:
        """Read messages until the client has so many tokens, which must be these."""
        while len(self.client.tokens) < len(wanted):
            await self.client.next()
        expect_equal(self.client.tokens, list(wanted), what)

    async def answers(self, wanted: Sequence[int]) -> None:
        """Read to the end, which must be OK after exactly these tokens."""
        await self.client.answers(list(wanted))

    async def finish(self, ids: Sequence[int]) -> None:
        """Hand over, answer with these tokens, and read them; all must go well."""
        self.hand_over()
        self.say(*ids[:1])
        self.say_last(*ids[1:])
        await self.answers(ids)

    async def both_cancelled(self, why: str) -> None:
        """Broken unless the router cancels both legs in time."""
        await self.prefill.cancelled(why)
        await self.decode.cancelled(why)
