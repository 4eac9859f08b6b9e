"""A router under test, and what a case has in hand to try it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.conformance.calls import answer, check_fault
from pd_grpc.conformance.case import Broken, NotApplicable, answer_s, broken, eventually, within
from pd_grpc.conformance.channels import CHANNEL_OPTIONS, connect
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.names import Names
from pd_grpc.conformance.request import BUDGET_S, prompt_of, replaced
from pd_grpc.conformance.router.answers import handed_off, last
from pd_grpc.conformance.router.instance import Instances, KitInstance
from pd_grpc.conformance.router.routed import Routed
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import STATUS_TABLE, Fault, Reason
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    types_pb2,
)

INFERENCE = "pd_grpc.v1.InferenceService"

PROMPT_TOKENS = 12

_BOTH_LEGS = "Prefill and Generate called on the kit's instances"


class RouterSubject:
    """A router, by its endpoint, with the kit's instances behind it."""

    def __init__(self, endpoint: str, instances: Instances) -> None:
        self.endpoint = endpoint
        self.instances = instances
        self.info = inference_pb2.GetModelInfoResponse()
        self.instance = types_pb2.Instance()
        self.drained = False
        """A drain is for ever: what is behind the router no longer matters."""

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have. NotApplicable where the router does not say."""
        if not self.info.max_model_len:
            raise NotApplicable("the router's GetModelInfo does not tell max_model_len")
        return int(self.info.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. NotApplicable where the router does not say."""
        if not self.info.vocab_size:
            raise NotApplicable("the router's GetModelInfo does not tell vocab_size")
        return int(self.info.vocab_size)

    @property
    def patience_s(self) -> float:
        return 10 * answer_s()

    @property
    def has_alternate(self) -> bool:
        """Whether the router was told of a second D."""
        other = self.instances.alternate
        return other is not None and other.line.connections > 0

    @contextlib.asynccontextmanager
    async def case(self, case_id: str, transcript: Transcript) -> AsyncIterator[RouterHand]:
        """What a case has in hand. At its end both legs of every request must have ended."""
        self.instances.follow(transcript)
        self.instances.forget()
        async with connect(self.endpoint) as channel:
            hand = RouterHand(self, case_id, transcript, transcript.channel(channel))
            try:
                yield hand
                await self.instances.quiet()
            except (Broken, grpc.RpcError):
                # It may have lost the kit's instances, as where the kit was late for a heartbeat.
                self.instances.disturbed = True
                raise
            finally:
                await hand.leave()
                self.instances.follow(Transcript())
                await self._undo()

    async def meet(self) -> None:
        """Wait until it routes to the kit's instances, and read who it is and what it serves.
        Broken."""
        await self.routes_to(self.instances.d)
        async with connect(self.endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GetModelInfoRequest()
            self.info = await answer(stub.GetModelInfo(request, timeout=answer_s()), "GetModelInfo")
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            who = admin_pb2.GetServerInfoRequest()
            found: admin_pb2.GetServerInfoResponse = await answer(
                admin.GetServerInfo(who, timeout=answer_s()), "GetServerInfo"
            )
            self.instance.CopyFrom(found.server.instance)

    async def routes_to(self, *decodes: KitInstance) -> None:
        """Wait until the router sends a request to P with exactly these Ds. Broken when it does
        not in time."""
        wanted = {d.endpoint for d in decodes}
        what = f"a request routed to the kit's P with {sorted(wanted)}"
        async with connect(self.endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await eventually(
                lambda: self._try_out(stub), lambda seen: seen == wanted, what, 2 * answer_s()
            )

    async def _try_out(self, stub: Any) -> object:
        """The Ds that one request, answered to its end, is offered to; or why it was not routed."""
        self.instances.forget()
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt_of("probe", 4, 1000)),
            sampling=sampling_pb2.SamplingParams(max_tokens=2, temperature=0),
        )
        call = stub.Generate(request, timeout=answer_s())
        ended = asyncio.ensure_future(_read_all(call))
        asked = asyncio.ensure_future(self.instances.prefills.get())
        try:
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return await ended
            prefill = asked.result()
            prefill.send(handed_off(self.instances.d, len(prefill.request.token_ids)))
            prefill.end()
            decode = await self.instances.next_generate()
            decode.send(last([5, 6], types_pb2.Usage(), decode.instance))
            decode.end()
            await ended
            await self.instances.quiet()
        except Broken as why:
            return str(why)
        finally:
            asked.cancel()
            call.cancel()
        return {target.endpoint for target in prefill.request.decodes}

    async def _undo(self) -> None:
        """Everything behind the router as it was before the case."""
        if not self.instances.disturbed:
            return
        await self.instances.restore()
        if not self.drained:
            await self.routes_to(self.instances.d)
        self.instances.disturbed = False


