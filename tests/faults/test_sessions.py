"""A session that is lost, renewed, replaced or refused, between real instances."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from pd_grpc.decode.server import DecodeServer
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.decode.wire import fault_of, tokens_of, wire
from tests.faults.breakers import may_ask
from tests.lines import line_to
from tests.prefill.cluster import Cluster, Outcome, Request, answer_to, request_to, running
from tests.waiting import LIMIT_S, until

BEAT: dict[str, Any] = {"heartbeat_s": 0.3, "lease_s": 1.2, "grace_s": 1.0}
SESSION = "Session"
HELLO = 1


def reason(outcome: Outcome) -> Reason:
    """Why a leg failed, in our own words."""
    assert isinstance(outcome.fault, Fault), outcome.fault
    return outcome.fault.reason


def session_id(d: DecodeServer) -> str:
    """Of the only session with a stream; nothing while there is none."""
    live = d.machine.ledger.sessions.live()
    return live[0].session_id if live else ""


def prepared(p: PrefillServer) -> bool:
    """Whether all that P has is granted and waits for P's own blocks."""
    states = {info.state for info in p.view.transfers()}
    return states == {types_pb2.TRANSFER_STATE_PREPARED}


async def hold(cluster: Cluster, p: PrefillServer, d: DecodeServer, request: Request) -> Held:
    """A request that has its grant and goes no further while P's pool is taken."""
    held = Held(cluster, p, d, request)
    await until(partial(prepared, p))
    return held


class Held:
    """Both legs of a request that P keeps waiting."""

    def __init__(
        self, cluster: Cluster, p: PrefillServer, d: DecodeServer, request: Request
    ) -> None:
        self._taken = p.pool.reserve(p.pool.free, owner="the test")
        self._p = p
        self.prefill = asyncio.create_task(cluster.run_prefill(p, request))
        self.generate = asyncio.create_task(cluster.run_generate(d, request))

    def go_on(self) -> None:
        self._taken.release()
        self._p.runtime.wake()


async def test_a_session_renewed_within_grace_costs_nobody_anything() -> None:
    broken = Rule(Kind.HALF_CLOSE, SESSION, messages={3}, calls={1})
    faults = Injector(broken)
    async with running() as cluster:
        p, d = await cluster.prefill(faults=faults, **BEAT), await cluster.decode(**BEAT)
        request = request_to(d)
        held = await hold(cluster, p, d, request)
        first = session_id(d)
        await until(lambda: faults.strikes(broken) == 1 and session_id(d) not in ("", first))
        held.go_on()
        assert (await held.prefill).fault is None
        assert (await held.generate).tokens == answer_to(request)


async def test_a_session_renewed_after_grace_begins_anew() -> None:
    async with running() as cluster:
        settings = {**BEAT, "grace_s": 0.3}
        p, d = await cluster.prefill(**settings), await cluster.decode(**settings)
        async with line_to(d.endpoint) as line:
            held = await hold(cluster, p, d, _by(line.endpoint, 1))
            await line.cut()
            assert reason(await asyncio.wait_for(held.prefill, LIMIT_S)) is Reason.DECODE_LOST
            assert reason(await held.generate) is Reason.PREFILL_LOST
            assert d.machine.ledger.transfers == {}
            held.go_on()
            await line.mend()
            again = _by(line.endpoint, 2)
            # P turns from a D that it has just lost for a moment.
            await until(lambda: may_ask(p))
            prefill, generate = await cluster.run(p, d, again)
            assert (prefill.fault, generate.tokens) == (None, answer_to(again))


async def test_of_two_sessions_of_one_epoch_the_newest_owns_everything() -> None:
    async with wire() as d:
        p = await d.prefill()
        request = d.request()
        call = d.generate(request)
        grant = await p.allocate(request)
        old, old_id = p.session, p.welcome.session_id
        await p.join()
        assert (await fault_of(old)).reason is Reason.SUPERSEDED
        newest, p.welcome.session_id = p.welcome.session_id, old_id
        assert (await fault_of(p.release(request))).reason is Reason.NO_SESSION
        p.welcome.session_id = newest
        beat = decode_pb2.Heartbeat(sequence=1, grant_ids=[grant.grant_id])
        await p.session.write(decode_pb2.SessionRequest(heartbeat=beat))
        await until(lambda: any(m.HasField("heartbeat_ack") for m in p.heard))
        (ack,) = [m.heartbeat_ack for m in p.heard if m.HasField("heartbeat_ack")]
        assert list(ack.unknown_grant_ids) == [], "the end of the older one took nothing with it"
        token, chunks = p.compute(request)
        await p.first_token(request, grant.grant_id, token)
        await p.send_kv(request, grant, chunks)
        assert await tokens_of(call) == d.answer(request)


async def test_an_older_process_is_refused_and_leaves() -> None:
    async with running() as cluster:
        d = await cluster.decode(**BEAT)
        older = await cluster.prefill(name="p", **BEAT)
        held = await hold(cluster, older, d, request_to(d))
        newer = await cluster.prefill(name="p", **BEAT)
        request = request_to(d, random_seed=2)
        prefill, generate = await cluster.run(newer, d, request)
        assert (prefill.fault, generate.tokens) == (None, answer_to(request))
        assert reason(await asyncio.wait_for(held.prefill, LIMIT_S)) is Reason.STALE_EPOCH
        assert reason(await held.generate) is Reason.PREFILL_LOST
        await until(lambda: not older.control.ready)
        refused = await cluster.run_prefill(older, request_to(d, random_seed=3))
        assert reason(refused) in (Reason.STALE_EPOCH, Reason.DRAINING)
        held.go_on()


@pytest.mark.parametrize(
    ("tombstone_s", "told"), [(60.0, Reason.CLIENT_GONE), (0.01, Reason.LEASE_EXPIRED)]
)
async def test_an_end_whose_word_is_lost_is_told_by_the_next_heartbeat(
    tombstone_s: float, told: Reason
) -> None:
    """With its cause while D remembers it; after that P fails the grant that D does not know."""
    faults = Injector()
    async with running() as cluster:
        p = await cluster.prefill(**BEAT)
        d = await cluster.decode(faults=faults, tombstone_s=tombstone_s, **BEAT)
        held = await hold(cluster, p, d, request_to(d))
        lost = faults.add(Rule(Kind.DROP, SESSION, Direction.RESPONSE))
        held.generate.cancel()
        await until(lambda: not d.machine.ledger.transfers and faults.strikes(lost) > 0)
        faults.remove(lost)
        assert reason(await asyncio.wait_for(held.prefill, LIMIT_S)) is told
        held.go_on()


async def test_an_end_while_the_session_is_broken_is_told_with_its_cause() -> None:
    broken = Rule(Kind.HALF_CLOSE, SESSION, messages={2}, calls={1})
    away = Rule(Kind.DELAY, SESSION, messages={HELLO}, calls={2}, delay_s=0.5)
    faults = Injector(broken, away)
    async with running() as cluster:
        p, d = await cluster.prefill(faults=faults, **BEAT), await cluster.decode(**BEAT)
        held = await hold(cluster, p, d, request_to(d))
        await until(lambda: faults.strikes(away) == 1)
        held.generate.cancel()
        await until(lambda: not d.machine.ledger.transfers)
        assert session_id(d) == "" and not held.prefill.done(), "P cannot know yet"
        assert reason(await asyncio.wait_for(held.prefill, LIMIT_S)) is Reason.CLIENT_GONE
        held.go_on()


def _by(endpoint: str, seed: int) -> Request:
    return request_to(endpoint, random_seed=seed)
