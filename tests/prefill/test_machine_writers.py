"""P that writes into D's memory itself: how it gets there, and that D hears when it has stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.carriers import Carriers
from pd_grpc.prefill.states import PrefillState as S
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2
from tests.prefill.world import D1, D2, GONE, World, settle

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
KEY = TransferKey("t-1", 1)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(carriers=Carriers((SHM, INLINE), frozenset({SHM})))
    yield made
    settle(made)


def offered(world: World) -> list[list[int]]:
    return [list(opened.hello.transports) for opened in world.taken(act.OpenSession)]


def failed(world: World) -> None:
    """The welcome that has come does not get P there."""
    link = world.machine.conversations[D1].link
    world.feed(ev.TransportFailed(D1, link, SHM, "no such socket"))


def stops(world: World) -> list[bool]:
    """What each Release said of P's writing."""
    return [sent.request.writes_stopped for sent in world.taken(act.SendRelease)]


def computing(world: World, decodes: tuple[str, ...] = (D1,)) -> int:
    """A request whose stream is open."""
    call = world.call(tokens=12, decodes=decodes)
    world.connect(transport=SHM)
    world.grant(transport=SHM)
    assert world.state() is S.COMPUTING
    return call


def close(world: World) -> None:
    """The bulk side has let go of what it was told to."""
    for closing in world.take(act.CloseTransfer):
        world.feed(ev.TransferClosed(closing.key, closing.strand))


# Getting there


def test_what_does_not_get_p_there_is_not_offered_again(world: World) -> None:
    world.call()
    failed(world)
    assert offered(world) == [[SHM, INLINE], [INLINE]]
    closed = world.taken(act.CloseSession)
    assert [(c.link, c.graceful) for c in closed] == [(1, False)]
    world.connect()
    world.grant()
    assert world.state() is S.COMPUTING
    (opened,) = world.taken(act.OpenTransfer)
    assert opened.open.transport == INLINE


def test_it_is_offered_again_to_another_process_of_d(world: World) -> None:
    world.call()
    failed(world)
    world.connect()
    world.grant()
    world.decodes[D1].epoch += 1
    world.break_session()
    world.advance(0.1)
    world.connect()
    world.call("t-2")
    world.break_session()
    world.advance(0.1)
    assert offered(world) == [[SHM, INLINE], [INLINE], [INLINE], [SHM, INLINE]]


def test_a_failure_of_an_earlier_session_changes_nothing(world: World) -> None:
    world.call()
    world.connect(transport=SHM)
    before = world.machine.requests.late_events
    world.feed(ev.TransportFailed(D1, 1, SHM, "late"))
    world.feed(ev.TransportFailed(D2, 1, SHM, "nobody's"))
    assert world.machine.requests.late_events == before + 2
    assert offered(world) == [[SHM, INLINE]]


def test_a_d_that_chooses_what_was_not_offered_is_left(world: World) -> None:
    call = world.call()
    failed(world)
    world.connect(transport=SHM)
    assert world.fault(call).reason is Reason.LAYOUT_MISMATCH
    assert world.fault(call).metadata["ours"] == "TRANSPORT_INLINE"


def test_a_grant_may_be_by_inline_whatever_was_chosen(world: World) -> None:
    world.call()
    world.connect(transport=SHM)
    world.grant(transport=INLINE)
    (opened,) = world.taken(act.OpenTransfer)
    assert opened.open.transport == INLINE


def test_a_grant_outlives_the_memory_of_its_session(world: World) -> None:
    """A new session that did not get P there: the same grant, inline."""
    computing(world)
    world.break_session()
    world.advance(0.1)
    failed(world)
    world.connect()
    world.feed(ev.TransferBroken(KEY, 0, GONE))
    world.advance(0.1)
    assert [o.open.transport for o in world.taken(act.OpenTransfer)] == [SHM, INLINE]


# Having stopped


def test_d_hears_of_the_end_at_once_and_of_the_last_write_when_it_was(world: World) -> None:
    call = computing(world)
    world.feed(ev.PrefillCallEnded(call))
    assert stops(world) == [False]
    assert world.releases() == [(D1, Reason.CLIENT_GONE)]
    world.answer_release()
    close(world)
    assert stops(world) == [False, True]
    world.answer_release()
    assert len(world.machine.placement.releases) == 0


def test_the_last_write_may_be_over_before_d_has_answered(world: World) -> None:
    call = computing(world)
    world.feed(ev.PrefillCallEnded(call))
    close(world)
    assert stops(world) == [False]
    world.answer_release()
    assert stops(world) == [False, True]


def test_what_may_land_yet_is_never_said_to_be_over(world: World) -> None:
    call = computing(world)
    world.feed(ev.PrefillCallEnded(call))
    world.answer_release()
    for closing in world.take(act.CloseTransfer):
        world.feed(ev.TransferClosed(closing.key, closing.strand, stopped=False))
    world.advance(1)
    assert stops(world) == [False]
    assert len(world.machine.placement.releases) == 0