async def _read_all(call: Any) -> str:
    """How a call ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return str(read_error(error))
    except asyncio.CancelledError:
        return "cancelled"
    return "an answer without a call to P"


@contextlib.asynccontextmanager
async def open_router(endpoint: str, instances: Instances) -> AsyncIterator[RouterSubject]:
    """Meet a router that was started with the kit's instances behind it. Broken when it does not
    call them."""
    subject = RouterSubject(endpoint, instances)
    try:
        await subject.meet()
    except Broken as why:
        prefill, *decodes = instances.endpoints
        command = f"pd-grpc serve router --prefill {prefill} "
        command += " ".join(f"--decode {endpoint}" for endpoint in decodes)
        raise Broken(f"{why}; is it started so, or alike: {command}") from None
    yield subject


class RouterHand:
    """What a case has in hand: clients of its own, and the instances behind the router."""

    def __init__(
        self, subject: RouterSubject, case_id: str, transcript: Transcript, channel: Any
    ) -> None:
        self.subject = subject
        self.instances = subject.instances
        self.p = subject.instances.p
        self.d = subject.instances.d
        self.transcript = transcript
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.channel = channel
        self.name = Names(case_id)
        self._clients: list[ClientLeg] = []

    def prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """A prompt that nobody else has."""
        return prompt_of(self.name("prompt"), tokens, self.subject.info.vocab_size)

    def request(self, **fields: Any) -> inference_pb2.GenerateRequest:
        """A request for eight greedy tokens after a prompt of token ids; `fields` replace what
        they name, and `text` or `messages` the prompt."""
        message = inference_pb2.GenerateRequest(
            sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0)
        )
        if not {"text", "messages", "token_ids"} & fields.keys():
            message.token_ids.ids.extend(self.prompt())
        return replaced(message, fields)

    def call(
        self, message: inference_pb2.GenerateRequest, timeout_s: float | None = BUDGET_S
    ) -> ClientLeg:
        """A client's call."""
        leg = ClientLeg(self.inference.Generate(message, timeout=timeout_s), self.transcript)
        self._clients.append(leg)
        return leg

    def ask(self, *, timeout_s: float | None = BUDGET_S, **fields: Any) -> ClientLeg:
        """A client's call, as `request` makes it."""
        return self.call(self.request(**fields), timeout_s)

    async def routed(self, *, timeout_s: float | None = BUDGET_S, **fields: Any) -> Routed:
        """A request whose two legs have come to the kit's instances."""
        return await self.both_legs(self.ask(timeout_s=timeout_s, **fields))

    async def both_legs(self, client: ClientLeg) -> Routed:
        """The request of a client's call, once its two legs have come. Broken when the call ends
        before, or they do not come."""
        routed = await self._legs_or_end(client)
        if routed is None:
            broken(_BOTH_LEGS, f"the end of Generate: {await client.ends()}")
        return routed

    async def elsewhere(self, client: ClientLeg) -> Routed:
        """The next attempt of a request that an instance has failed, once its two legs have come.
        NotApplicable where the router tells its client instead."""
        routed = await self._legs_or_end(client)
        if routed is None:
            raise NotApplicable("the router tries no such request elsewhere")
        return routed

    async def _legs_or_end(self, client: ClientLeg) -> Routed | None:
        legs = asyncio.ensure_future(self.instances.next_legs())
        ended = asyncio.ensure_future(client.stream.wait_for_end())
        either = asyncio.wait((legs, ended), return_when=asyncio.FIRST_COMPLETED)
        try:
            await within(None, either, _BOTH_LEGS)
            return Routed(self.instances, client, *legs.result()) if legs.done() else None
        finally:
            legs.cancel()
            ended.cancel()

    async def refused(
        self,
        reason: Reason,
        what: str,
        message: inference_pb2.GenerateRequest | None = None,
        **fields: Any,
    ) -> Fault:
        """Ask for what must be refused before a leg is opened; returns the fault."""
        client = self.call(message or self.request(**fields))
        ended = asyncio.ensure_future(self.fails(client, reason, what))
        called = asyncio.ensure_future(self.instances.any_call())
        await asyncio.wait((ended, called), return_when=asyncio.FIRST_COMPLETED)
        if called.done():
            ended.cancel()
            broken(f"{reason.value} before any leg is opened: {what}", called.result())
        called.cancel()
        return await ended

    async def fails(
        self, client: ClientLeg, reason: Reason, what: str, seconds: float | None = None
    ) -> Fault:
        """Read a client's call to its end, which must be a fault with the code that the table lets
        a client see."""
        outcome = await client.outcome(seconds)
        return check_fault(outcome, reason, what, STATUS_TABLE[reason].client)

    async def offers_alternate(self) -> KitInstance:
        """The other D, once the router offers both to P. NotApplicable when it was not told of it,
        or never offers more than one."""
        other = self.instances.alternate
        if other is None or not self.subject.has_alternate:
            raise NotApplicable("the router was not told of a second D")
        self.instances.set_ready(other, True)
        try:
            await self.subject.routes_to(self.d, other)
        except Broken:
            raise NotApplicable("the router offers no alternates to P") from None
        return other

    async def readiness(self, service: str = INFERENCE) -> health_pb2.HealthCheckResponse:
        """What health says of a service."""
        request = health_pb2.HealthCheckRequest(service=service)
        found: health_pb2.HealthCheckResponse = await answer(
            self.health.Check(request, timeout=answer_s()), f"health of {service!r}"
        )
        return found

    async def turns(self, ready: bool) -> None:
        """Broken unless the router's readiness becomes this in time."""
        status = health_pb2.HealthCheckResponse
        wanted = status.SERVING if ready else status.NOT_SERVING
        what = f"health of {INFERENCE} {'SERVING' if ready else 'NOT_SERVING'}"
        await eventually(self.readiness, lambda seen: seen.status == wanted, what)

    @contextlib.asynccontextmanager
    async def channel_with(self, options: tuple[tuple[str, int], ...]) -> AsyncIterator[Any]:
        """A channel of its own to the router; its calls are cancelled when it is closed."""
        endpoint = self.subject.endpoint
        own = (*CHANNEL_OPTIONS, *options)
        async with grpc.aio.insecure_channel(endpoint, options=own) as channel:
            yield self.transcript.channel(channel)

    async def server_info(self) -> admin_pb2.ServerInfo:
        """What the router says of itself."""
        request = admin_pb2.GetServerInfoRequest()
        found: admin_pb2.GetServerInfoResponse = await answer(
            self.admin.GetServerInfo(request, timeout=answer_s()), "GetServerInfo"
        )
        return found.server

    async def peers(self) -> list[admin_pb2.ServerInfo]:
        """What the router says of the instances behind it."""
        request = admin_pb2.GetServerInfoRequest(peers=True)
        found: admin_pb2.GetServerInfoResponse = await answer(
            self.admin.GetServerInfo(request, timeout=answer_s()), "GetServerInfo with peers"
        )
        return list(found.peers)

    async def listed(self, transfer_id: str) -> admin_pb2.TransferInfo | None:
        """A request as ListTransfers has it."""
        request = admin_pb2.ListTransfersRequest()
        found: admin_pb2.ListTransfersResponse = await answer(
            self.admin.ListTransfers(request, timeout=answer_s()), "ListTransfers"
        )
        return next((t for t in found.transfers if t.ref.transfer_id == transfer_id), None)

    async def leave(self) -> None:
        """End whatever the case left open."""
        for client in self._clients:
            await client.leave()
