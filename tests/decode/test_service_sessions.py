"""Sessions and a failing engine over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1 import (
    decode_pb2,
    types_pb2,
)
from tests.decode.messages import BLOCK
from tests.decode.wire import GatedEngine, Wire, fault_of, tokens_of, wire
from tests.waiting import until


@pytest.fixture
async def d() -> AsyncIterator[Wire]:
    async with wire() as running:
        yield running


async def test_heartbeats_renew_and_are_answered(d: Wire) -> None:
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    beat = decode_pb2.Heartbeat(sequence=1, grant_ids=[grant.grant_id, "g-none"])
    await p.session.write(decode_pb2.SessionRequest(heartbeat=beat))
    await until(lambda: len(p.heard) >= 2)
    assert p.heard[0].heartbeat_ack.unknown_grant_ids == ["g-none"]
    assert p.heard[1].load.total_blocks == 24
    await p.release(request)


async def test_a_silent_prefill_loses_its_grants() -> None:
    """S8: here with times short enough to wait for."""
    async with wire(heartbeat_s=0.2, grace_s=0.1) as d:
        p = await d.prefill()
        request = d.request()
        call = d.generate(request)
        await p.allocate(request)
        assert (await fault_of(call)).reason is Reason.PREFILL_LOST
        assert (await fault_of(p.session)).reason is Reason.LEASE_EXPIRED


async def test_a_lease_that_nobody_renews_ends() -> None:
    """F1."""
    async with wire(lease_s=0.3) as d:
        p = await d.prefill()
        request = d.request()
        call = d.generate(request)
        await p.allocate(request)
        fault = await fault_of(call)
        assert fault.reason is Reason.LEASE_EXPIRED and fault.code is Code.UNAVAILABLE
        ended = await p.told_of(request)
        assert ended.state == types_pb2.TRANSFER_STATE_EXPIRED


async def test_a_prefill_that_vanishes_is_lost_after_grace_and_may_be_replaced() -> None:
    """F10, F21."""
    async with wire(grace_s=0.2) as d:
        p = await d.prefill()
        lost, decoding = d.request(), d.request(max_tokens=9)
        kept = d.generate(decoding)
        await p.hand_over(decoding)
        call = d.generate(lost)
        await p.allocate(lost)
        await p.close()
        fault = await fault_of(call)
        assert fault.reason is Reason.PREFILL_LOST and fault.code is Code.UNAVAILABLE
        assert await tokens_of(kept) == d.answer(decoding)
        d.peers.clear()
        other = await d.prefill(epoch=11)
        again = d.request()
        call = d.generate(again)
        await other.hand_over(again)
        assert await tokens_of(call) == d.answer(again)


async def test_a_session_begins_with_hello_and_only_once(d: Wire) -> None:
    p = await d.prefill()
    session = p.decode.Session()
    beat = decode_pb2.Heartbeat(sequence=1)
    await session.write(decode_pb2.SessionRequest(heartbeat=beat))
    assert (await fault_of(session)).reason is Reason.WRONG_STATE
    hello = decode_pb2.Hello(instance=p.instance, layouts=[p.welcome.layout])
    await p.session.write(decode_pb2.SessionRequest(hello=hello))
    assert p._listener is not None
    await p._listener
    assert (await fault_of(p.session)).reason is Reason.WRONG_STATE


async def test_a_hello_that_does_not_fit_is_told_why(d: Wire) -> None:
    p = await d.prefill()
    layout = p.welcome.layout
    layout.block_size = 2 * BLOCK
    session = p.decode.Session()
    hello = decode_pb2.Hello(instance=p.instance, layouts=[layout])
    await session.write(decode_pb2.SessionRequest(hello=hello))
    fault = await fault_of(session)
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata == {"field": "layout.block_size", "ours": "4", "theirs": "8"}


async def deaf_session(d: Wire) -> Any:
    """The session of a P that does not read, beside that of another that does."""
    p = await d.prefill()
    deaf = p.decode.Session()
    instance = types_pb2.Instance(name="deaf", epoch=1, role=types_pb2.ROLE_PREFILL)
    hello = decode_pb2.Hello(instance=instance, layouts=[p.welcome.layout])
    await deaf.write(decode_pb2.SessionRequest(hello=hello))
    await until(lambda: len(d.server.machine.ledger.sessions.live()) == 2)
    return deaf


def demanding(sequence: int) -> decode_pb2.SessionRequest:
    """A heartbeat whose ack has some 4 MB."""
    beat = decode_pb2.Heartbeat(sequence=sequence, grant_ids=["g" * 1000] * 4000)
    return decode_pb2.SessionRequest(heartbeat=beat)


async def test_a_prefill_that_does_not_read_loses_its_session(d: Wire) -> None:
    """It makes D talk for as long as its heartbeats list grants that nobody knows."""
    sessions = d.server.machine.ledger.sessions
    deaf = await deaf_session(d)
    for sequence in range(1, 40):
        with contextlib.suppress(asyncio.CancelledError):
            await deaf.write(demanding(sequence))
        if len(sessions.live()) == 1:
            break
    await until(lambda: len(sessions.live()) == 1)
    fault = await fault_of(deaf)
    assert fault.reason is Reason.LEASE_EXPIRED and "wait for this prefill" in fault.message


async def test_a_prefill_that_stops_reading_is_as_good_as_silent() -> None:
    async with wire(heartbeat_s=0.3) as d:
        deaf = await deaf_session(d)
        for sequence in (1, 2):
            await deaf.write(demanding(sequence))
        assert len(d.server.runtime._sessions) == 2
        await until(lambda: not d.server.runtime._sessions)
        assert (await fault_of(deaf)).reason is Reason.LEASE_EXPIRED


async def test_a_defect_while_a_session_is_read_ends_it_with_an_error(
    d: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await d.prefill()
    feed = d.server.runtime.feed

    def defective(event: ev.Event) -> None:
        if isinstance(event, ev.HeartbeatReceived):
            raise ZeroDivisionError
        feed(event)

    monkeypatch.setattr(d.server.runtime, "feed", defective)
    beat = decode_pb2.Heartbeat(sequence=1)
    await p.session.write(decode_pb2.SessionRequest(heartbeat=beat))
    fault = await fault_of(p.session)
    assert fault.reason is Reason.ENGINE_ERROR and fault.code is Code.INTERNAL
    assert "reading a session failed" in caplog.text


# The engine


class BrokenEngine(SimEngine):
    """Raises what no engine should, or leaves an answer out, when told."""

    mode = ""

    def decode(self, batch: Any) -> Any:
        if self.mode == "raises":
            raise ZeroDivisionError
        answers = super().decode(batch)
        return answers[1:] if self.mode == "forgets" else answers


@pytest.mark.parametrize("mode", ["raises", "forgets"])
async def test_an_engine_that_fails_fails_its_step_alone(mode: str) -> None:
    """S4."""
    async with wire(BrokenEngine) as d:
        assert isinstance(d.server.engine, BrokenEngine)
        d.server.engine.mode = mode
        fault = await fault_of(d.generate(d.request(), local=True))
        assert fault.reason is Reason.ENGINE_ERROR and fault.code is Code.INTERNAL
        d.server.engine.mode = ""
        request = d.request()
        assert await tokens_of(d.generate(request, local=True)) == d.answer(request)


async def test_a_stuck_engine_turns_readiness_off_and_comes_back() -> None:
    """S13."""
    async with wire(GatedEngine, no_progress_s=0.2) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        fault = await fault_of(d.generate(d.request(), local=True))
        assert fault.reason is Reason.ENGINE_STUCK and fault.code is Code.UNAVAILABLE
        assert not d.server.control.ready and "no progress" in d.server.control.reason
        assert (await fault_of(d.generate(d.request()))).reason is Reason.ENGINE_STUCK
        engine.gate.set()
        await until(lambda: d.server.control.ready)
        request = d.request()
        assert await tokens_of(d.generate(request, local=True)) == d.answer(request)