def test_a_stream_that_may_not_have_stopped_is_followed_by_no_other(world: World) -> None:
    """Another, inline or not, would end with the word that P writes no more."""
    call = computing(world)
    world.feed(ev.TransferBroken(KEY, 0, GONE, stopped=False))
    assert world.fault(call).reason is Reason.DECODE_LOST
    world.advance(1)
    assert len(world.taken(act.OpenTransfer)) == 1
    close(world)
    world.answer_release()
    assert stops(world) == [False]


def test_a_release_that_was_lost_says_it_the_second_time(world: World) -> None:
    call = computing(world)
    world.feed(ev.PrefillCallEnded(call))
    close(world)
    world.answer_release(TransportFault(Code.DEADLINE_EXCEEDED, "late"))
    world.advance(0.1)
    assert stops(world) == [False, True]
    world.answer_release()
    assert stops(world) == [False, True]


def test_the_last_write_is_told_of_as_long_as_the_session_lives(world: World) -> None:
    """D has forgotten the transfer, and has its blocks kept until it hears of that."""
    call = computing(world)
    world.feed(ev.PrefillCallEnded(call))
    world.answer_release()
    close(world)
    late_s = world.config.grace_s + 2 * world.config.tombstone_s
    for _ in range(int(late_s)):
        world.answer_release(TransportFault(Code.DEADLINE_EXCEEDED, "late"))
        world.say(load=decode_pb2.Load())
        world.advance(1)
    said = len(stops(world))
    world.answer_release(TransportFault(Code.DEADLINE_EXCEEDED, "late"))
    world.advance(1)
    assert stops(world)[said:] == [True]
    world.answer_release()
    world.advance(1)
    assert len(stops(world)) == said + 1
    assert len(world.machine.placement.releases) == 0


def test_what_d_has_ended_is_released_too_once_p_has_stopped(world: World) -> None:
    computing(world)
    status = Fault(Reason.CLIENT_GONE, "left").status()
    ref = types_pb2.TransferRef(transfer_id="t-1", attempt=1)
    state = types_pb2.TRANSFER_STATE_FAILED
    ended = decode_pb2.TransferEnded(ref=ref, status=status, state=state)
    world.say(transfer_ended=ended)
    assert stops(world) == []
    close(world)
    assert stops(world) == [True]


def test_what_d_has_ended_before_its_grant_came_is_released(world: World) -> None:
    """The answer may be on its way: D must hear that nothing will be written for it."""
    world.call()
    world.connect(transport=SHM)
    ref = types_pb2.TransferRef(transfer_id="t-1", attempt=1)
    status = Fault(Reason.CLIENT_GONE, "left").status()
    world.say(transfer_ended=decode_pb2.TransferEnded(ref=ref, status=status))
    assert stops(world) == [True]


def test_a_grant_that_was_never_written_to_is_released_as_stopped(world: World) -> None:
    world.occupy_pool()
    call = world.call()
    world.connect(transport=SHM)
    world.grant(transport=SHM)
    assert world.state() is S.PREPARED
    world.feed(ev.PrefillCallEnded(call))
    assert stops(world) == [True]
    world.answer_release()
    assert stops(world) == [True]


def test_kv_that_is_complete_needs_no_word(world: World) -> None:
    computing(world)
    world.step()
    world.step()
    world.complete()
    world.answer_first_token()
    assert world.state() is S.HANDED_OFF
    assert stops(world) == []


def test_an_answer_that_ends_with_its_first_token_is_released_when_the_writing_is_over(
    world: World,
) -> None:
    call = world.call(tokens=12, max_tokens=2)
    world.connect(transport=SHM)
    world.grant(transport=SHM)
    world.step()
    world.step(token=2)
    world.answer_first_token(types_pb2.TRANSFER_STATE_FINISHED)
    assert world.emitted(call)[-1] == "OK"
    assert stops(world) == []
    close(world)
    assert stops(world) == [True]


def test_a_lost_d_hears_that_its_memory_was_let_go_of_and_no_release(world: World) -> None:
    computing(world)
    world.break_session()
    world.advance(2)
    assert world.taken(act.ForgetDecode)
    close(world)
    assert stops(world) == []


def test_a_d_that_granted_in_vain_before_is_no_word_to_the_one_that_is_written_to(
    world: World,
) -> None:
    """The first D does not answer, and is told that nothing will be written; the second is."""
    call = world.call(tokens=12, decodes=(D1, D2))
    world.connect(transport=SHM)
    world.refuse(GONE)
    assert stops(world) == [True]
    world.connect(D2, transport=SHM)
    world.grant(transport=SHM)
    world.feed(ev.PrefillCallEnded(call))
    assert stops(world) == [True, False]
    close(world)
    world.answer_release()
    assert stops(world) == [True, False, True]


def test_a_stream_that_may_be_opened_again_has_not_stopped(world: World) -> None:
    call = computing(world)
    world.feed(ev.TransferBroken(KEY, 0, GONE))
    world.feed(ev.PrefillCallEnded(call))
    assert stops(world) == [False]
    close(world)
    world.answer_release()
    assert stops(world) == [False, True]
