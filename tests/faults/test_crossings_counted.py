"""Grants that cross with the end of the call that asked for them, as they do by themselves.

Nothing is held up here: calls are given up at about the time of their answer, and some are granted
on D when their caller has just given up. How many is counted. Each of them goes back, by a Release,
by the end of P's session or by its lease, and `running` and `wire` find every block free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio

from pd_grpc.decode.actions import Changed as ChangedOnD
from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from pd_grpc.prefill.actions import Changed as ChangedOnP
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
)
from tests.decode.wire import CALL_S, RawPrefill, Wire, wire
from tests.faults.aim import Aim
from tests.prefill.cluster import Cluster, answer_to, request_to, running
from tests.waiting import until

AT_ONCE = 8
TRIES = 4
"""A run goes on until enough have crossed, up to so many times as long."""
SPREAD_S, STEP_S = 0.002, 0.0002
GIVEN_UP_S = 4.0
"""By when all that was given up is back; no lease ends before."""
HOP_MARGIN_S = 0.02
LONG: dict[str, Any] = {
    "heartbeat_s": 5.0,
    "lease_s": 15.0,
    "num_blocks": 1024,
    "hop_margin_s": HOP_MARGIN_S,
}


class Words:
    """What D granted, what P heard of it, and how each ended on D; by transfer id."""

    def __init__(self, d: DecodeServer, p: PrefillServer | None = None) -> None:
        self.granted: set[str] = set()
        self.heard: set[str] = set()
        self.ends: dict[str, Fault | None] = {}
        d.runtime.listeners.append(self._on_d)
        if p is not None:
            p.runtime.listeners.append(self._on_p)

    @property
    def crossed(self) -> set[str]:
        """Granted, and nobody was told."""
        return self.granted - self.heard

    def judge(self, aim: Aim, transfer_id: str) -> None:
        """Correct the aim by what is known of a call that has just been given up."""
        if transfer_id in self.heard:
            aim.late()
        elif transfer_id not in self.granted:
            aim.early()

    def ends_of_crossed(self) -> Counter[str]:
        """Why D took back what had crossed, and in which stage."""
        faults = (self.ends[transfer_id] for transfer_id in self.crossed)
        return Counter(
            f"{fault.reason.name} {fault.metadata.get('stage', '')}".strip() if fault else ""
            for fault in faults
        )

    def _on_d(self, change: ChangedOnD) -> None:
        if change.after is DecodeState.RESERVED:
            self.granted.add(change.key.transfer_id)
        elif change.after.terminal:
            self.ends[change.key.transfer_id] = change.fault

    def _on_p(self, change: ChangedOnP) -> None:
        if change.after is PrefillState.PREPARED:
            self.heard.add(change.key.transfer_id)


async def shoot(one: Callable[[int], Awaitable[None]], many: int, words: Words, least: int) -> int:
    """Give up `many` calls, and more until `least` have crossed; returns how many."""
    done = 0

    async def worker() -> None:
        nonlocal done
        while done < many or (len(words.crossed) < least and done < TRIES * many):
            done += 1
            await one(done)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    crossed = len(words.crossed)
    assert crossed >= least, f"{crossed} of {done} were granted when P had given up"
    return done


def idle(d: DecodeServer) -> bool:
    return not d.machine.ledger.transfers and not d.view.transfers()


async def listed(cluster: Cluster, endpoint: str) -> int:
    admin = admin_pb2_grpc.AdminServiceStub(cluster.channel(endpoint))
    answer = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
    return len(answer.transfers)


async def check_all_back(cluster: Cluster, p: PrefillServer, d: DecodeServer) -> None:
    """Nothing is left of what was given up, without waiting for a lease; P and D serve as ever."""
    await until(lambda: idle(d) and not p.view.transfers(), GIVEN_UP_S)
    assert [await listed(cluster, each.endpoint) for each in (p, d)] == [0, 0]
    request = request_to(d, random_seed=999_999)
    prefill, generate = await cluster.run(p, d, request)
    assert (prefill.fault, generate.tokens) == (None, answer_to(request))


def told(kind: str, words: Words, done: int) -> set[str]:
    """Says what became of a run to whoever has it shown; returns how what had crossed ended."""
    ends = words.ends_of_crossed()
    print(
        f"{kind}: {len(words.crossed)} of {done} crossed, of {len(words.granted)} granted; {ends}"
    )
    return set(ends)


async def test_what_p_gives_up_near_its_grant_is_released() -> None:
    """400 by a deadline and 1,000 by a cancel. A P whose own blocks are taken goes no further than
    the grant, so that each of its requests is given up."""
    async with running() as cluster:
        p, d = await cluster.prefill(**LONG), await cluster.decode(**LONG)
        taken = p.pool.reserve(p.pool.free, owner="the test")
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))

        words, aim = Words(d, p), Aim(0.01, SPREAD_S, STEP_S, seed=1)

        async def in_time(n: int) -> None:
            request = request_to(d, tokens=12, random_seed=n)
            call = stub.Prefill(request.prefill(), timeout=HOP_MARGIN_S + aim.next())
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            words.judge(aim, request.ref.transfer_id)

        done = await shoot(in_time, 400, words, least=5)
        await until(lambda: idle(d), GIVEN_UP_S)
        ends = told("P's time was over", words, done)
        # Whichever came first: P's word, what D had been told of the request's time, or, on a busy
        # machine, the caller's own deadline.
        assert ends <= {"STAGE_DEADLINE allocate", "STAGE_DEADLINE transfer", "CLIENT_GONE"}

        words, aim = Words(d, p), Aim(0.01, SPREAD_S, STEP_S, seed=2)

        async def cancelled(n: int) -> None:
            request = request_to(d, tokens=12, random_seed=n)
            call = stub.Prefill(request.prefill(), timeout=60)
            await asyncio.sleep(aim.next())
            call.cancel()
            words.judge(aim, request.ref.transfer_id)
            assert await call.code() is grpc.StatusCode.CANCELLED

        done = await shoot(cancelled, 1000, words, least=20)
        await until(lambda: idle(d), GIVEN_UP_S)
        assert told("P's caller cancelled", words, done) == {"CLIENT_GONE"}
        taken.release()
        p.runtime.wake()
        await check_all_back(cluster, p, d)


class StockP:
    """A P of stock stubs, whose Allocates end by their own deadlines, near their answers."""

    def __init__(self, d: Wire, p: RawPrefill, seed: int) -> None:
        self.words = Words(d.server)
        self._d, self._p = d, p
        self._aim = Aim(0.005, SPREAD_S, STEP_S, seed)

    async def ask(self, release: bool) -> None:
        """One Allocate; what was answered is given back, what was not is where `release` says so,
        as a P must."""
        request = self._d.request()
        try:
            await self._p.allocate(request, timeout_s=max(0.0005, self._aim.next()))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert isinstance(read_error(error), TransportFault), "no answer of D's"
        else:
            self.words.heard.add(request.transfer_id)
        self.words.judge(self._aim, request.transfer_id)
        if release or request.transfer_id in self.words.heard:
            await self._p.release(request, cause=Fault(Reason.SUPERSEDED, "given up"))


def stock_d(**settings: Any) -> AbstractAsyncContextManager[Wire]:
    return wire(num_blocks=1024, **settings)


async def test_what_a_stock_stub_saw_the_deadline_of_is_gone_by_its_release() -> None:
    """400 Allocates that gRPC itself ends."""
    async with stock_d() as d:
        p = await d.prefill()
        stock = StockP(d, p, seed=3)
        done = await shoot(lambda n: stock.ask(release=True), 400, stock.words, least=5)
        await d.settled()
        assert told("gRPC's deadline, Release", stock.words, done) == {"SUPERSEDED"}


async def test_what_was_never_released_is_gone_with_its_lease() -> None:
    """P goes on with its heartbeats and lists no grant that it has not heard of."""
    async with stock_d(heartbeat_s=2.0, lease_s=0.6) as d:
        p = await d.prefill()
        beating = asyncio.create_task(_beat(p, 0.2))
        stock = StockP(d, p, seed=4)
        done = await shoot(lambda n: stock.ask(release=False), 100, stock.words, least=3)
        await until(lambda: idle(d.server))
        assert told("gRPC's deadline, lease", stock.words, done) == {"LEASE_EXPIRED"}
        beating.cancel()


async def test_what_was_never_released_is_gone_with_its_session() -> None:
    async with stock_d(grace_s=0.2) as d:
        p = await d.prefill()
        stock = StockP(d, p, seed=5)
        done = await shoot(lambda n: stock.ask(release=False), 100, stock.words, least=3)
        assert len(d.server.machine.ledger.transfers) >= 3, "no lease is over"
        goodbye = decode_pb2.SessionRequest(goodbye=decode_pb2.Goodbye())
        await p.session.write(goodbye)
        await until(lambda: idle(d.server))
        assert told("gRPC's deadline, goodbye", stock.words, done) == {"PREFILL_LOST"}


async def test_a_release_that_comes_before_the_allocate_sent_before_it_leaves_nothing() -> None:
    """As P sends them: an Allocate from a connection of its own, the Release behind it at once."""
    async with stock_d() as d:
        p = await d.prefill()
        words = Words(d.server)
        overtaken: set[str] = set()
        with grpc.insecure_channel(d.server.endpoint) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)

            async def release_at_once(n: int) -> None:
                request = d.request()
                message = request.allocate(p.welcome.session_id)
                allocate = stub.Allocate.future(message, timeout=CALL_S)
                await p.release(request, cause=Fault(Reason.SUPERSEDED, "given up"))
                if request.transfer_id not in words.granted:
                    overtaken.add(request.transfer_id)
                error = await asyncio.to_thread(allocate.exception)
                assert (error is None) == (request.transfer_id in words.granted)
                if error is not None:
                    fault = read_error(error)
                    assert isinstance(fault, Fault) and fault.reason is Reason.RELEASED

            done = 0
            while done < 400 or (not overtaken and done < TRIES * 400):
                await asyncio.gather(*(release_at_once(n) for n in range(AT_ONCE)))
                done += AT_ONCE
        print(f"{len(overtaken)} of {done} Releases overtook the Allocate sent before them")
        assert overtaken
        assert not overtaken & words.granted, "what is released first is never granted"
        await d.settled()


async def _beat(p: RawPrefill, every_s: float) -> None:
    sequence = 0
    while True:
        sequence += 1
        beat = decode_pb2.Heartbeat(sequence=sequence)
        await p.session.write(decode_pb2.SessionRequest(heartbeat=beat))
        await asyncio.sleep(every_s)
