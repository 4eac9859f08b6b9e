"""Where the time of a request went, told from spans: sums, and the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from pd_grpc.telemetry import names
from pd_grpc.telemetry.partition import Moment, Partition, Work, partition, requests, whole_of

ROUTER, P, D = "router", "p0", "d0"
_AHEAD_NS = {ROUTER: 0, P: 7_000_000_000, D: -3_600_000_000_000, "p1": 10**15, "d1": 5}
"""Their clocks: a week and an hour apart, for all that is known."""


def work(
    name: str,
    of: str,
    at_ms: float,
    length_ms: float,
    moments: Sequence[Moment] = (),
    *,
    outcome: str = "ok",
    attempt: int = 1,
    transfer_id: str = "t-1",
    parent: str = "pd.request",
) -> Work:
    """A span; its id is its name with the instance and when it began."""
    return Work(
        "pd.request" if name == names.SPAN_REQUEST else f"{name} {of} {at_ms}",
        "" if name == names.SPAN_REQUEST else parent,
        name,
        of,
        1_700_000_000_000_000_000 + _AHEAD_NS[of] + round(at_ms * 1e6),
        length_ms / 1000,
        outcome,
        {names.ATTR_TRANSFER_ID: transfer_id, names.ATTR_ATTEMPT: str(attempt)},
        moments,
    )


def first(ms: float) -> Moment:
    return Moment(names.EVENT_FIRST_TOKEN, ms / 1000)


def second(ms: float) -> Moment:
    return Moment(names.EVENT_SECOND_TOKEN, ms / 1000)


def recovery(kind: str, attempt: int) -> Moment:
    told = {names.ATTR_RECOVERY: kind, names.ATTR_ATTEMPT: str(attempt)}
    return Moment(names.EVENT_RECOVERY, 0.0, told)


def prefilled(attempt: int = 1, p: str = P) -> list[Work]:
    """P's stages of an attempt: 15 + 5 + 5 + 30 + 4 ms."""
    return [
        work("pd.prefill_request", p, 2, 64, attempt=attempt),
        work("pd.queue", p, 2, 15, attempt=attempt),
        work("pd.prepare", p, 17, 5, attempt=attempt),
        work("pd.allocate", p, 18, 4, attempt=attempt),
        work("pd.queue", p, 22, 5, attempt=attempt),
        work("pd.compute", p, 27, 30, attempt=attempt),
        work("pd.send", p, 27, 38, attempt=attempt),
        work("pd.first_token", p, 57, 4, attempt=attempt),
    ]


def decoded(attempt: int = 1, d: str = D, tail_ms: float = 3) -> list[Work]:
    """D's part of an attempt: KV until `tail_ms` behind the first token, 6 ms of waiting, a step of
    10 ms."""
    return [
        work("pd.reserve", d, 18, 3, attempt=attempt),
        work("pd.receive", d, 21, 37 + tail_ms, [first(37)], attempt=attempt),
        work("pd.decode", d, 58 + tail_ms, 90, [second(16)], attempt=attempt),
        work("pd.step_wait", d, 58 + tail_ms, 6, attempt=attempt),
    ]


def whole(*more: Work, moments: Sequence[Moment] = (first(62), second(81.5))) -> Partition:
    spans = [
        work("pd.request", ROUTER, 0, 160, moments),
        work("pd.route", ROUTER, 0, 2),
        *more,
    ]
    told = partition(spans)
    assert told == partition(spans[::-1]), "the order they are told in says nothing"
    return told


def path(told: Partition) -> list[str]:
    return [span.name for span in told.critical]


STAGES = ["pd.queue", "pd.prepare", "pd.queue", "pd.compute", "pd.first_token"]


def test_stages_sum_to_the_first_token_and_three_more_to_the_second() -> None:
    told = whole(*prefilled(), *decoded())
    assert told.stages == pytest.approx(
        {"route": 0.002, "queue": 0.020, "prepare": 0.005, "compute": 0.030, "first_token": 0.004}
    )
    assert told.to_first_s == pytest.approx(0.062)
    assert told.between_s == pytest.approx(0.001)
    assert told.behind == pytest.approx({"exposed_send": 0.003, "step_wait": 0.006, "step": 0.010})
    assert told.to_second_s == pytest.approx(0.0195)
    assert told.between_second_s == pytest.approx(0.0005)


def test_the_second_token_waits_for_kv_that_comes_behind_the_first() -> None:
    told = whole(*prefilled(), *decoded())
    assert path(told) == ["pd.route", *STAGES, "pd.send", "pd.step_wait", "pd.decode"]


