"""One routed request as lists of events: what the client hears, and what becomes of the legs."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.router.machine import (
    Action,
    AskTransfer,
    CancelDecode,
    CancelPrefill,
    Fail,
    Finish,
    OpenDecode,
    OpenPrefill,
    RoutedRequest,
    RoutingTimes,
    TransferVerdict,
)
from pd_grpc.router.policies import Pairing, Target

P = Target("p", "h:1")
D1, D2, D3 = Target("d1", "h:11"), Target("d2", "h:12"), Target("d3", "h:13")
GRACE_S, SETTLE_S, BUDGET_ENDS = 1.0, 0.5, 60.0
LOST = TransportFault(Code.UNAVAILABLE, "connection reset")
CANCELLED = TransportFault(Code.CANCELLED, "cancelled")


def fault(reason: Reason) -> Fault:
    return Fault(reason, reason.value.lower())


def routed(*alternates: Target, prefill: Target | None = P) -> RoutedRequest:
    """A request whose legs are open."""
    machine = RoutedRequest(
        Pairing(prefill, D1, alternates), RoutingTimes(GRACE_S, SETTLE_S), BUDGET_ENDS
    )
    machine.start(0.0)
    return machine


def with_first_token(*alternates: Target) -> RoutedRequest:
    machine = routed(*alternates)
    assert machine.on_tokens(0, 1, False, 1.0) == []
    return machine


def handed_off() -> RoutedRequest:
    machine = with_first_token()
    assert machine.on_handed_off(1.0) == []
    return machine


def failure(actions: list[Action]) -> Fault:
    """The fault the client hears; the request must have ended with these actions."""
    assert isinstance(actions[-1], Fail), actions
    return actions[-1].fault


# --- the good way ---------------------------------------------------------------------------------


def test_both_legs_open_at_once_decode_first_with_the_alternates_told_to_prefill() -> None:
    machine = RoutedRequest(
        Pairing(P, D1, (D2,)), RoutingTimes(GRACE_S, SETTLE_S), budget_ends=BUDGET_ENDS
    )
    assert machine.start(0.0) == [OpenDecode(0, D1), OpenPrefill(P, (D1, D2))]


def test_aggregated_opens_the_decode_leg_alone_and_ends_with_it() -> None:
    machine = RoutedRequest(Pairing(None, D1), RoutingTimes(GRACE_S, SETTLE_S), BUDGET_ENDS)
    assert machine.start(0.0) == [OpenDecode(0, D1)]
    assert machine.on_tokens(0, 5, False, 1.0) == []
    assert machine.on_tokens(0, 1, True, 2.0) == [Finish()]
    assert machine.ended


def test_tokens_then_the_end_after_the_hand_off_finish_the_answer() -> None:
    machine = handed_off()
    assert machine.on_prefill_ended(1.1) == []
    assert machine.on_tokens(0, 7, False, 2.0) == []
    assert machine.on_tokens(0, 0, True, 3.0) == [Finish()]
    assert machine.timers.next() is None


def test_an_answer_complete_before_the_hand_off_is_reported_waits_for_prefills_timings() -> None:
    machine = routed()
    assert machine.on_tokens(0, 1, True, 1.0) == []
    assert machine.on_handed_off(1.2) == [Finish()]


def test_a_complete_answer_does_not_wait_for_prefill_for_long() -> None:
    machine = routed()
    machine.on_tokens(0, 1, True, 1.0)
    assert machine.timers.next() == 1.0 + SETTLE_S
    assert machine.on_time(1.0 + SETTLE_S) == [CancelPrefill(), Finish()]


def test_a_complete_answer_stands_when_prefill_fails_afterwards() -> None:
    machine = routed()
    machine.on_tokens(0, 3, True, 1.0)
    assert machine.on_prefill_failed(LOST, 1.1) == [Finish()]


@pytest.mark.parametrize("error", [LOST, fault(Reason.ENGINE_ERROR), fault(Reason.DRAINING)])
def test_prefill_no_longer_matters_after_the_hand_off(error: Fault | TransportFault) -> None:
    machine = handed_off()
    assert machine.on_prefill_failed(error, 2.0) == []
    assert machine.on_tokens(0, 9, True, 3.0) == [Finish()]


# --- root cause -----------------------------------------------------------------------------------


def test_a_failure_of_prefill_fails_the_request_at_once_and_ends_the_decode_leg() -> None:
    actions = routed().on_prefill_failed(fault(Reason.NO_BLOCKS), 1.0)
    assert actions[:-1] == [CancelDecode(0)]
    assert failure(actions).reason is Reason.NO_BLOCKS


def test_a_failure_says_on_which_leg_and_which_instance_it_came() -> None:
    metadata = failure(routed().on_prefill_failed(fault(Reason.NO_BLOCKS), 1.0)).metadata
    assert (metadata["leg"], metadata["instance"]) == ("prefill", "p")


def test_a_failure_of_decode_fails_the_request_at_once_and_ends_the_prefill_leg() -> None:
    actions = routed().on_decode_failed(0, fault(Reason.KV_CORRUPT), 1.0)
    assert actions[:-1] == [CancelPrefill()]
    assert failure(actions).reason is Reason.KV_CORRUPT


@pytest.mark.parametrize("consequence", [Reason.CLIENT_GONE, Reason.RELEASED, Reason.SUPERSEDED])
def test_prefills_consequence_waits_for_decodes_cause(consequence: Reason) -> None:
    machine = routed()
    assert machine.on_prefill_failed(fault(consequence), 1.0) == []
    assert failure(machine.on_decode_failed(0, fault(Reason.ENGINE_ERROR), 1.2)).reason is (
        Reason.ENGINE_ERROR
    )


@pytest.mark.parametrize("consequence", [Reason.CLIENT_GONE, Reason.RELEASED, Reason.SUPERSEDED])
def test_decodes_consequence_waits_for_prefills_cause(consequence: Reason) -> None:
    machine = routed()
    assert machine.on_decode_failed(0, fault(consequence), 1.0) == []
    assert failure(machine.on_prefill_failed(fault(Reason.ENGINE_STUCK), 1.2)).reason is (
        Reason.ENGINE_STUCK
    )


@pytest.mark.parametrize("consequence", [Reason.RELEASED, Reason.SUPERSEDED])
def test_decode_lost_is_the_cause_of_what_prefill_tells_as_a_consequence(
    consequence: Reason,
) -> None:
    machine = routed()
    machine.on_prefill_failed(fault(consequence), 1.0)
    assert failure(machine.on_decode_failed(0, LOST, 1.1)).reason is Reason.DECODE_LOST


def test_a_consequence_alone_is_told_when_no_cause_comes() -> None:
    machine = routed()
    machine.on_decode_failed(0, fault(Reason.RELEASED), 1.0)
    assert failure(machine.on_time(1.0 + SETTLE_S)).reason is Reason.RELEASED


def test_a_p_that_takes_us_for_gone_is_lost_to_us() -> None:
    """P has found out first that its connection to us is cut, and D passes that on."""
    machine = routed()
    machine.on_decode_failed(0, fault(Reason.CLIENT_GONE), 1.0)
    told = failure(machine.on_time(1.0 + SETTLE_S))
    assert (told.reason, told.metadata["instance"]) == (Reason.PREFILL_LOST, P.name)


def test_a_d_that_takes_us_for_gone_is_lost_to_us() -> None:
    machine = routed()
    machine.on_prefill_failed(fault(Reason.CLIENT_GONE), 1.0)
    told = failure(machine.on_time(1.0 + SETTLE_S))
    assert (told.reason, told.metadata["instance"]) == (Reason.DECODE_LOST, D1.name)


def test_two_consequences_tell_the_first() -> None:
    machine = routed()
    machine.on_decode_failed(0, fault(Reason.RELEASED), 1.0)
    actions = machine.on_prefill_failed(CANCELLED, 1.1)
    assert failure(actions).reason is Reason.RELEASED


def test_a_leg_cancelled_by_its_server_waits_and_then_counts_as_lost() -> None:
    machine = routed()
    assert machine.on_decode_failed(0, CANCELLED, 1.0) == []
    assert failure(machine.on_time(1.0 + SETTLE_S)).reason is Reason.DECODE_LOST


# --- prefill lost ---------------------------------------------------------------------------------


def test_prefill_lost_before_the_hand_off_is_decodes_to_judge() -> None:
    machine = routed()
    assert machine.on_prefill_failed(LOST, 1.0) == []
    actions = machine.on_decode_failed(0, fault(Reason.PREFILL_LOST), 2.0)
    assert failure(actions).reason is Reason.PREFILL_LOST


def test_prefill_lost_and_decode_generates_goes_on() -> None:
    machine = with_first_token()
    assert machine.on_prefill_failed(LOST, 1.0) == []
    assert machine.on_tokens(0, 1, False, 1.5) == []
    assert machine.on_time(1.0 + GRACE_S + SETTLE_S) == []
    assert machine.on_tokens(0, 4, True, 5.0) == [Finish()]


def test_prefill_lost_after_a_second_token_needs_no_verdict() -> None:
    machine = with_first_token()
    machine.on_tokens(0, 1, False, 1.5)
    assert machine.on_prefill_failed(LOST, 1.6) == []
    assert machine.timers.next() == BUDGET_ENDS


def test_prefill_lost_and_decode_silent_asks_decode() -> None:
    machine = with_first_token()
    machine.on_prefill_failed(LOST, 1.0)
    assert machine.on_time(1.0 + GRACE_S + SETTLE_S) == [AskTransfer(0, D1)]


def test_prefill_lost_before_a_token_came_asks_decode_soon() -> None:
    machine = routed()
    machine.on_prefill_failed(LOST, 1.0)
    assert machine.on_time(1.0 + SETTLE_S) == [AskTransfer(0, D1)]
    assert machine.on_verdict(0, TransferVerdict.OWNED, 1.6) == [], "its token is on the way"
    assert machine.on_tokens(0, 3, True, 1.7) == [Finish()]


@pytest.mark.parametrize("verdict", [TransferVerdict.OWNED, TransferVerdict.READY])
def test_a_decode_that_owns_the_request_goes_on(verdict: TransferVerdict) -> None:
    machine = with_first_token()
    machine.on_prefill_failed(LOST, 1.0)
    machine.on_time(3.0)
    assert machine.on_verdict(0, verdict, 3.1) == []
    assert machine.on_tokens(0, 2, True, 4.0) == [Finish()]


@pytest.mark.parametrize("verdict", [TransferVerdict.OTHER, TransferVerdict.READY])
def test_a_decode_that_does_not_own_it_ends_the_request(verdict: TransferVerdict) -> None:
    machine = routed()
    machine.on_prefill_failed(LOST, 1.0)
    machine.on_time(3.0)
    actions = machine.on_verdict(0, verdict, 3.1)
    assert actions[:-1] == [CancelDecode(0)]
    assert failure(actions).reason is Reason.PREFILL_LOST


def test_both_lost_is_told_as_prefill_lost() -> None:
    machine = routed()
    machine.on_prefill_failed(LOST, 1.0)
    assert failure(machine.on_decode_failed(0, LOST, 1.1)).reason is Reason.PREFILL_LOST


def test_prefill_failing_after_the_first_token_leaves_the_word_to_decode() -> None:
    machine = with_first_token()
    assert machine.on_prefill_failed(fault(Reason.STAGE_DEADLINE), 1.0) == []
    actions = machine.on_decode_failed(0, fault(Reason.STAGE_DEADLINE), 1.1)
    assert failure(actions).reason is Reason.STAGE_DEADLINE


def test_prefill_failing_after_the_first_token_with_decode_silent_asks_decode() -> None:
    machine = with_first_token()
    machine.on_prefill_failed(fault(Reason.STAGE_DEADLINE), 1.0)
    assert machine.on_time(1.0 + SETTLE_S) == [AskTransfer(0, D1)]
    actions = machine.on_verdict(0, TransferVerdict.OTHER, 1.6)
    assert failure(actions).reason is Reason.STAGE_DEADLINE


# --- decode lost ----------------------------------------------------------------------------------


def test_decode_lost_before_the_hand_off_ends_prefill() -> None:
    actions = routed().on_decode_failed(0, LOST, 1.0)
    assert actions[:-1] == [CancelPrefill()]
    assert failure(actions).reason is Reason.DECODE_LOST


def test_decode_lost_in_mid_decode_is_told_at_once() -> None:
    assert failure(handed_off().on_decode_failed(0, LOST, 2.0)).reason is Reason.DECODE_LOST


def test_a_decode_leg_that_ends_without_its_answer_is_a_fault() -> None:
    actions = handed_off().on_decode_ended(0, 2.0)
    assert failure(actions).reason is Reason.WRONG_STATE


def test_a_prefill_leg_that_ends_without_handing_over_is_a_fault() -> None:
    assert failure(routed().on_prefill_ended(2.0)).reason is Reason.WRONG_STATE


# --- placing --------------------------------------------------------------------------------------


def test_placing_opens_the_new_decode_leg_before_it_ends_the_old_one() -> None:
    machine = routed(D2)
    assert machine.on_placing(D2, 1.0) == [OpenDecode(1, D2), CancelDecode(0)]
    assert machine.decode == D2


def test_the_leg_left_behind_is_heard_no_more() -> None:
    machine = routed(D2)
    machine.on_placing(D2, 1.0)
    assert machine.on_decode_failed(0, fault(Reason.CLIENT_GONE), 1.1) == []
    assert machine.on_tokens(0, 5, True, 1.2) == []
    assert not machine.ended and machine.tokens == 0


def test_placing_on_the_decode_it_is_with_changes_nothing() -> None:
    assert routed(D2).on_placing(D1, 1.0) == []


@pytest.mark.parametrize("error", [LOST, fault(Reason.DRAINING), fault(Reason.STALE_EPOCH)])
def test_a_decode_that_refuses_may_be_replaced_by_placing(error: Fault | TransportFault) -> None:
    machine = routed(D2)
    assert machine.on_decode_failed(0, error, 1.0) == []
    assert machine.on_placing(D2, 1.2) == [OpenDecode(1, D2)]
    assert machine.on_time(1.0 + SETTLE_S) == []
    assert not machine.ended


def test_a_decode_that_refuses_fails_the_request_when_prefill_does_not_place() -> None:
    machine = routed(D2)
    machine.on_decode_failed(0, LOST, 1.0)
    actions = machine.on_time(1.0 + SETTLE_S)
    assert actions[0] == CancelPrefill()
    assert failure(actions).reason is Reason.DECODE_LOST


def test_a_decode_lost_after_its_first_token_is_never_replaced() -> None:
    actions = with_first_token(D2).on_decode_failed(0, LOST, 1.0)
    assert failure(actions).reason is Reason.DECODE_LOST


def test_a_refusal_that_no_other_decode_would_take_back_is_told_at_once() -> None:
    actions = routed(D2).on_decode_failed(0, fault(Reason.TOO_LARGE), 1.0)
    assert failure(actions).reason is Reason.TOO_LARGE


@pytest.mark.parametrize("target", [D3, Target("else", "h:99")])
def test_placing_on_a_decode_that_was_not_offered_is_a_fault(target: Target) -> None:
    assert failure(routed(D2).on_placing(target, 1.0)).reason is Reason.WRONG_STATE


def test_placing_after_the_first_token_is_a_fault() -> None:
    assert failure(with_first_token(D2).on_placing(D2, 1.0)).reason is Reason.WRONG_STATE


# --- budget, client, operator ---------------------------------------------------------------------


def test_a_budget_that_is_spent_before_the_legs_open_opens_none() -> None:
    machine = RoutedRequest(Pairing(P, D1), RoutingTimes(GRACE_S, SETTLE_S), budget_ends=5.0)
    (action,) = machine.start(5.0)
    assert failure([action]).metadata["stage"] == "route"


def test_the_budgets_end_names_the_stage_that_spent_it() -> None:
    queued, computing, transferring = routed(), routed(), with_first_token()
    queued.on_queued(1.0)
    computing.on_queued(1.0)
    computing.on_progress(2.0)
    machines = [routed(), queued, computing, transferring, handed_off()]
    stages = []
    for machine in machines:
        assert machine.timers.next() == BUDGET_ENDS
        told = failure(machine.on_time(BUDGET_ENDS))
        assert told.reason is Reason.STAGE_DEADLINE
        stages.append(told.metadata["stage"])
    assert stages == ["prepare", "queue", "compute", "transfer", "decode"]


def test_a_legs_own_deadline_counts_as_the_stage_it_was_in() -> None:
    late = TransportFault(Code.DEADLINE_EXCEEDED, "deadline")
    told = failure(handed_off().on_decode_failed(0, late, 9.0))
    assert (told.reason, told.metadata["stage"]) == (Reason.STAGE_DEADLINE, "decode")


def test_the_budgets_end_finds_an_answer_complete_that_waits_for_prefills_timings() -> None:
    machine = with_first_token()
    assert machine.on_tokens(0, 3, True, BUDGET_ENDS - SETTLE_S / 2) == []
    assert machine.on_time(BUDGET_ENDS) == [CancelPrefill(), Finish()]


def test_the_budgets_end_cancels_both_legs() -> None:
    assert routed().on_time(BUDGET_ENDS)[:-1] == [CancelPrefill(), CancelDecode(0)]


def test_a_client_that_leaves_cancels_both_legs_at_once_and_hears_nothing() -> None:
    machine = routed()
    assert machine.on_client_gone(1.0) == [CancelPrefill(), CancelDecode(0)]
    assert machine.on_client_gone(1.1) == []


def test_a_client_that_leaves_after_the_hand_off_cancels_decode_alone() -> None:
    assert handed_off().on_client_gone(2.0) == [CancelDecode(0)]


def test_an_operator_ends_it_on_both_legs() -> None:
    actions = routed().on_fault(fault(Reason.RELEASED), 1.0)
    assert actions[:-1] == [CancelPrefill(), CancelDecode(0)]
    assert failure(actions).reason is Reason.RELEASED


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransportFault(Code.RESOURCE_EXHAUSTED, "too large"), Reason.TOO_LARGE),
        (TransportFault(Code.UNIMPLEMENTED, "no method"), Reason.WRONG_INSTANCE),
        (TransportFault(Code.UNKNOWN, "KeyError"), Reason.ENGINE_ERROR),
    ],
)
def test_a_status_that_is_not_ours_reaches_the_client_with_a_reason(
    error: TransportFault, reason: Reason
) -> None:
    assert failure(routed().on_decode_failed(0, error, 1.0)).reason is reason


def test_once_ended_every_event_is_a_no_op() -> None:
    machine = routed(D2)
    machine.on_prefill_failed(fault(Reason.NO_BLOCKS), 1.0)
    assert machine.on_queued(2.0) == machine.on_progress(2.0) == machine.on_handed_off(2.0) == []
    assert machine.on_placing(D2, 2.0) == machine.on_prefill_ended(2.0) == []
    assert machine.on_prefill_failed(LOST, 2.0) == machine.on_decode_failed(0, LOST, 2.0) == []
    assert machine.on_tokens(0, 1, True, 2.0) == machine.on_decode_ended(0, 2.0) == []
    assert machine.on_verdict(0, TransferVerdict.OTHER, 2.0) == machine.on_client_gone(2.0) == []
    assert machine.on_fault(fault(Reason.RELEASED), 2.0) == machine.on_time(BUDGET_ENDS) == []
    assert machine.timers.next() is None
