"""A request tried elsewhere, as lists of events: when, where, how often, and when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pd_grpc.protocol.faults import STATUS_TABLE, Code, Fault, Quota, Reason, Retry, TransportFault
from pd_grpc.router.machine import (
    AskTransfer,
    CancelDecode,
    CancelPrefill,
    Fail,
    Finish,
    OpenPrefill,
    RoutingTimes,
    TransferVerdict,
)
from pd_grpc.router.policies import Pairing, Target
from pd_grpc.router.recovery import Kind, RecoveringRequest
from pd_grpc.router.retry_budget import RetryBudget
from tests.router.recovering import (
    BUDGET_ENDS,
    D1,
    D2,
    D3,
    GRACE_S,
    LOST,
    P1,
    P2,
    RULES,
    SETTLE_S,
    WAIT_S,
    World,
    begun,
    cancelled,
    failure,
    fault,
)

# --- a retry --------------------------------------------------------------------------------------


def test_a_decode_lost_before_a_token_is_replaced_when_prefill_does_not_place() -> None:
    world = World().start()
    assert world.decode_fails(LOST, 1.0) == []
    actions = world.time(1.0 + SETTLE_S)
    assert begun(actions) == (2, Kind.RETRY, "p1", "d2")
    assert cancelled(actions) == {CancelPrefill}


def test_a_prefill_lost_before_a_token_is_replaced_once_decode_says_so() -> None:
    world = World().start()
    assert world.prefill_fails(LOST, 1.0) == []
    actions = world.decode_fails(fault(Reason.PREFILL_LOST), 2.0)
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")


def test_a_prefill_lost_with_a_silent_decode_is_replaced_when_decode_does_not_own_it() -> None:
    world = World().start()
    world.prefill_fails(LOST, 1.0)
    assert world.time(1.0 + SETTLE_S) == [AskTransfer(0, D1)]
    verdict = world.request.request.on_verdict(0, TransferVerdict.OTHER, 3.0)
    actions = world.of_attempt(verdict, 3.0)
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")
    assert cancelled(actions) == {CancelDecode}


def test_both_legs_lost_leave_for_another_pair_one_after_the_other() -> None:
    world = World().start()
    world.prefill_fails(LOST, 1.0)
    assert begun(world.decode_fails(LOST, 1.1)) == (2, Kind.RETRY, "p2", "d1")
    world.decode_fails(LOST, 1.2)
    assert begun(world.time(1.2 + SETTLE_S)) == (3, Kind.RETRY, "p2", "d2")


def test_the_legs_that_are_left_are_cancelled_before_the_new_ones_open() -> None:
    world = World().start()
    actions = world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0)
    assert cancelled(actions) == {CancelDecode}
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")


def test_a_failure_after_placing_is_that_of_the_decode_it_was_placed_on() -> None:
    world = World(decode=[D1, D2, D3]).start()
    world.placing(D2, 1.0)
    actions = world.prefill_fails(fault(Reason.DECODE_LOST), 2.0)
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")
    (prefill,) = (a for a in actions if isinstance(a, OpenPrefill))
    assert prefill.decodes == (D1, D3), "the one to blame is no alternate either"


def test_a_decode_that_only_prefill_has_lost_is_tried_with_another_prefill() -> None:
    world = World(decode=[D1]).start()
    actions = world.prefill_fails(fault(Reason.DECODE_LOST), 1.0)
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")
    assert failure(world.decode_fails(LOST, 2.0)).reason is Reason.DECODE_LOST


def test_a_refusal_while_prefill_may_place_leaves_it_to_prefill() -> None:
    world = World().start()
    assert world.decode_fails(fault(Reason.DRAINING), 1.0) == []
    world.placing(D2, 1.2)
    assert world.request.attempt == 1 and world.request.decode == D2


def test_the_stale_attempt_is_heard_no_more() -> None:
    world = World().start()
    old = world.request.request
    world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0)
    assert old.ended
    for actions in (
        old.on_tokens(0, 3, True, 1.1),
        old.on_decode_failed(0, LOST, 1.1),
        old.on_prefill_failed(LOST, 1.1),
        old.on_placing(D2, 1.1),
        old.on_time(BUDGET_ENDS),
    ):
        assert world.of_attempt(actions, 1.2) == []
    assert world.request.attempt == 2 and world.request.tokens == 0


def test_aggregated_goes_to_another_decode() -> None:
    world = World(prefill=[]).start()
    assert begun(world.decode_fails(fault(Reason.ENGINE_STUCK), 1.0)) == (2, Kind.RETRY, "", "d2")


# --- a continuation -------------------------------------------------------------------------------


def test_a_decode_lost_in_mid_answer_goes_on_elsewhere() -> None:
    world = World().start().streaming(5)
    assert begun(world.decode_fails(LOST, 2.0)) == (2, Kind.CONTINUATION, "p1", "d2")
    assert world.request.tokens == 5


def test_an_answer_that_went_on_elsewhere_ends_once_with_all_its_tokens() -> None:
    world = World().start().streaming(5)
    world.decode_fails(LOST, 2.0)
    world.tokens(1, 3.0)
    world.hands_over(3.0)
    assert world.tokens(3, 4.0, complete=True) == [Finish()]
    assert world.request.ended and world.request.tokens == 9
    assert world.request.next_timer() is None


def test_an_answer_goes_on_as_often_as_it_comes_on() -> None:
    world = World().start().streaming(5)
    for attempt in range(2, 30):
        _, kind, _, _ = begun(world.decode_fails(LOST, float(attempt)))
        assert (world.request.attempt, kind) == (attempt, Kind.CONTINUATION)
        world.streaming(16, float(attempt))
    assert world.budget.tokens == 10


def test_one_that_kills_whoever_decodes_it_ends_with_the_retry_budget() -> None:
    world = World().start().streaming(5)
    for attempt in range(2, 12):
        begun(world.decode_fails(LOST, float(attempt)))
        world.streaming(2, float(attempt))
    assert failure(world.decode_fails(LOST, 12.0)).reason is Reason.DECODE_LOST
    assert world.budget.tokens == 0


def test_a_continuation_that_does_not_fit_elsewhere_fails_with_what_broke_it() -> None:
    world = World().start().streaming(5)
    begun(world.decode_fails(LOST, 2.0))
    too_large = fault(Reason.TOO_LARGE)
    assert failure(world.prefill_fails(too_large, 2.1)).reason is Reason.DECODE_LOST


def test_a_request_that_fits_nowhere_is_told_so() -> None:
    world = World().start()
    assert failure(world.prefill_fails(fault(Reason.TOO_LARGE), 0.1)).reason is Reason.TOO_LARGE


def test_a_prefill_lost_after_its_first_token_goes_on_on_another() -> None:
    world = World().start()
    world.tokens(1, 1.0)
    world.prefill_fails(LOST, 1.1)
    actions = world.decode_fails(fault(Reason.PREFILL_LOST), 2.1)
    assert begun(actions) == (2, Kind.CONTINUATION, "p2", "d1")


def test_a_decode_lost_between_first_token_and_hand_off_ends_prefills_part() -> None:
    world = World().start()
    world.tokens(1, 1.0)
    actions = world.decode_fails(LOST, 1.1)
    assert cancelled(actions) == {CancelPrefill}
    assert begun(actions) == (2, Kind.CONTINUATION, "p1", "d2")


def test_what_fails_after_the_hand_off_is_decodes_alone() -> None:
    world = World().start().streaming()
    assert begun(world.decode_fails(fault(Reason.DRAINING), 2.0))[2:] == ("p1", "d2")


def test_tokens_that_are_the_whole_answer_end_it() -> None:
    world = World(whole=True).start().streaming()
    assert world.decode_fails(LOST, 2.0) == [Finish()]
    assert world.request.ended and world.request.attempt == 1
    assert world.recovery.counts.tried[Kind.CONTINUATION].total() == 0


# --- what is tried elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize("reason", Reason)
def test_only_what_the_status_table_says_is_tried_elsewhere(reason: Reason) -> None:
    retry = STATUS_TABLE[reason].retry
    consequence = reason in (Reason.CLIENT_GONE, Reason.RELEASED, Reason.SUPERSEDED)
    for say in (World.prefill_fails, World.decode_fails):
        world = World().start()
        actions = say(world, fault(reason), 1.0)
        if not world.request.ended and world.request.attempt == 1:
            assert consequence or say is World.decode_fails
            actions = world.time(1.0 + SETTLE_S)
        if reason is Reason.CLIENT_GONE:
            # The client is here: to the other instance the connection is lost.
            assert begun(actions)[:2] == (2, Kind.RETRY)
        elif retry is Retry.OTHER and not (
            # P has asked both of them.
            reason is Reason.NO_BLOCKS and say is World.prefill_fails
        ):
            assert begun(actions)[:2] == (2, Kind.RETRY)
        else:
            assert failure(actions).reason is reason


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_of_bare_statuses_only_those_of_who_is_gone_are_tried_elsewhere(code: Code) -> None:
    world = World().start().streaming()
    actions = world.decode_fails(TransportFault(code, "raw"), 2.0)
    if code in (Code.UNAVAILABLE, Code.CANCELLED):
        assert begun(actions)[1] is Kind.CONTINUATION
    else:
        assert isinstance(actions[-1], Fail)


def test_a_lack_of_blocks_that_prefill_tells_is_one_of_every_decode_it_was_offered() -> None:
    world = World().start()
    quota = Quota(needed=9, free=1)
    full = Fault(Reason.QUEUE_FULL, "full", quota=quota)
    assert failure(world.prefill_fails(full, 1.0)).quota == quota


def test_a_full_queue_of_prefills_own_goes_to_another_prefill() -> None:
    world = World().start()
    assert begun(world.prefill_fails(fault(Reason.QUEUE_FULL), 1.0))[2] == "p2"


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([P1, P2], [D1, D2], ("p2", "d2")),
        ([P1], [D1, D2], ("p1", "d2")),
        ([P1, P2], [D1], ("p2", "d1")),
    ],
)
def test_where_nobody_is_to_blame_for_certain_both_are_replaced_if_they_can_be(
    prefill: list[Target], decode: list[Target], expected: tuple[str, str]
) -> None:
    world = World(prefill, decode).start()
    assert begun(world.prefill_fails(fault(Reason.KV_CORRUPT), 1.0))[2:] == expected


def test_a_prefill_that_reaches_no_decode_is_replaced_too() -> None:
    """It has nothing to do, and would be given the request again and again."""
    world = World().start()
    world.placing(D2, 0.5)
    world.done.clear()
    unreached = Fault(Reason.DECODE_LOST, "d2 cannot be reached: no welcome within 1 s")
    assert begun(world.prefill_fails(unreached, 2.0)) == (2, Kind.RETRY, "p2", "d1")


def test_a_prefill_that_stops_and_cancels_what_it_took_is_replaced() -> None:
    world = World().start()
    assert world.prefill_fails(TransportFault(Code.CANCELLED, "CANCELLED"), 1.0) == []
    assert world.time(1.0 + SETTLE_S) == [AskTransfer(0, D1)]
    asked = world.request.request.on_verdict(0, TransferVerdict.OTHER, 1.6)
    actions = world.of_attempt(asked, 1.6)
    assert begun(actions) == (2, Kind.RETRY, "p2", "d1")


# --- nowhere to go --------------------------------------------------------------------------------

DIES: list[Callable[[World], object]] = [
    lambda world: world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0),
    lambda world: world.decode_fails(LOST, 1.0),
    lambda world: world.prefill_fails(fault(Reason.KV_CORRUPT), 1.0),
]


@pytest.mark.parametrize("dies", DIES)
def test_with_one_of_each_there_is_nowhere_to_go(dies: Callable[[World], object]) -> None:
    world = World([P1], [D1]).start()
    dies(world)
    failure(world.done)
    assert world.request.ended and world.request.next_timer() is None
    assert world.budget.tokens == 10 and not world.recovery.counts.refused


def test_an_instance_to_blame_is_chosen_again_only_as_another_process() -> None:
    again = Target(D1.name, D1.endpoint, D1.epoch + 1)
    world = World([P1], [D1]).start().streaming()
    world.decode = [again]
    assert begun(world.decode_fails(LOST, 2.0)) == (2, Kind.CONTINUATION, "p1", "d1")


def test_others_out_of_reach_are_waited_for() -> None:
    world = World(decode=[D1], others_out_of_reach=True).start().streaming()
    assert world.decode_fails(LOST, 2.0) == []
    assert world.request.waiting and not world.request.ended
    assert world.request.next_timer() == 2.0 + WAIT_S
    assert world.act(world.request.on_instances(), 2.5) == [], "somebody else has changed"
    world.decode = [D1, D2]
    actions = world.act(world.request.on_instances(), 2.7)
    assert begun(actions) == (2, Kind.CONTINUATION, "p1", "d2")
    assert not world.request.waiting


def test_a_late_word_of_the_attempt_that_failed_clears_nobody() -> None:
    world = World(decode=[D1], others_out_of_reach=True).start()
    world.tokens(2, 1.0)
    world.decode_fails(LOST, 1.1)
    assert world.hands_over(1.2) == []
    assert world.act(world.request.on_instances(), 1.3) == [], "D1 is to blame still"
    assert world.request.waiting


def test_others_out_of_reach_are_not_waited_for_for_long() -> None:
    world = World(decode=[D1], others_out_of_reach=True).start()
    world.decode_fails(LOST, 2.0)
    assert failure(world.time(2.0 + WAIT_S)).reason is Reason.DECODE_LOST
    assert world.request.ended and world.request.next_timer() is None


def test_who_says_when_to_come_again_is_tried_then_where_there_is_nobody_else() -> None:
    world = World([P1], [D1]).start().streaming()
    world.decode = [Target(D1.name, D1.endpoint, 8)]
    world.decode_fails(LOST, 2.0)
    breaker = Fault(Reason.DECODE_LOST, "not asked again for 0.2 s", retry_after_s=0.2)
    assert begun(world.done)[0] == 2
    assert CancelDecode(0) in world.prefill_fails(breaker, 2.1)
    assert world.request.next_timer() == pytest.approx(2.3)
    assert begun(world.time(2.31)) == (3, Kind.CONTINUATION, "p1", "d1")
    assert world.request.next_timer() == BUDGET_ENDS


@pytest.mark.parametrize(
    ("reason", "again_s"), [(Reason.QUEUE_FULL, 0.2), (Reason.DECODE_LOST, WAIT_S)]
)
def test_a_lack_of_room_or_a_long_time_is_not_waited_for(reason: Reason, again_s: float) -> None:
    world = World([P1], [D1]).start()
    told = Fault(reason, "not now", retry_after_s=again_s)
    assert failure(world.prefill_fails(told, 1.0)).retry_after_s == again_s


def test_a_time_to_come_again_that_is_noticed_too_late_is_the_last_one() -> None:
    world = World([P1], [D1]).start()
    world.prefill_fails(Fault(Reason.DECODE_LOST, "not now", retry_after_s=0.2), 1.0)
    world.decode = []
    assert world.time(9.0) == []
    assert failure(world.time(9.0)).reason is Reason.DECODE_LOST


def test_to_be_told_when_to_come_again_counts_for_no_attempt_for_a_while() -> None:
    world = World([P1], [D1], replace(RULES, attempts=2, wait_s=1.0)).start()
    not_now = Fault(Reason.DECODE_LOST, "not asked again for 0.3 s", retry_after_s=0.3)
    now = 1.0
    for attempt in (2, 3, 4, 5):
        assert CancelDecode(0) in world.prefill_fails(not_now, now)
        now += 0.3
        assert begun(world.time(now)) == (attempt, Kind.RETRY, "p1", "d1")
    world.prefill_fails(not_now, now)
    assert begun(world.time(now + 0.3))[0] == 6, "the first that counts"
    assert failure(world.prefill_fails(not_now, now + 0.4)).reason is Reason.DECODE_LOST


def test_who_says_when_to_come_again_is_not_tried_before() -> None:
    world = World([P1, P2], [D1, D2]).start()
    not_now = Fault(Reason.DECODE_LOST, "not asked again for 0.3 s", retry_after_s=0.3)
    assert begun(world.prefill_fails(not_now, 1.0)) == (2, Kind.RETRY, "p2", "d2")
    assert CancelDecode(0) in world.prefill_fails(not_now, 1.1)
    assert world.request.seeking and world.request.attempt == 2
    assert begun(world.time(1.41)) == (3, Kind.RETRY, "p1", "d1")


def test_a_wait_of_no_time_is_none() -> None:
    rules = replace(RULES, wait_s=0)
    world = World(decode=[D1], rules=rules, others_out_of_reach=True).start()
    assert failure(world.decode_fails(LOST, 2.0)).reason is Reason.DECODE_LOST


def test_who_failed_a_request_is_the_last_choice_before_it_comes_on() -> None:
    world = World([P1], [D1, D2, D3]).start().streaming()
    assert begun(world.decode_fails(LOST, 2.0))[3] == "d2"
    world.tokens(1, 3.0)
    assert begun(world.decode_fails(LOST, 3.1))[3] == "d3"


def test_who_failed_a_request_before_has_it_again_where_there_is_nobody_else() -> None:
    """Both were out of reach for a moment, one after the other."""
    world = World([P1], [D1, D2]).start().streaming()
    assert begun(world.decode_fails(LOST, 2.0))[3] == "d2"
    world.tokens(1, 3.0)
    assert CancelPrefill() in world.decode_fails(LOST, 3.1)
    world.decode = [D1]
    assert begun(world.time(3.1 + SETTLE_S))[3] == "d1"


def test_who_was_lost_before_another_failed_is_waited_for_no_longer_than_others() -> None:
    world = World([P1], [D1, D2]).start().streaming()
    assert begun(world.decode_fails(LOST, 2.0))[3] == "d2"
    world.decode_fails(fault(Reason.KV_CORRUPT), 3.1)
    world.decode = []
    assert world.time(3.1 + SETTLE_S) == []
    assert failure(world.time(3.1 + WAIT_S)).reason is Reason.KV_CORRUPT


def test_who_failed_a_request_otherwise_than_by_being_lost_has_it_not_again() -> None:
    world = World([P1], [D1, D2]).start().streaming()
    assert begun(world.decode_fails(fault(Reason.ENGINE_STUCK), 2.0))[3] == "d2"
    assert failure(world.decode_fails(LOST, 3.1)).reason is Reason.DECODE_LOST


def test_who_failed_a_request_may_have_it_again_once_it_came_on() -> None:
    world = World([P1], [D1, D2]).start().streaming()
    world.decode_fails(LOST, 2.0)
    world.streaming(2, 3.0)
    assert begun(world.decode_fails(LOST, 3.1))[3] == "d1"


# --- bounds ---------------------------------------------------------------------------------------


def test_so_many_attempts_in_a_row_may_bring_a_request_no_further() -> None:
    decodes = [Target(f"d{i}", f"h:2{i}", 7) for i in range(10)]
    world = World([P1], decodes, replace(RULES, attempts=4)).start()
    for attempt in range(2, 5):
        # The first token is P's: D dies of its first step.
        world.tokens(1, float(attempt))
        assert begun(world.decode_fails(LOST, float(attempt)))[0] == attempt
    world.tokens(1, 9.0)
    assert failure(world.decode_fails(LOST, 9.0)).reason is Reason.DECODE_LOST


def test_a_budget_that_is_spent_refuses_and_counts() -> None:
    world = World(budget=RetryBudget(1, 0.5)).start()
    assert begun(world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0))[0] == 2
    assert failure(world.prefill_fails(fault(Reason.KV_CORRUPT), 2.0)).reason is Reason.KV_CORRUPT
    assert world.recovery.counts.tried[Kind.RETRY] == {Reason.SENDER_STUCK: 1}
    assert world.recovery.counts.refused == {Reason.KV_CORRUPT: 1}


def test_an_answer_brings_a_share_and_gives_back_what_it_took() -> None:
    world = World(budget=RetryBudget(2, 0.25)).start()
    world.budget.take()
    world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0)
    assert world.budget.tokens == 0
    world.tokens(1, 2.0)
    world.tokens(14, 2.1)
    assert world.budget.tokens == 0, "a few tokens may be all that it brings"
    world.tokens(1, 2.2)
    assert world.budget.tokens == 1
    world.hands_over(2.2)
    world.tokens(0, 3.0, complete=True)
    assert world.budget.tokens == 1.25


def test_the_budget_of_a_request_that_fails_elsewhere_too_is_lost() -> None:
    world = World([P1, P2], [D1], budget=RetryBudget(5, 1.0)).start()
    for now in (1.0, 2.0):
        world.prefill_fails(fault(Reason.SENDER_STUCK), now)
    assert world.request.ended and world.budget.tokens == 4


def test_who_is_only_told_when_to_come_again_takes_nothing_of_the_budget() -> None:
    rules = replace(RULES, wait_s=1.0)
    world = World([P1], [D1], rules, RetryBudget(2, 0.5)).start()
    not_now = Fault(Reason.DECODE_LOST, "not asked again for 0.3 s", retry_after_s=0.3)
    now = 1.0
    for attempt in (2, 3, 4, 5):
        world.prefill_fails(not_now, now)
        now += 0.3
        assert begun(world.time(now))[0] == attempt
        assert world.budget.tokens == 1, "that of the try under way"
    world.prefill_fails(not_now, now)
    assert world.budget.tokens == 1, "lost by the first that counts"


def test_the_time_is_what_is_left_of_the_requests_budget() -> None:
    world = World().start()
    world.prefill_fails(fault(Reason.SENDER_STUCK), BUDGET_ENDS - 1)
    assert world.request.next_timer() == BUDGET_ENDS
    actions = world.time(BUDGET_ENDS)
    told = failure(actions)
    assert (told.reason, told.metadata["stage"]) == (Reason.STAGE_DEADLINE, "prepare")
    assert cancelled(actions) == {CancelPrefill, CancelDecode}


def test_a_failure_when_the_time_is_over_opens_nothing_more() -> None:
    world = World().start()
    actions = world.prefill_fails(fault(Reason.SENDER_STUCK), BUDGET_ENDS)
    assert failure(actions).reason is Reason.SENDER_STUCK
    assert not [a for a in actions if isinstance(a, OpenPrefill)]


def test_the_time_ends_while_others_are_waited_for() -> None:
    rules = replace(RULES, wait_s=100)
    world = World(decode=[D1], rules=rules, others_out_of_reach=True).start().streaming()
    world.decode_fails(LOST, 2.0)
    assert world.request.next_timer() == BUDGET_ENDS
    told = failure(world.time(BUDGET_ENDS))
    assert (told.reason, told.metadata["stage"]) == (Reason.STAGE_DEADLINE, "decode")


# --- turned off -----------------------------------------------------------------------------------


def test_retries_can_be_turned_off_alone() -> None:
    rules = replace(RULES, retry=False)
    without_token = World(rules=rules).start()
    told = failure(without_token.prefill_fails(fault(Reason.SENDER_STUCK), 1.0))
    assert told.reason is Reason.SENDER_STUCK
    assert begun(World(rules=rules).start().streaming().decode_fails(LOST, 2.0))[0] == 2


def test_continuations_can_be_turned_off_alone() -> None:
    rules = replace(RULES, continuation=False)
    in_mid_answer = World(rules=rules).start().streaming()
    assert failure(in_mid_answer.decode_fails(LOST, 2.0)).reason is Reason.DECODE_LOST
    world = World(rules=rules).start()
    assert begun(world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0))[0] == 2


# --- from outside ---------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_the_new_attempt() -> None:
    world = World().start()
    world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0)
    actions = world.request.on_client_gone(1.5)
    assert actions == [CancelPrefill(), CancelDecode(0)]
    assert world.request.ended and world.request.next_timer() is None


def test_a_client_that_leaves_takes_nothing_of_the_budget() -> None:
    world = World(budget=RetryBudget(5, 0.0)).start()
    world.prefill_fails(fault(Reason.SENDER_STUCK), 1.0)
    assert world.budget.tokens == 4
    world.request.on_client_gone(1.5)
    world.request.on_client_gone(1.6)
    assert world.budget.tokens == 5


def test_a_client_that_leaves_while_others_are_waited_for_ends_it() -> None:
    world = World(decode=[D1], others_out_of_reach=True).start()
    world.decode_fails(LOST, 2.0)
    assert world.request.on_client_gone(2.1) == []
    assert world.request.ended and world.request.next_timer() is None
    assert world.request.on_instances() == []


@pytest.mark.parametrize("reason", [Reason.RELEASED, Reason.DRAINING])
def test_an_operator_ends_it_and_nothing_is_tried_elsewhere(reason: Reason) -> None:
    world = World().start()
    assert failure(world.request.on_fault(fault(reason), 1.0)).reason is reason
    waiting = World(decode=[D1], others_out_of_reach=True).start()
    waiting.decode_fails(LOST, 2.0)
    assert failure(waiting.request.on_fault(fault(reason), 2.1)).reason is reason
    assert world.request.ended and waiting.request.ended


def test_what_was_ended_before_it_began_opens_nothing() -> None:
    world = World().start()
    request = RecoveringRequest(
        Pairing(P1, D1), RoutingTimes(GRACE_S, SETTLE_S), world.recovery, BUDGET_ENDS
    )
    assert failure(request.on_fault(fault(Reason.DRAINING), 1.0)).reason is Reason.DRAINING
    assert request.start(1.0) == [] and request.ended