def test_a_send_that_ended_before_the_first_token_was_taken_delayed_nothing() -> None:
    reserve, receive, decode, wait = decoded(tail_ms=0)
    early = work("pd.receive", D, 21, 30)
    told = whole(*prefilled(), reserve, early, decode, wait)
    assert told.behind is not None and told.behind["exposed_send"] == 0
    assert path(told) == ["pd.route", *STAGES, "pd.step_wait", "pd.decode"]
    # Ended in the same moment, too.
    assert path(whole(*prefilled(), reserve, receive, decode, wait)) == path(told)


def test_of_a_decode_instance_that_tells_nothing_p_knows_what_was_sent_behind() -> None:
    told = whole(*prefilled())
    assert path(told) == ["pd.route", *STAGES, "pd.send"]
    assert told.behind is None and told.between_second_s is None


def test_a_first_token_that_leaves_late_waits_for_no_step_it_overlaps() -> None:
    reserve, receive, _, wait = decoded(tail_ms=0)
    kv_first = work("pd.receive", D, 21, 30)
    late = work("pd.decode", D, 58, 90, [first(8), second(16)])
    told = whole(*prefilled(), reserve, kv_first, late, wait)
    assert told.behind == pytest.approx({"exposed_send": 0, "step_wait": 0, "step": 0.008})
    soon = work("pd.decode", D, 58, 90, [first(2), second(16)])
    told = whole(*prefilled(), reserve, kv_first, soon, wait)
    assert told.behind == pytest.approx({"exposed_send": 0, "step_wait": 0.004, "step": 0.010})
    assert receive.after_s(names.EVENT_FIRST_TOKEN) == pytest.approx(0.037)


def test_an_answer_of_two_tokens_ends_with_its_second() -> None:
    reserve, receive, _, wait = decoded()
    decode = work("pd.decode", D, 61, 16)
    told = whole(*prefilled(), reserve, receive, decode, wait)
    assert told.behind == pytest.approx({"exposed_send": 0.003, "step_wait": 0.006, "step": 0.010})


def test_a_request_that_died_before_its_second_token_has_no_second_sum() -> None:
    reserve, receive, _, wait = decoded()
    decode = work("pd.decode", D, 61, 16, outcome="ENGINE_ERROR")
    told = whole(*prefilled(), reserve, receive, decode, wait, moments=[first(62)])
    assert told.behind is None and told.to_second_s is None
    assert path(told)[-2:] == ["pd.step_wait", "pd.decode"]


def test_an_answer_of_one_token_ends_with_ps() -> None:
    told = whole(*prefilled()[:6], prefilled()[-1], moments=[first(62)])
    assert path(told) == ["pd.route", *STAGES]
    assert (told.to_second_s, told.behind) == (None, None)


def test_a_decode_instance_that_prefills_is_told_by_the_same_stages() -> None:
    own = partial(work, transfer_id="local-9")
    told = whole(
        own("pd.queue", D, 3, 20),
        own("pd.compute", D, 23, 30),
        own("pd.decode", D, 53, 90, [first(0), second(16)]),
        own("pd.step_wait", D, 53, 6),
        moments=[first(53), second(69)],
    )
    assert told.stages == pytest.approx(
        {"route": 0.002, "queue": 0.020, "prepare": 0, "compute": 0.030, "first_token": 0}
    )
    assert told.behind == pytest.approx({"exposed_send": 0, "step_wait": 0.006, "step": 0.010})
    assert path(told) == ["pd.route", "pd.queue", "pd.compute", "pd.step_wait", "pd.decode"]


def test_an_attempt_that_failed_was_waited_for_too() -> None:
    failed = [
        work("pd.prefill_request", P, 2, 30, outcome="NO_BLOCKS"),
        work("pd.queue", P, 2, 1),
        work("pd.prepare", P, 3, 29, outcome="NO_BLOCKS"),
    ]
    told = whole(
        *failed,
        *prefilled(attempt=2, p="p1"),
        *decoded(attempt=2, d="d1"),
        moments=[recovery("retry", 2), first(94), second(113.5)],
    )
    assert told.stages["queue"] == pytest.approx(0.021)
    assert told.stages["prepare"] == pytest.approx(0.034)
    assert told.between_s == pytest.approx(0.003)
    assert path(told)[:4] == ["pd.route", "pd.queue", "pd.prepare", "pd.queue"]
    assert [span.attempt for span in told.critical[1:]] == [1, 1, *[2] * 8]


def test_an_answer_that_went_on_elsewhere_had_its_first_token_before() -> None:
    reserve, receive, decode, wait = decoded()
    lost = work("pd.decode", D, 61, 90, [second(16)], outcome="ENGINE_ERROR")
    told = whole(
        *prefilled(),
        *(reserve, receive, lost, wait),
        *prefilled(attempt=2, p="p1"),
        *decoded(attempt=2, d="d1"),
        moments=[first(62), second(81.5), recovery("continuation", 2)],
    )
    alone = whole(*prefilled(), reserve, receive, decode, wait)
    assert (told.stages, told.behind) == (alone.stages, alone.behind)
    assert [span.attempt for span in told.critical].count(2) == 8


