"""Only the P that a grant was given to may send KV for it."""

from __future__ import annotations

import pytest

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Code, Reason
from tests.decode.harness import Harness
from tests.decode.messages import hello
from tests.decode.prefill_peer import Prefill
from tests.decode.receiver_shard import LAYER, OWNER, Shard
from tests.decode.wire import fault_of, tokens_of, wire

OTHER = Owner("q", 3)


@pytest.mark.parametrize("session_id", ["", "s-none"])
def test_a_stream_without_a_session_of_ours_is_refused(session_id: str) -> None:
    shard = Shard()
    good = shard.stream()
    stream = shard.stream(session_id=session_id)
    assert shard.fault(stream).reason is Reason.NO_SESSION
    shard.everything(good)
    shard.end(good, 2, 8 * LAYER)
    assert shard.ends[good] is None, "it harms nothing"


def test_another_ps_stream_is_refused() -> None:
    shard = Shard()
    shard.receiver.sessions.admit(OTHER, "s-other")
    good = shard.stream()
    stream = shard.stream(session_id="s-other")
    fault = shard.fault(stream)
    assert fault.reason is Reason.NOT_OWNER and fault.code is Code.PERMISSION_DENIED
    shard.everything(good)


def test_another_ps_stream_that_came_before_the_grant_is_refused_then() -> None:
    shard = Shard(grant=False)
    shard.receiver.sessions.admit(OTHER, "s-other")
    stream = shard.stream(session_id="s-other")
    shard.grant()
    assert shard.fault(stream).reason is Reason.NOT_OWNER


def test_a_new_session_may_go_on_and_a_stream_begun_under_the_last_may_too() -> None:
    shard = Shard()
    shard.receiver.sessions.admit(OWNER, "s-2")
    shard.everything(shard.stream(session_id="s"))
    again = shard.stream(session_id="s-2")
    shard.end(again, 0, 0)
    assert shard.ends[again] is None
    shard.receiver.sessions.admit(OWNER, "s-3")
    assert shard.fault(shard.stream(session_id="s")).reason is Reason.NO_SESSION


def test_nothing_is_kept_of_a_p_that_is_gone() -> None:
    shard = Shard()
    for number in range(100):
        shard.receiver.sessions.admit(OWNER, f"s-{number}")
    shard.receiver.sessions.dismiss(OWNER)
    assert shard.fault(shard.stream(session_id="s-99")).reason is Reason.NO_SESSION
    assert vars(shard.receiver.sessions) == {"_owners": {}, "_ids": {}}


def test_the_shard_knows_a_session_before_its_p_does(d: Harness) -> None:
    actions = d.machine.handle(ev.HelloReceived(7, hello("p", 10)), d.now)
    admitted, welcome = (a for a in actions if isinstance(a, act.AdmitSession | act.SessionSend))
    assert isinstance(admitted, act.AdmitSession) and isinstance(welcome, act.SessionSend)
    assert admitted.owner == Owner("p", 10)
    assert admitted.session_id == welcome.message.welcome.session_id


def test_the_shard_hears_of_a_p_that_is_gone(d: Harness) -> None:
    p = Prefill(d)
    gone = act.DismissPrefill(Owner("p", 10))
    assert gone in d.machine.handle(ev.HelloReceived(7, hello("p", 11)), d.now)
    assert d.machine.handle(ev.GoodbyeReceived(p.stream), d.now) == []
    again = act.DismissPrefill(Owner("p", 11))
    assert again in d.machine.handle(ev.GoodbyeReceived(7), d.now)


async def test_a_real_d_takes_kv_from_the_session_that_asked_and_from_no_other() -> None:
    async with wire() as d:
        mine, other = await d.prefill("p"), await d.prefill("q")
        request = d.request()
        answer = d.generate(request)
        grant = await mine.allocate(request)
        refusal = await fault_of(await other.open(request, grant))
        assert refusal.reason is Reason.NOT_OWNER
        welcome, mine.welcome.session_id = mine.welcome.session_id, "s-none"
        assert (await fault_of(await mine.open(request, grant))).reason is Reason.NO_SESSION
        mine.welcome.session_id = welcome
        token, chunks = mine.compute(request)
        await mine.first_token(request, grant.grant_id, token)
        await mine.send_kv(request, grant, chunks)
        assert await tokens_of(answer) == d.answer(request)


async def test_a_session_that_comes_back_goes_on_sending_to_a_real_d() -> None:
    async with wire() as d:
        p = await d.prefill("p")
        request = d.request()
        answer = d.generate(request)
        grant = await p.allocate(request)
        token, chunks = p.compute(request)
        before = p.welcome.session_id
        p.session.cancel()
        await p.join()
        assert p.welcome.session_id != before
        await p.first_token(request, grant.grant_id, token)
        await p.send_kv(request, grant, chunks)
        assert await tokens_of(answer) == d.answer(request)
