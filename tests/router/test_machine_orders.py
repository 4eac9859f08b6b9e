"""In every order of events: one end, nothing after it, and no leg left open."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.router.machine import (
    Action,
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
DECODES = [Target(f"d{i}", f"h:1{i}") for i in range(3)]
BUDGET_ENDS = 30.0

errors = st.one_of(
    st.sampled_from(list(Reason)).map(lambda reason: Fault(reason, "told")),
    st.sampled_from([c for c in Code if c is not Code.OK]).map(lambda c: TransportFault(c, "raw")),
)
legs = st.integers(0, 2)
Event = Callable[[RoutedRequest, float], list[Action]]

events: st.SearchStrategy[Event] = st.one_of(
    st.just(lambda m, now: m.on_queued(now)),
    st.just(lambda m, now: m.on_progress(now)),
    st.just(lambda m, now: m.on_handed_off(now)),
    st.just(lambda m, now: m.on_prefill_ended(now)),
    st.just(lambda m, now: m.on_time(now)),
    st.just(lambda m, now: m.on_client_gone(now)),
    st.sampled_from(DECODES).map(lambda d: lambda m, now: m.on_placing(d, now)),
    errors.map(lambda e: lambda m, now: m.on_prefill_failed(e, now)),
    st.tuples(legs, errors).map(lambda x: lambda m, now: m.on_decode_failed(*x, now)),
    st.tuples(legs, st.integers(0, 2), st.booleans()).map(
        lambda x: lambda m, now: m.on_tokens(*x, now)
    ),
    st.tuples(legs, st.sampled_from(TransferVerdict)).map(
        lambda x: lambda m, now: m.on_verdict(*x, now)
    ),
)


class Watched(RoutedRequest):
    """Remembers the legs that D itself ended: those need no cancel."""

    ended_by_decode: frozenset[int] = frozenset()

    def on_decode_failed(self, leg: int, error: Fault | TransportFault, now: float) -> list[Action]:
        if leg == self.leg:
            self.ended_by_decode |= {leg}
        return super().on_decode_failed(leg, error, now)


@given(
    st.lists(st.tuples(st.floats(0, 2), events), max_size=25),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_order_of_events_ends_once_and_leaves_no_leg_open(
    told: list[tuple[float, Event]], decodes: int, aggregated: bool
) -> None:
    first, *others = DECODES[:decodes]
    pairing = Pairing(None, first) if aggregated else Pairing(P, first, tuple(others))
    machine = Watched(pairing, RoutingTimes(1.0, 0.5), BUDGET_ENDS)
    now, actions = 0.0, machine.start(0.0)
    for passed, event in told:
        now += passed
        ended = machine.ended
        more = event(machine, now)
        assert not (ended and more), "an action after the end"
        actions += more

    actions += machine.on_time(BUDGET_ENDS)
    assert machine.ended, "its budget is over and it has not ended"
    ends = [a for a in actions if isinstance(a, Finish | Fail)]
    assert len(ends) <= 1
    opened = {a.leg for a in actions if isinstance(a, OpenDecode)}
    cancelled = [a.leg for a in actions if isinstance(a, CancelDecode)]
    assert set(cancelled) <= opened and len(cancelled) == len(set(cancelled))
    left = opened - set(cancelled) - machine.ended_by_decode
    assert left <= {machine.leg}, "a leg was left behind and not cancelled"
    prefills = [a for a in actions if isinstance(a, OpenPrefill)]
    assert len(prefills) == (not aggregated)
    assert actions.count(CancelPrefill()) <= 1
    assert machine.timers.next() is None