def test_of_instances_that_are_gone_nothing_is_made_up() -> None:
    """The first token came from an attempt whose P and D were killed."""
    told = whole(
        *prefilled(attempt=2, p="p1"),
        *decoded(attempt=2, d="d1"),
        moments=[first(62), recovery("continuation", 2), second(500)],
    )
    assert told.stages == pytest.approx(dict.fromkeys(told.stages, 0) | {"route": 0.002})
    assert told.behind is None
    assert path(told)[:2] == ["pd.route", "pd.queue"]


def test_a_request_refused_at_the_door_waited_for_its_routing() -> None:
    spans = [
        work("pd.request", ROUTER, 0, 1, outcome="BAD_REQUEST"),
        work("pd.route", ROUTER, 0, 1, outcome="BAD_REQUEST"),
    ]
    told = partition(spans)
    assert (told.to_first_s, told.between_s, told.behind) == (None, None, None)
    assert path(told) == ["pd.route"]


def test_without_a_router_there_is_nothing_to_compare_with() -> None:
    told = partition([*prefilled(), *decoded()])
    assert told.to_first_s is None and told.between_s is None
    assert told.stages["compute"] == pytest.approx(0.030)
    assert told.behind is not None
    assert partition([]).critical == ()


def test_the_requests_of_one_trace_are_told_apart() -> None:
    spans = [
        work("pd.request", ROUTER, 0, 100),
        work("pd.compute", P, 10, 10, parent="gone"),
        work("pd.step", D, 10, 10),
        work("pd.compute", "p1", 10, 10, transfer_id="t-2", parent="gone"),
        work("pd_grpc.v1.PrefillService/Prefill", ROUTER, 1, 9),
        work("pd.queue", D, 3, 4, transfer_id="local-1", parent="pd.prefill_request p0 5"),
        work("pd.prefill_request", P, 5, 4),
    ]
    named = [sorted(span.name for span in each) for each in requests(spans)]
    assert named == [["pd.compute", "pd.prefill_request", "pd.queue", "pd.request"], ["pd.compute"]]


def test_what_stands_between_two_pieces_of_work_is_looked_through() -> None:
    request = work("pd.request", ROUTER, 0, 100)
    call = work("pd_grpc.v1.PrefillService/Prefill", ROUTER, 1, 9)
    served = work("pd_grpc.v1.PrefillService/Prefill", P, 2, 7, parent=call.span_id)
    piece = work("pd.prefill_request", P, 3, 6, parent=served.span_id)
    known = {span.span_id: span for span in (request, call, served, piece)}
    assert whole_of(piece, known) is request
    assert whole_of(request, known) is None
    del known[call.span_id]
    assert whole_of(piece, known) is None


def test_spans_that_name_each_other_as_their_whole_end() -> None:
    a = work("call a", P, 0, 1, parent="call b p0 0")
    b = work("call b", P, 0, 1, parent="call a p0 0")
    piece = work("pd.compute", P, 0, 1, parent=a.span_id)
    known = {span.span_id: span for span in (a, b, piece)}
    assert whole_of(piece, known) is None
    assert [len(each) for each in requests(known.values())] == [1]


@pytest.mark.parametrize("told", ["", "x", "-1", "1.5", "²", "١"])
def test_an_attempt_that_is_no_number_is_none(told: str) -> None:
    span = Work("a", "", "pd.compute", P, 0, 1.0, attributes={names.ATTR_ATTEMPT: told})
    assert span.attempt == 0
    assert partition([span]).critical == ()


def test_choices_of_a_request_are_told_apart_and_from_the_request() -> None:
    request = work("pd.request", ROUTER, 0, 160, transfer_id="")
    route = work("pd.route", ROUTER, 0, 2, transfer_id="")
    choices = []
    for number in (0, 1):
        about: dict[str, Any] = {
            "transfer_id": f"t-{number}",
            "parent": f"pd.choice router {number}",
        }
        choices.append(
            [
                work("pd.choice", ROUTER, number, 150, [first(40)], transfer_id=f"t-{number}"),
                work("pd.route", ROUTER, number, 3, **about),
                work("pd.compute", P, number + 3, 30, **about),
                # The calls in between were not kept.
                work("pd.decode", D, number + 50, 90, transfer_id=f"t-{number}", parent="lost"),
            ]
        )
    found = requests([request, route, *choices[0], *choices[1]])
    assert [{span.span_id for span in each} for each in found] == [
        {span.span_id for span in each} for each in ([request, route], *choices)
    ]
    for each in choices:
        told = partition(each)
        assert told.to_first_s == pytest.approx(0.040)
        assert (told.stages["route"], told.stages["compute"]) == (0.003, 0.030)
    assert partition([request, route]).to_first_s is None
