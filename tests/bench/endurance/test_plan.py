from __future__ import annotations

from collections import Counter

import pytest

from pd_grpc.bench.endurance.plan import (
    REQUESTS_PER_SLOT,
    FaultKind,
    Manner,
    Slot,
    plan_slots,
)
from pd_grpc.bench.trace import Arrival, read_trace
from pd_grpc.protocol.sampling import sampling_errors

REQUESTS = 5000


@pytest.fixture(scope="module")
def trace() -> list[Arrival]:
    return read_trace(None, 10)


@pytest.fixture(scope="module")
def slots(trace: list[Arrival]) -> list[Slot]:
    return list(plan_slots(REQUESTS, 3, trace))


def test_a_seed_is_a_plan(trace: list[Arrival], slots: list[Slot]) -> None:
    assert list(plan_slots(REQUESTS, 3, trace)) == slots
    assert list(plan_slots(REQUESTS, 4, trace)) != slots


def test_every_request_is_in_it_and_a_fault_for_each_twenty(slots: list[Slot]) -> None:
    assert sum(len(slot.requests) for slot in slots) == REQUESTS
    assert len(slots) == -(-REQUESTS // REQUESTS_PER_SLOT) >= REQUESTS / 20


def test_every_kind_of_fault_and_of_client_is_in_it(slots: list[Slot]) -> None:
    faults = Counter((slot.fault.kind, slot.fault.target) for slot in slots)
    everywhere = {(k, t) for k in FaultKind for t in ("p0", "p1", "d0", "d1")}
    spoiled_at_p = {(FaultKind.CORRUPT, "p0"), (FaultKind.CORRUPT, "p1")}
    assert set(faults) == everywhere - spoiled_at_p
    cuts = {(s.fault.client, s.fault.port) for s in slots if s.fault.kind is FaultKind.CUT}
    links = {(p, port) for p in ("p0", "p1") for port in ("endpoint", "bulk")}
    assert cuts == links | {("router", "endpoint")}
    assert {r.manner for slot in slots for r in slot.requests} == set(Manner)


def test_requests_are_what_they_are_meant_to_be(slots: list[Slot]) -> None:
    before = None
    for request in (request for slot in slots for request in slot.requests):
        assert request.prompt and not sampling_errors(request.sampling)
        if request.as_text:
            assert request.prompt == tuple(3 + byte for byte in request.as_text.encode())
        if request.manner is Manner.DUPLICATE:
            assert before is not None and before.name == request.name
            assert before.prompt == request.prompt
        before = request


def test_some_processes_live_on_from_two_fifths_of_the_run(slots: list[Slot]) -> None:
    ends = (FaultKind.KILL, FaultKind.RESTART)
    later = slots[len(slots) * 2 // 5 + 1 :]
    assert {s.fault.target for s in later if s.fault.kind in ends} == {"p1", "d1"}
