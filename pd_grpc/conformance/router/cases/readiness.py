"""R6xx: whether the router takes requests."""

from __future__ import annotations

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_grpc.conformance.calls import Stream
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.instance import KitInstance
from pd_grpc.conformance.router.subject import INFERENCE, RouterHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import admin_pb2

ANSWER = [901, 902, 903]


@case(601, "A router takes requests while an instance of each role that it needs does.")
async def no_prefill_is_ready(r: RouterHand) -> None:
    """P turns NOT_SERVING: so does the router, until P is back."""
    await _not_ready_without(r, r.p)


@case(602, "A router takes requests while an instance of each role that it needs does.")
async def no_decode_is_ready(r: RouterHand) -> None:
    """D turns NOT_SERVING: so does the router, until D is back."""
    await _not_ready_without(r, r.d)


async def _not_ready_without(r: RouterHand, instance: KitInstance) -> None:
    await r.turns(True)
    r.instances.set_ready(instance, False)
    await r.turns(False)
    r.instances.set_ready(instance, True)
    await r.turns(True)
    one = await r.routed()
    await one.finish(ANSWER)


@case(603, "the router has no ready instance of a role")
async def refused_for_want_of_an_instance(r: RouterHand) -> None:
    """Requests are refused with NO_INSTANCE while P is not ready, and while D is not."""
    for instance in (r.p, r.d):
        r.instances.set_ready(instance, False)
        await r.turns(False)
        await r.refused(Reason.NO_INSTANCE, f"{instance.name} is NOT_SERVING")
        r.instances.set_ready(instance, True)
        await r.turns(True)


@case(604, "the router has no ready instance of a role")
async def a_lost_instance_is_not_ready(r: RouterHand) -> None:
    """Requests are refused with NO_INSTANCE while P's connection is lost, and answered when it is
    back."""
    await r.instances.cut(r.p)
    await r.turns(False)
    await r.refused(Reason.NO_INSTANCE, "P is lost")
    await r.p.line.mend()
    await r.turns(True)
    one = await r.routed()
    await one.finish(ANSWER)


@case(
    605,
    "the empty name is SERVING while the process is up, the full name of a service of its"
    " own while it takes new requests, and NOT_SERVING otherwise.",
)
async def liveness_is_not_readiness(r: RouterHand) -> None:
    """A router without a ready P is alive."""
    r.instances.set_ready(r.p, False)
    await r.turns(False)
    health = await r.readiness("")
    expect_equal(health.status, type(health).SERVING, "health of the empty name")


@case(
    606,
    "the empty name is SERVING while the process is up, the full name of a service of its"
    " own while it takes new requests, and NOT_SERVING otherwise.",
)
async def readiness_is_pushed(r: RouterHand) -> None:
    """A health Watch is told when the router turns NOT_SERVING, and when it is back."""
    request = health_pb2.HealthCheckRequest(service=INFERENCE)
    watch = Stream(r.health.Watch(request), "Watch", r.transcript)
    try:
        first = await watch.read("readiness as it is")
        expect_equal(first.status, type(first).SERVING, "readiness")
        r.instances.set_ready(r.p, False)
        told = await watch.read("readiness as it changes")
        expect_equal(told.status, type(first).NOT_SERVING, "readiness without P")
        r.instances.set_ready(r.p, True)
        told = await watch.read("readiness as it changes")
        expect_equal(told.status, type(first).SERVING, "readiness with P again")
    finally:
        await watch.leave()


@case(607, "A router serves reflection too.")
async def reflection_lists_the_services(r: RouterHand) -> None:
    """Reflection lists InferenceService."""
    stub = reflection_pb2_grpc.ServerReflectionStub(r.channel)
    stream = Stream(stub.ServerReflectionInfo(), "ServerReflectionInfo", r.transcript)
    try:
        await stream.send(reflection_pb2.ServerReflectionRequest(list_services="*"))
        answer = await stream.read("the services")
    finally:
        await stream.leave()
    names = [service.name for service in answer.list_services_response.service]
    expect(INFERENCE in names, f"{INFERENCE} among the services", names)


@case(608, "On the router: also ask every instance behind it.")
async def server_info_asks_the_peers(r: RouterHand) -> None:
    """GetServerInfo with `peers` has the kit's instances by name; one that is gone is
    UNREACHABLE."""
    before = {peer.instance.name: peer for peer in await r.peers()}
    for instance in (r.p, r.d):
        expect(instance.name in before, f"{instance.name} among the peers", sorted(before))
        found = before[instance.name].instance
        expect_equal(found, instance.instance, f"the instance {instance.name}")
    await r.instances.cut(r.p)
    await r.turns(False)
    after = {peer.instance.name: peer for peer in await r.peers()}
    for instance in (r.p, r.d):
        expect(instance.name in after, f"{instance.name} among the peers", sorted(after))
    expect_equal(after[r.p.name].health, admin_pb2.HEALTH_UNREACHABLE, "health of P, gone,")
    expect_equal(after[r.d.name].health, admin_pb2.HEALTH_SERVING, "health of D")
