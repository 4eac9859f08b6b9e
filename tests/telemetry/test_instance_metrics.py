"""A request is counted once in each stage, however often it came there."""

from __future__ import annotations

from enum import Enum

import pytest

from pd_grpc.decode.states import STAGES, TRANSITIONS, DecodeState
from pd_grpc.protocol.clock import ManualClock
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instance_metrics import MachineMetrics, stages_ahead
from pd_grpc.telemetry.instruments import Instruments
from tests.telemetry.recorder import Recorder


class State(Enum):
    """Of a request that waits twice, as P's do."""

    QUEUED = 1
    ASKING = 2
    GRANTED = 3
    COMPUTING = 4
    OVER = 5


S = State
WORK = {S.QUEUED: "queue", S.ASKING: "prepare", S.GRANTED: "queue", S.COMPUTING: "compute"}
WAYS = {
    S.QUEUED: {S.ASKING, S.OVER},
    S.ASKING: {S.QUEUED, S.GRANTED, S.OVER},
    S.GRANTED: {S.COMPUTING, S.OVER},
    S.COMPUTING: {S.OVER},
    S.OVER: set[State](),
}
AHEAD = stages_ahead(WORK, WAYS)


class Counted:
    """Moves one request, each state lasting `10 ** n` ms, n the number of the move."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._recorder = Recorder()
        instruments = Instruments("p0", self._recorder.meters)
        self._metrics = MachineMetrics[str](instruments, "prefill", Reason, self._clock.now)

    def go(self, *states: State, fault: Fault | None = None) -> None:
        before = None
        for number, state in enumerate(states):
            left = None if before is None else WORK[before]
            error = fault if state is State.OVER else None
            self._metrics.moved("t-1", left, AHEAD[state], error)
            self._clock.advance(10.0**number / 1000)
            before = state

    def samples(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Number and sum by stage and outcome."""
        return {
            (about[names.ATTR_METRIC_STAGE], about[names.ATTR_OUTCOME]): (p.count, round(p.sum, 6))
            for about, p in self._recorder.points(names.METRIC_STAGE_DURATION)
        }

    @property
    def in_flight(self) -> bool:
        return self._metrics.in_flight("t-1")


def test_two_waits_of_a_stage_are_one_sample_of_their_sum() -> None:
    counted = Counted()
    counted.go(S.QUEUED, S.ASKING, S.QUEUED, S.ASKING, S.GRANTED, S.COMPUTING, S.OVER)
    assert counted.samples() == {
        ("queue", "ok"): (1, 0.001 + 0.1 + 10),
        ("prepare", "ok"): (1, 0.01 + 1),
        ("compute", "ok"): (1, 100),
    }
    assert not counted.in_flight


def test_a_stage_is_counted_as_soon_as_a_request_can_come_there_no_more() -> None:
    counted = Counted()
    counted.go(S.QUEUED, S.ASKING, S.GRANTED)
    assert counted.samples() == {("prepare", "ok"): (1, 0.01)}
    assert counted.in_flight


def test_a_fault_is_the_outcome_of_the_stage_that_it_ended() -> None:
    counted = Counted()
    counted.go(S.QUEUED, S.ASKING, S.OVER, fault=Fault(Reason.NO_BLOCKS, "full"))
    assert counted.samples() == {("queue", "ok"): (1, 0.001), ("prepare", "NO_BLOCKS"): (1, 0.01)}


@pytest.mark.parametrize(
    ("state", "ahead"),
    [
        (DecodeState.RECEIVING, {"transfer", "first_token", "decode"}),
        (DecodeState.PREEMPTED, {"decode"}),
        (DecodeState.FINISHED, set()),
    ],
)
def test_what_is_ahead_of_a_transfer_on_d_is_what_its_table_says(
    state: DecodeState, ahead: set[str]
) -> None:
    assert stages_ahead(STAGES, TRANSITIONS)[state] == ahead
