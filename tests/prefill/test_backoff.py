"""Ds that have no room, are lost, or are silent: whom P asks, and when. The machine in a world
played by the test."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.prefill.prepare import LaneView
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason, TransportFault
from pd_grpc.protocol.messages import seconds
from tests.prefill.world import D1, D2, D3, GONE, World

FULL = Fault(Reason.NO_BLOCKS, "full", retry_after_s=1.0, quota=Quota(3, 1))
SILENT = TransportFault(Code.DEADLINE_EXCEEDED, "deadline")
NO_JITTER: dict[str, Any] = {"backoff_jitter": 0.0}


def asked(world: World) -> list[tuple[str, str]]:
    """Who has asked whom."""
    return [(a.key.transfer_id, a.endpoint) for a in world.taken(act.SendAllocate)]


def lane(world: World, endpoint: str = D1) -> LaneView:
    lanes = {view.endpoint: view for view in world.machine.placement.pool.lanes(world.now)}
    return lanes[endpoint]


def refused(world: World, fault: Fault | TransportFault, decodes: tuple[str, ...] = (D1,)) -> int:
    """A request `t-0` has been refused by D1, which is connected."""
    call = world.call("t-0", decodes=decodes)
    world.connect(D1)
    world.refuse(fault, "t-0")
    return call


# --- back-off ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Reason.NO_BLOCKS, Reason.QUEUE_FULL])
def test_a_d_without_room_is_not_asked_before_its_retry_delay_is_over(reason: Reason) -> None:
    world = World(**NO_JITTER)
    refused(world, Fault(reason, "full", retry_after_s=1.0))
    world.call("t-1")
    world.advance(0.99)
    assert (world.state("t-1"), lane(world).waiting) == (PrefillState.QUEUED, 1)
    world.advance(0.02)
    assert asked(world) == [("t-0", D1), ("t-1", D1)]


def test_a_delay_that_is_not_told_or_too_long_is_ps_own() -> None:
    world = World(backoff_s=0.5, backoff_max_s=2.0, **NO_JITTER)
    refused(world, Fault(Reason.NO_BLOCKS, "full"))
    assert lane(world).backoff_left_s == pytest.approx(0.5)
    world.advance(1)
    world.call("t-1")
    world.refuse(Fault(Reason.NO_BLOCKS, "full", retry_after_s=3600.0), "t-1")
    assert lane(world).backoff_left_s == pytest.approx(2.0)


def test_the_part_by_chance_is_later_bounded_and_played_again_the_same() -> None:
    lefts = []
    for _ in range(2):
        world = World(backoff_jitter=0.5)
        refused(world, FULL)
        lefts.append(lane(world).backoff_left_s)
    assert lefts[0] == lefts[1]
    assert 1.0 < lefts[0] <= 1.5


def test_what_is_in_flight_at_a_d_without_room_goes_on(world: World) -> None:
    world.call("t-0")
    world.call("t-1")
    world.connect()
    world.refuse(FULL, "t-0")
    world.grant("t-1")
    assert world.state("t-1") is PrefillState.COMPUTING


def test_a_request_with_an_alternate_does_not_wait_for_a_d_without_room(world: World) -> None:
    refused(world, FULL)
    call = world.call("t-1", decodes=(D1, D2))
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D2)
    assert asked(world)[1:] == [("t-1", D2)]


def test_those_that_wait_already_turn_too_when_their_d_has_no_room() -> None:
    world = World(prepare_window=1)
    world.call("t-0")
    waiting = world.call("t-1", decodes=(D1, D2))
    world.connect()
    assert world.emitted(waiting) == ["queued"]
    world.refuse(FULL, "t-0")
    assert world.emitted(waiting) == ["queued", "placing"]


def test_with_no_room_anywhere_a_request_waits_for_its_first_d() -> None:
    world = World(**NO_JITTER)
    refused(world, FULL, decodes=(D1, D2))
    world.connect(D2)
    world.refuse(Fault(Reason.NO_BLOCKS, "full", retry_after_s=5.0), "t-0")
    call = world.call("t-1", decodes=(D1, D2))
    assert world.emitted(call) == ["queued"]
    world.advance(1.0)
    assert asked(world)[2:] == [("t-1", D1)]


def two_without_room(first_s: float, second_s: float) -> World:
    """D1 and D2 have no room, for so long."""
    world = World(**NO_JITTER)
    for transfer, endpoint, wait_s in (("a", D1, first_s), ("b", D2, second_s)):
        world.call(transfer, decodes=(endpoint,))
        world.connect(endpoint)
        world.refuse(Fault(Reason.NO_BLOCKS, "full", retry_after_s=wait_s), transfer)
    return world


def test_one_that_may_not_be_asked_is_passed_over_for_a_later_one_that_may() -> None:
    world = two_without_room(4.0, 4.0)
    call = world.call("t-1", decodes=(D1, D2, D3))
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D3)
    assert asked(world)[2:] == [("t-1", D3)]


def test_who_waits_goes_to_an_alternate_whose_back_off_is_over_first() -> None:
    world = two_without_room(4.0, 1.0)
    call = world.call("t-1", decodes=(D1, D2))
    world.advance(0.99)
    assert world.emitted(call) == ["queued"]
    world.advance(0.02)
    assert (world.emitted(call), asked(world)[2:]) == (["queued", "placing"], [("t-1", D2)])


def test_a_request_that_waits_out_a_back_off_ends_with_its_time(world: World) -> None:
    refused(world, Fault(Reason.NO_BLOCKS, "full", retry_after_s=5.0))
    call = world.call("t-1", budget_s=1.0)
    world.advance(1.0)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, "queue")


# --- the breaker ---------------------------------------------------------------------------------

UNAVAILABLE = [
    (GONE, Reason.DECODE_LOST),
    (SILENT, Reason.DECODE_LOST),
    (Fault(Reason.DRAINING, "leaving"), Reason.DRAINING),
    (Fault(Reason.ENGINE_STUCK, "stuck"), Reason.ENGINE_STUCK),
]


@pytest.mark.parametrize(("fault", "reason"), UNAVAILABLE)
def test_requests_for_a_d_that_cannot_be_had_fail_at_once_with_what_was_found(
    world: World, fault: Fault | TransportFault, reason: Reason
) -> None:
    refused(world, fault)
    call = world.call("t-1")
    assert world.emitted(call) == ["queued", reason.name]
    assert world.fault(call).retry_after_s == pytest.approx(0.25)
    assert asked(world) == [("t-0", D1)]
    assert lane(world).breaker is BreakerState.OPEN


@pytest.mark.parametrize("fault", [FULL, Fault(Reason.HANDOFF_MISMATCH, "sampling")])
def test_an_answer_of_any_other_kind_opens_no_breaker(world: World, fault: Fault) -> None:
    refused(world, fault)
    assert world.machine.placement.pool.admits(D1, world.now)


def test_those_that_wait_fail_when_the_breaker_opens_and_those_that_ask_do_not() -> None:
    world = World(prepare_window=2)
    calls = [world.call(f"t-{n}") for n in range(4)]
    world.connect()
    world.refuse(GONE, "t-0")
    assert [world.emitted(call) for call in calls] == [
        ["queued", "DECODE_LOST"],
        ["queued"],
        ["queued", "DECODE_LOST"],
        ["queued", "DECODE_LOST"],
    ]
    world.grant("t-1")
    assert world.state("t-1") is PrefillState.COMPUTING


def test_a_request_with_an_alternate_goes_there_while_the_breaker_is_open(world: World) -> None:
    refused(world, GONE)
    call = world.call("t-1", decodes=(D1, D2))
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D2)
    assert asked(world)[1:] == [("t-1", D2)]


def test_a_d_that_cannot_be_reached_is_left_alone_for_a_while(world: World) -> None:
    world.call("t-0")
    world.break_session()
    world.call("t-1")
    assert len(world.taken(act.OpenSession)) == 1, "it was not tried again"
    world.advance(0.25)
    world.call("t-2")
    assert len(world.taken(act.OpenSession)) == 2
    world.break_session()
    assert lane(world).breaker_left_s == pytest.approx(0.5)


def test_one_probe_goes_when_the_time_is_over_and_the_others_wait_for_its_answer(
    world: World,
) -> None:
    refused(world, GONE)
    world.advance(0.25)
    for n in (1, 2, 3):
        world.call(f"t-{n}")
    assert asked(world)[1:] == [("t-1", D1)]
    assert lane(world).breaker is BreakerState.HALF_OPEN
    world.grant("t-1")
    assert asked(world)[2:] == [("t-2", D1), ("t-3", D1)]
    assert lane(world).breaker is BreakerState.CLOSED


def test_a_probe_that_fails_fails_those_that_waited_for_it(world: World) -> None:
    refused(world, GONE)
    world.advance(0.25)
    calls = [world.call(f"t-{n}") for n in (1, 2)]
    world.refuse(GONE, "t-1")
    assert [world.fault(call).reason for call in calls] == [Reason.DECODE_LOST] * 2
    assert lane(world).breaker_left_s == pytest.approx(0.5)


def test_a_probe_asks_for_an_answer_and_not_for_patience(world: World) -> None:
    refused(world, GONE)
    world.advance(0.25)
    world.call("t-1")
    probe = world.ask("t-1")
    assert seconds(probe.request.max_wait) == 0
    assert probe.timeout_s == pytest.approx(world.config.call_s)


def test_a_probe_that_finds_no_blocks_has_found_d_and_asks_again_first_of_all(
    world: World,
) -> None:
    refused(world, GONE)
    world.advance(0.25)
    call = world.call("t-1")
    world.call("t-2")
    world.refuse(FULL, "t-1")
    assert asked(world)[2:] == [("t-1", D1), ("t-2", D1)]
    assert seconds(world.ask("t-1").request.max_wait) > 90
    assert world.emitted(call) == ["queued"]


def test_a_probe_without_an_answer_turns_its_request_to_the_alternate(world: World) -> None:
    refused(world, GONE)
    world.advance(0.25)
    call = world.call("t-1", decodes=(D1, D2))
    world.refuse(SILENT, "t-1")
    assert world.emitted(call) == ["queued", "placing"]
    assert (D1, Reason.DECODE_LOST) in world.releases()


def test_a_probe_whose_caller_leaves_makes_room_for_another(world: World) -> None:
    refused(world, GONE)
    world.advance(0.25)
    call = world.call("t-1")
    world.call("t-2")
    world.feed(ev.PrefillCallEnded(call))
    assert asked(world)[2:] == [("t-2", D1)]


def test_a_new_session_lets_a_probe_go_at_once(world: World) -> None:
    world.bring_to(PrefillState.COMPUTING)
    world.break_session()
    world.advance(0.05)
    world.break_session()
    assert lane(world).breaker is BreakerState.OPEN
    world.advance(0.1)
    world.connect()
    assert lane(world).breaker is BreakerState.HALF_OPEN


def test_a_d_that_does_not_come_back_is_not_waited_for_again(world: World) -> None:
    """It may be frozen: to connect to it would last `connect_s`."""
    world.bring_to(PrefillState.COMPUTING)
    world.break_session()
    world.advance(1.0)
    assert world.fault(world.call("t-2")).reason is Reason.DECODE_LOST
    assert lane(world).breaker is BreakerState.OPEN


def test_a_failure_of_a_connection_that_was_replaced_says_nothing(world: World) -> None:
    world.bring_to(PrefillState.ALLOCATING)
    world.call("t-2")
    old = world.ask("t-2")
    world.break_session()
    world.advance(0.1)
    world.connect()
    world.feed(ev.AllocateAnswered(old, None, GONE))
    assert lane(world).breaker is BreakerState.CLOSED


def test_a_release_that_is_not_answered_tells_of_a_silent_d(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    world.feed(ev.PrefillCallEnded(call))
    world.answer_release(SILENT)
    assert world.fault(world.call("t-2")).reason is Reason.DECODE_LOST


def test_an_allocate_that_outlasts_its_request_is_left_to_its_own_deadline(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING, budget_s=1.0)
    world.advance(1.0)
    assert world.fault(call).reason is Reason.STAGE_DEADLINE
    assert world.releases() == [(D1, Reason.STAGE_DEADLINE)]
    assert world.taken(act.CancelAllocate) == []
    assert world.machine.placement.pool.in_flight == 0
    world.refuse(SILENT)
    assert world.fault(world.call("t-2")).reason is Reason.DECODE_LOST


def test_one_allocate_at_a_time_outlasts_its_request_and_the_others_are_cancelled() -> None:
    """However short the requests for a silent D are, its window holds."""
    world = World(prepare_window=4)
    for n in range(40):
        for m in range(4):
            world.call(f"t-{n}-{m}", budget_s=0.1)
        if not n:
            world.connect()
        world.advance(0.1)
    asks = {(a.key, a.ask) for a in world.taken(act.SendAllocate)}
    cancelled = {(a.key, a.ask) for a in world.taken(act.CancelAllocate)}
    assert len(asks) == 160
    # Over 4 s, each of them left to itself for 2.
    assert len(asks - cancelled) == 2


def test_one_that_d_answers_after_all_opens_nothing(world: World) -> None:
    world.bring_to(PrefillState.ALLOCATING, budget_s=1.0)
    world.advance(1.0)
    world.refuse(Fault(Reason.STAGE_DEADLINE, "over", {"stage": "allocate"}))
    world.call("t-2")
    assert asked(world)[1:] == [("t-2", D1)]


def test_a_d_that_is_well_and_has_nothing_to_do_is_forgotten() -> None:
    world = World(**NO_JITTER)
    refused(world, FULL)
    world.advance(1.0)
    assert world.machine.placement.pool.lanes(world.now) == []


# --- pause ---------------------------------------------------------------------------------------


def test_pause_begins_nothing_and_resume_goes_on(world: World) -> None:
    world.bring_to(PrefillState.ALLOCATING)
    world.feed(ev.PauseRequested(True))
    waits = world.call("t-2")
    world.grant("t-1")
    assert (world.state("t-1"), world.state("t-2")) == (
        PrefillState.PREPARED,
        PrefillState.QUEUED,
    )
    assert world.emitted(waits) == ["queued"]
    world.feed(ev.PauseRequested(False))
    assert (world.state("t-1"), world.state("t-2")) == (
        PrefillState.COMPUTING,
        PrefillState.ALLOCATING,
    )


def test_what_is_computed_already_goes_on_through_a_pause(world: World) -> None:
    world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PauseRequested(True))
    world.step()
    world.step()
    world.answer_first_token()
    world.complete()
    assert world.state("t-1") is PrefillState.HANDED_OFF
