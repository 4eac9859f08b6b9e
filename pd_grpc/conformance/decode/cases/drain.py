"""D95x: a D that drains.

Draining is for ever, and a D that has nothing left may be gone. So there is one drain, at the end
of all cases, looked at from every side; each case then tells what one look has shown.
"""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.conformance.calls import check_fault, if_served, refusal
from pd_grpc.conformance.case import Broken, NotApplicable, answer_s, expect, expect_equal
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import fill, wait_in_queue
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Reason, read_status
from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.v1 import admin_pb2, decode_pb2

DRAIN_S = 60.0


@case(950, "Transfers still in flight.")
async def the_answer_counts(d: DecodeHand) -> None:
    """Drain is called with transfers in flight: it answers with how many there are."""
    await _shown(d, "answer")


@case(
    951,
    "How long D still finishes what it has, from now on; what is left then fails with DRAINING.",
)
async def prefills_are_told(d: DecodeHand) -> None:
    """Drain is called: a P with a session hears of it, and how long it lasts."""
    await _shown(d, "told")


@case(
    952,
    "A draining D grants nothing new: Allocates that wait and Allocates and Generates of"
    " transfers that have no grant are refused with UNAVAILABLE, DRAINING.",
)
async def what_waits_is_refused(d: DecodeHand) -> None:
    """Drain is called while an Allocate waits for blocks: that is refused."""
    await _shown(d, "waiting")


@case(
    953,
    "Allocates that wait and Allocates and Generates of transfers that have no grant are"
    " refused with UNAVAILABLE, DRAINING.",
)
async def what_is_new_is_refused(d: DecodeHand) -> None:
    """Allocate of a draining D, with kv_needed and without, is refused."""
    await _shown(d, "allocate")


@case(954, "What has a grant goes on until the drain's deadline, and then fails with DRAINING.")
async def what_is_granted_may_be_asked_again(d: DecodeHand) -> None:
    """Allocate that was granted before the drain is repeated: it gets the same answer."""
    await _shown(d, "again")


@case(955, "A draining D grants nothing new")
async def local_requests_are_refused(d: DecodeHand) -> None:
    """Generate that a draining D would have to prefill itself is refused."""
    await _shown(d, "local")


@case(
    956,
    "Allocates that wait and Allocates and Generates of transfers that have no grant are"
    " refused with UNAVAILABLE, DRAINING.",
)
async def legs_without_a_grant_are_refused(d: DecodeHand) -> None:
    """Generate of a hand-over that a draining D has not granted is refused."""
    await _shown(d, "leg")


@case(957, "Follows welcome when P comes back to a draining D.")
async def who_comes_back_is_told(d: DecodeHand) -> None:
    """P opens a second session with a draining D: it is welcome, and told of the drain."""
    await _shown(d, "back")


@case(958, "UNAVAILABLE with DRAINING when D drains and does not know this process yet.")
async def a_stranger_is_refused(d: DecodeHand) -> None:
    """P that a draining D has not met is refused."""
    await _shown(d, "stranger")


@case(959, "It takes no more and finishes what it has.")
async def server_info_says_so(d: DecodeHand) -> None:
    """GetServerInfo of a draining D says that it drains."""
    await _shown(d, "info")


@case(
    960,
    "the empty name is SERVING while the process is up, the full name of a service of its"
    " own while it takes new requests, and NOT_SERVING otherwise.",
)
async def health_says_so(d: DecodeHand) -> None:
    """Health of a draining D: the process is up, DecodeService takes nothing new."""
    await _shown(d, "health")


@case(961, "What has a grant goes on until the drain's deadline, and then fails with DRAINING.")
async def what_is_granted_is_finished(d: DecodeHand) -> None:
    """A transfer granted before the drain is handed over: its client has the whole answer."""
    await _shown(d, "finished")


@case(962, "what is left by then fails with UNAVAILABLE, DRAINING.")
async def what_is_left_fails(d: DecodeHand) -> None:
    """Drain is called again with deadline 0: client and P of what is left hear DRAINING."""
    await _shown(d, "left")


@case(
    963,
    "A hand-over's client leg that waits without a grant ends at once in the same words, and leaves"
    " no tombstone.",
)
async def clients_without_a_grant_need_not_wait(d: DecodeHand) -> None:
    """Drain is called while a client waits for an Allocate that has not come, and one for blocks:
    both hear so at once, and an Allocate that comes then is refused in the same words."""
    await _shown(d, "waiting legs")


async def _shown(d: DecodeHand, look: str) -> None:
    """What one look at the drain has shown; the first case that asks drains D."""
    subject = d.subject
    if not subject.drained:
        subject.drain_transcript = d.transcript
        await _Drain(d).run()
    elif subject.drain_transcript is not None:
        d.transcript.quote(subject.drain_transcript)
    error = subject.drained[look]
    if error is not None:
        raise error


