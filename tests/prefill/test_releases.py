"""Giving back: D hears the cause of every end, whatever has become of the session meanwhile."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.v1 import types_pb2
from tests.prefill.world import D1, GONE, World

LATE = TransportFault(Code.DEADLINE_EXCEEDED, "late")
UNKNOWN = Fault(Reason.NO_SESSION, "unknown or superseded")


def cancel_while_broken(world: World) -> None:
    """A request with a grant whose caller leaves while the session is broken."""
    call = world.bring_to(PrefillState.COMPUTING)
    world.break_session()
    world.feed(ev.PrefillCallEnded(call))


def sessions_of(world: World) -> list[str]:
    return [sent.request.session_id for sent in world.taken(act.SendRelease)]


def owed(world: World) -> int:
    return len(world.machine.placement.releases)


def test_a_release_waits_for_the_broken_session_and_goes_out_in_the_new_ones_name(
    world: World,
) -> None:
    cancel_while_broken(world)
    assert world.releases() == []
    world.advance(0.1)
    world.connect()
    assert world.releases() == [(D1, Reason.CLIENT_GONE)]
    assert sessions_of(world) == ["d1-s2"]
    world.answer_release()
    assert owed(world) == 0


def test_a_session_is_mended_for_a_release_alone(world: World) -> None:
    """Its request has ended, and nobody else is bound to D."""
    cancel_while_broken(world)
    world.advance(0.06)
    assert len(world.taken(act.OpenSession)) == 2
    assert world.taken(act.ForgetDecode) == []


@pytest.mark.parametrize("fault", [GONE, UNKNOWN, LATE])
def test_a_release_lost_with_its_session_is_made_again_in_the_next(
    world: World, fault: Fault | TransportFault
) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    world.break_session()
    world.answer_release(fault)
    assert len(world.taken(act.SendRelease)) == 1
    world.advance(0.1)
    world.connect()
    assert sessions_of(world) == ["d1-s1", "d1-s2"]


def test_a_release_refused_after_the_session_was_renewed_is_made_again_at_once(
    world: World,
) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    world.break_session()
    world.advance(0.1)
    world.connect()
    assert sessions_of(world) == ["d1-s1"]
    world.answer_release(UNKNOWN)
    assert sessions_of(world) == ["d1-s1", "d1-s2"]


def test_a_release_lost_under_an_open_session_is_made_again_with_back_off(world: World) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    began = world.now
    tries: list[float] = []
    for _ in range(4):
        world.answer_release(GONE)
        assert len(world.taken(act.SendRelease)) == len(tries) + 1
        wake = world.machine.next_wake()
        assert wake is not None
        world.advance(wake - world.now)
        assert len(world.taken(act.SendRelease)) == len(tries) + 2
        tries.append(round(world.now - began, 2))
    assert tries == [0.05, 0.15, 0.35, 0.6]


def test_an_answer_of_ds_is_the_end_of_it(world: World) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    world.answer_release(Fault(Reason.STALE_EPOCH, "another process"))
    world.advance(4)
    assert len(world.taken(act.SendRelease)) == 1
    assert owed(world) == 0


def test_another_process_of_d_is_owed_nothing(world: World) -> None:
    cancel_while_broken(world)
    world.decodes[D1].epoch += 1
    world.advance(0.1)
    world.connect()
    assert world.releases() == []
    assert owed(world) == 0


@pytest.mark.parametrize("meant", [0, 100, 101])
def test_another_process_of_d_hears_of_what_neither_was_asked(world: World, meant: int) -> None:
    """Its client may wait there already, and none but P knows that it was turned away."""
    world.bring_to(PrefillState.ALLOCATING)
    world.break_session()
    world.refuse(GONE)
    ref = types_pb2.TransferRef(decode_epoch=meant)
    call = world.call("t-2", ref=ref)
    assert world.fault(call).reason is Reason.DECODE_LOST
    world.decodes[D1].epoch = 101
    world.advance(0.1)
    world.connect()
    told = [(sent.key.transfer_id, sent.request.ref) for sent in world.taken(act.SendRelease)]
    heard = types_pb2.TransferRef(transfer_id="t-2", attempt=1, decode_epoch=101)
    assert told == ([("t-2", heard)] if meant != 100 else [])
    assert world.releases() == [(D1, Reason.DECODE_LOST)] * len(told)
    if told:
        world.answer_release()
    assert owed(world) == 0


def test_a_d_that_comes_back_after_grace_still_hears_of_it(world: World) -> None:
    cancel_while_broken(world)
    world.advance(5)
    assert [forget.endpoint for forget in world.taken(act.ForgetDecode)] == [D1]
    world.call("t-2")
    world.connect()
    assert world.releases() == [(D1, Reason.CLIENT_GONE)]


def test_what_d_must_have_forgotten_is_owed_no_longer(world: World) -> None:
    cancel_while_broken(world)
    world.advance(62)
    assert owed(world) == 0
    world.call("t-2")
    world.connect()
    assert world.releases() == []


def test_more_is_never_owed_than_d_could_remember() -> None:
    world = World(tombstones=3)
    calls = [world.call(f"t-{n}") for n in range(5)]
    world.connect()
    world.break_session()
    for call in calls:
        world.feed(ev.PrefillCallEnded(call))
    assert owed(world) == 3
    world.advance(0.1)
    world.connect()
    assert [sent.key.transfer_id for sent in world.taken(act.SendRelease)] == ["t-2", "t-3", "t-4"]


def test_the_first_cause_stands(world: World) -> None:
    """A grant that comes after the cancel is given back by the Release that is owed already."""
    world.bring_to(PrefillState.ALLOCATING)
    asked = world.ask()
    world.break_session()
    world.feed(ev.PrefillCallEnded(1))
    world.grant(asked=asked)
    world.advance(0.1)
    world.connect()
    assert world.releases() == [(D1, Reason.CLIENT_GONE)]


def test_a_p_that_stops_owes_nothing_more(world: World) -> None:
    cancel_while_broken(world)
    world.actions += world.machine.leave(world.now)
    assert owed(world) == 0
