"""What reaches a D's memory is kept as long as any address of that D is used."""

from __future__ import annotations

from pd_grpc.decode.transfer import Owner
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.v1 import layout_pb2
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import until

SHARED = ("shm", "inline")


def owner_of(p: PrefillServer) -> Owner:
    return Owner(p.instance.name, p.instance.epoch)


def by_shm(p: PrefillServer) -> bool:
    sessions = p.machine.conversations.all()
    return [s.welcome.transport for s in sessions] == [layout_pb2.TRANSPORT_SHM]


async def test_two_addresses_of_one_decode_lead_to_the_same_memory() -> None:
    """The session by the first is left for that by the second, and back again."""
    async with running() as cluster:
        p = await cluster.prefill(transports=SHARED)
        d = await cluster.decode(transports=SHARED)
        other = d.endpoint.replace("127.0.0.1", "localhost")
        for i, endpoint in enumerate((d.endpoint, other, other, d.endpoint)):
            request = request_to(endpoint, random_seed=i)
            prefill, generate = await cluster.run(p, d, request)
            assert (prefill.fault, generate.fault) == (None, None)
            assert generate.tokens == answer_to(request)
            assert by_shm(p), endpoint


async def test_a_decode_that_was_left_is_attached_to_anew() -> None:
    async with running() as cluster:
        p = await cluster.prefill(transports=SHARED, session_idle_s=0.05)
        d = await cluster.decode(transports=SHARED)
        quarantine = d.machine.ledger.quarantine
        for i in range(3):
            request = request_to(d, random_seed=i)
            _, generate = await cluster.run(p, d, request)
            assert generate.tokens == answer_to(request)
            await until(lambda: not p.machine.conversations.all())
            await until(lambda: not quarantine.is_attached(owner_of(p)))