class _Drain:
    """Transfers that run, are left behind or wait, and what a drain does to each."""

    def __init__(self, d: DecodeHand) -> None:
        self._d = d
        self._found = d.subject.drained

    async def run(self) -> None:
        """Drain D and look. NotApplicable when it cannot be drained over gRPC."""
        d = self._d
        d.needs_blocks(4)
        p, other = await d.prefill(), await d.prefill()
        running, left = (await fill(d, p, 2, 2))[:2]
        legs = [d.generate(request) for request in (running, left)]
        grant = await p.allocate(running)
        queued, expected = d.request(), d.request()
        waiting = await wait_in_queue(p, queued, 0)
        unserved = [d.generate(request) for request in (queued, expected)]
        await d.arrived()
        answer = await self._drain(DRAIN_S)
        d.subject.leaving = True
        await self._look("answer", self._answer(answer))
        await self._look("told", self._told(p))
        await self._look("waiting", refusal(waiting, Reason.DRAINING, "an Allocate that waits"))
        await self._look("waiting legs", self._waiting_legs(p, expected, unserved))
        await self._look("allocate", self._allocate(p))
        await self._look("again", self._again(p, running, grant))
        await self._look("local", self._generate(local=True))
        await self._look("leg", self._generate(local=False))
        await self._look("back", self._back(other))
        await self._look("stranger", d.new_prefill().refused(Reason.DRAINING, "P, unknown to D"))
        await self._look("info", self._info())
        await self._look("health", self._health())
        await self._look("finished", self._finished(p, running, grant, legs[0]))
        await self._look("left", self._left(p, left, legs[1]))

    async def _look(self, name: str, look: Awaitable[object]) -> None:
        self._found[name] = None
        try:
            await look
        except grpc.RpcError as error:
            self._found[name] = Broken(f"a call failed that should not have: {error}")
        except (Broken, NotApplicable) as error:
            self._found[name] = error

    async def _drain(self, deadline_s: float) -> admin_pb2.DrainResponse:
        request = admin_pb2.DrainRequest(deadline=duration(deadline_s))
        call = self._d.admin.Drain(request, timeout=answer_s())
        answer: admin_pb2.DrainResponse = await if_served(call, "Drain")
        return answer

    async def _answer(self, answer: admin_pb2.DrainResponse) -> None:
        expect(answer.transfers >= 2, "at least two transfers in flight", answer)

    async def _told(self, p: KitPrefill) -> None:
        drain = await p.hears("drain", "word of the drain")
        told = 0 < seconds(drain.deadline) <= DRAIN_S
        expect(told, f"a deadline above 0, of at most {DRAIN_S:g} s", drain)

    async def _allocate(self, p: KitPrefill) -> None:
        for kv_needed in (True, False):
            request = self._d.request()
            await p.allocate_refused(request, Reason.DRAINING, "Allocate", kv_needed=kv_needed)

    async def _waiting_legs(self, p: KitPrefill, expected: Request, legs: list[ClientLeg]) -> None:
        for leg in legs:
            await leg.fails(Reason.DRAINING, "no grant will come for this client")
        await p.allocate_refused(expected, Reason.DRAINING, "Allocate after its client")

    async def _again(
        self, p: KitPrefill, request: Request, grant: decode_pb2.AllocateResponse
    ) -> None:
        expect_equal(await p.allocate(request), grant, "the grant, as before the drain,")

    async def _generate(self, *, local: bool) -> None:
        leg = self._d.generate(self._d.request(), local=local)
        await leg.fails(Reason.DRAINING, "Generate of a D that drains")

    async def _back(self, p: KitPrefill) -> None:
        again = await self._d.prefill(p.instance.name, p.instance.epoch)
        await again.hears("drain", "word of the drain after welcome")

    async def _info(self) -> None:
        request = admin_pb2.GetServerInfoRequest()
        call = self._d.admin.GetServerInfo(request, timeout=answer_s())
        answer: admin_pb2.GetServerInfoResponse = await if_served(call, "GetServerInfo")
        expect_equal(answer.server.health, admin_pb2.HEALTH_DRAINING, "health")

    async def _health(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._d.channel)
        states = health_pb2.HealthCheckResponse
        wanted = {"": states.SERVING, "pd_grpc.v1.DecodeService": states.NOT_SERVING}
        for service, status in wanted.items():
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await if_served(stub.Check(request, timeout=answer_s()), "grpc.health.v1")
            expect_equal(answer.status, status, f"status of {service!r}")

    async def _finished(
        self, p: KitPrefill, request: Request, grant: decode_pb2.AllocateResponse, leg: ClientLeg
    ) -> None:
        await HandOver(self._d, p, request, grant, leg).completes()

    async def _left(self, p: KitPrefill, request: Request, leg: ClientLeg) -> None:
        await self._drain(0)
        await leg.fails(Reason.DRAINING, "the drain's deadline is over")
        ended = await p.told_of(request, "the end of what was left")
        check_fault(read_status(ended.status), Reason.DRAINING, "the end of what was left")
