"""D's queue under a load that it cannot carry: whom it refuses when the turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Reason, stage_deadline
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.serving_times import FEWEST
from pd_grpc.v1 import decode_pb2
from tests.decode.harness import Harness
from tests.decode.messages import Request
from tests.decode.prefill_peer import Prefill

NEEDED_S = 2.0
"""What each of those before has taken, from grant to end."""
LARGE = list(range(100, 148))
"""Takes 13 of the 16 blocks, so that a second one waits."""


def large(transfer_id: str) -> Request:
    return Request(transfer_id, prompt=LARGE)


def serve(d: Harness, p: Prefill, count: int, took_s: float = NEEDED_S) -> None:
    """Requests one after another, each done `took_s` after its grant, a quarter of it P's."""
    for n in range(count):
        request = Request(f"served-{d.now}-{n}")
        call = d.generate(request)
        grant = p.granted(request)
        d.advance(took_s / 4)
        d.receive(grant, request.tokens)
        p.first_token(request, grant)
        d.advance(3 * took_s / 4)
        d.run()
        assert call in d.finished


def wait_for_turn(d: Harness, p: Prefill, budget_s: float, waits_s: float) -> int:
    """The pool is taken for so long, while a request waits; its Allocate."""
    holder, request = large("holder"), large("late")
    p.granted(holder)
    call = p.allocate(request, budget_s=budget_s)
    assert d.state("late") is S.WAITING
    d.advance(waits_s)
    p.release(holder)
    return call


def patient(**settings: Any) -> Harness:
    """A D that needs no heartbeat meanwhile."""
    return Harness(heartbeat_s=1000.0, lease_s=1000.0, **settings)


@pytest.fixture
def d() -> Iterator[Harness]:
    d = patient()
    yield d
    d.all_returned()


@pytest.fixture
def busy(d: Harness, p: Prefill) -> Iterator[Harness]:
    """A D that knows what requests need."""
    serve(d, p, FEWEST)
    yield d


def test_one_with_too_little_left_is_refused_when_its_turn_comes(busy: Harness, p: Prefill) -> None:
    call = wait_for_turn(busy, p, budget_s=10.0, waits_s=8.5)
    fault = busy.refused[call]
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, "allocate")
    assert "1.5 s are left, and 2 s are needed" in fault.message
    assert busy.reason(p.allocate(large("late"))) is Reason.RELEASED


def test_the_next_in_line_has_its_turn_at_once(busy: Harness, p: Prefill) -> None:
    holder, late, next_one = large("holder"), large("late"), large("next")
    p.granted(holder)
    refused = p.allocate(late, budget_s=10.0)
    busy.advance(5.0)
    granted = p.allocate(next_one, budget_s=10.0)
    busy.advance(3.5)
    p.release(holder)
    assert busy.reason(refused) is Reason.STAGE_DEADLINE
    assert granted in busy.answers
    p.release(next_one)


def test_its_client_hears_it_too(busy: Harness, p: Prefill) -> None:
    client = busy.generate(large("late"), budget_s=10.0)
    wait_for_turn(busy, p, budget_s=10.0, waits_s=8.5)
    assert busy.reason(client) is Reason.STAGE_DEADLINE


@pytest.mark.parametrize(
    ("budget_s", "waits_s"),
    [
        pytest.param(10.0, 7.9, id="enough is left"),
        pytest.param(3.0, 1.4, id="less than half of its time is over"),
    ],
)
def test_others_are_granted(busy: Harness, p: Prefill, budget_s: float, waits_s: float) -> None:
    call = wait_for_turn(busy, p, budget_s=budget_s, waits_s=waits_s)
    assert call in busy.answers
    p.release(large("late"))


def test_one_that_need_not_wait_is_granted_however_little_is_left(
    busy: Harness, p: Prefill
) -> None:
    request = Request("short")
    p.granted(request, budget_s=0.5)
    p.release(request)


def test_nobody_is_refused_before_enough_have_ended(d: Harness, p: Prefill) -> None:
    serve(d, p, FEWEST - 1)
    assert wait_for_turn(d, p, budget_s=10.0, waits_s=8.5) in d.answers
    p.release(large("late"))


def test_it_can_be_turned_off() -> None:
    d = patient(serving_quantile=0.0)
    p = Prefill(d)
    serve(d, p, FEWEST)
    assert wait_for_turn(d, p, budget_s=10.0, waits_s=8.5) in d.answers
    p.release(large("late"))
    d.all_returned()


def test_those_that_run_out_of_time_count_for_longer_than_they_had(d: Harness, p: Prefill) -> None:
    serve(d, p, FEWEST)
    for n in range(FEWEST):
        request = Request(f"out-{n}")
        call = d.generate(request, budget_s=4.0)
        p.granted(request, budget_s=4.0)
        d.advance(4.0)
        assert d.reason(call) is Reason.STAGE_DEADLINE
    call = wait_for_turn(d, p, budget_s=20.0, waits_s=14.5)
    assert "5.5 s are left, and 6 s are needed" in d.refused[call].message


def test_an_aggregated_request_goes_by_its_own_kind(busy: Harness, p: Prefill) -> None:
    def wait(holds: str) -> int:
        holder = large(holds)
        p.granted(holder)
        call = busy.generate(large(""), budget_s=10.0, local=True)
        busy.advance(8.5)
        p.release(holder)
        return call

    first = wait("holder-1")
    busy.run()
    assert first in busy.finished
    for _ in range(FEWEST):
        busy.generate(Request(""), local=True)
        busy.advance(NEEDED_S)
        busy.run()
    assert busy.reason(wait("holder-2")) is Reason.STAGE_DEADLINE


def test_a_slow_p_says_nothing_of_another(busy: Harness) -> None:
    slow = Prefill(busy, "slow")
    serve(busy, slow, FEWEST, took_s=20.0)
    quick = Prefill(busy, "quick")
    assert wait_for_turn(busy, quick, budget_s=40.0, waits_s=30.0) in busy.answers
    quick.release(large("late"))


def test_what_p_gives_up_with_time_left_says_nothing(busy: Harness, p: Prefill) -> None:
    for n in range(FEWEST):
        request = Request(f"given-up-{n}")
        p.granted(request)
        busy.advance(30.0)
        p.release(request, stage_deadline("queue"))
    assert wait_for_turn(busy, p, budget_s=10.0, waits_s=7.9) in busy.answers
    p.release(large("late"))


def test_one_that_does_not_fit_and_is_too_late_holds_nobody_up(busy: Harness, p: Prefill) -> None:
    holder, late, small = large("holder"), large("late"), Request("small")
    p.granted(holder)
    refused = p.allocate(late, budget_s=10.0)
    behind = p.allocate(small)
    busy.advance(8.5)
    p.heartbeat()
    assert busy.reason(refused) is Reason.STAGE_DEADLINE
    assert behind in busy.answers
    for each in (holder, small):
        p.release(each)


def test_p_is_told_how_long_decoding_takes(d: Harness, p: Prefill) -> None:
    p.heartbeat()
    assert not loads(d, p)[-1].HasField("decoding")
    serve(d, p, FEWEST)
    p.heartbeat()
    told = loads(d, p)[-1]
    assert seconds(told.decoding) == pytest.approx(0.75 * NEEDED_S)
    assert seconds(told.decoding_each) == pytest.approx(0.75 * NEEDED_S / Request().max_tokens)


def loads(d: Harness, p: Prefill) -> list[decode_pb2.Load]:
    return [said.load for said in d.told[p.stream] if said.HasField("load")]
