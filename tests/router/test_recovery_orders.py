"""Any order of events, over all attempts: one end, no leg left open, attempts that rise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.router.machine import (
    CancelDecode,
    CancelPrefill,
    Fail,
    Finish,
    OpenDecode,
    OpenPrefill,
    PrefillLeg,
    TransferVerdict,
)
from pd_grpc.router.policies import Target
from pd_grpc.router.recovery import Action, Begin
from pd_grpc.router.retry_budget import RetryBudget
from tests.router.recovering import BUDGET_ENDS, RULES, World

PREFILLS = [Target(f"p{i}", f"h:{i}", 1) for i in range(3)]
DECODES = [Target(f"d{i}", f"h:1{i}", 1) for i in range(3)]

errors = st.one_of(
    st.sampled_from(list(Reason)).map(lambda reason: Fault(reason, "told")),
    st.sampled_from([c for c in Code if c is not Code.OK]).map(lambda c: TransportFault(c, "raw")),
    st.just(TransportFault(Code.UNAVAILABLE, "raw")),
)
Event = Callable[["Watched", float], object]


class Watched(World):
    """Remembers the legs that their instance ended: those need no cancel."""

    def start(self) -> Watched:
        super().start()
        self.open = {(1, "decode 0")} | ({(1, "prefill")} if self.prefill else set())
        self.attempts = [1]
        self.ends = 0
        pairing = self.request.pairing
        self.pair: tuple[Target | None, Target | None] = (pairing.prefill, pairing.decode)
        self.left: tuple[Target | None, Target | None] = (None, None)
        return self

    def prefill_over(self) -> None:
        self.open.discard((self.request.attempt, "prefill"))

    def decode_over(self) -> bool:
        """D's leg ends; False when it had ended."""
        leg = (self.request.attempt, f"decode {self.request.request.leg}")
        was_open = leg in self.open
        self.open.discard(leg)
        return was_open

    def follow(self) -> None:
        """Take in what was done since."""
        attempt = self.attempts[-1]
        for action in self.done:
            match action:
                case Begin(number):
                    assert number == attempt + 1
                    attempt = number
                    self.attempts.append(number)
                    assert not self.open, "an attempt began before the one before was over"
                    self.left, self.pair = self.pair, (None, None)
                case OpenPrefill(target):
                    self.open.add((attempt, "prefill"))
                    self.pair = (target, self.pair[1])
                case OpenDecode(leg, target):
                    self.open.add((attempt, f"decode {leg}"))
                    self.pair = (self.pair[0], target)
                case CancelPrefill():
                    self.open.remove((attempt, "prefill"))
                case CancelDecode(leg):
                    self.open.remove((attempt, f"decode {leg}"))
                case Finish() | Fail():
                    self.ends += 1
        assert self.pair != self.left, "the pair that has failed was chosen again"
        self.done.clear()


def prefill_fails(error: Fault | TransportFault) -> Event:
    def event(world: Watched, now: float) -> None:
        if world.request.request.prefill is PrefillLeg.OPEN:
            world.prefill_over()
            world.prefill_fails(error, now)

    return event


def decode_fails(error: Fault | TransportFault) -> Event:
    def event(world: Watched, now: float) -> None:
        if world.decode_over():
            world.decode_fails(error, now)

    return event


def tokens(count: int, complete: bool) -> Event:
    def event(world: Watched, now: float) -> None:
        if not complete or world.decode_over():
            world.tokens(count, now, complete)

    return event


def verdict(said: TransferVerdict) -> Event:
    def event(world: Watched, now: float) -> None:
        one = world.request.request
        world.of_attempt(one.on_verdict(one.leg, said, now), now)

    return event


def hands_over(world: Watched, now: float) -> list[Action]:
    if world.request.request.prefill is PrefillLeg.OPEN:
        world.prefill_over()
    return world.hands_over(now)


def ready(decode: list[Target]) -> Event:
    def event(world: Watched, now: float) -> None:
        world.decode = decode
        world.act(world.request.on_instances(), now)

    return event


events: st.SearchStrategy[Event] = st.one_of(
    st.just(hands_over),
    st.just(lambda world, now: world.time(now)),
    st.just(lambda world, now: world.act(world.request.on_client_gone(now), now)),
    st.sampled_from(DECODES).map(lambda d: lambda world, now: world.placing(d, now)),
    errors.map(prefill_fails),
    errors.map(decode_fails),
    st.tuples(st.integers(0, 2), st.sampled_from([False, False, True])).map(lambda x: tokens(*x)),
    st.sampled_from(TransferVerdict).map(verdict),
    st.lists(st.sampled_from(DECODES), unique=True).map(ready),
)


@given(
    st.lists(st.tuples(st.floats(0, 1), events), max_size=30),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_order_ends_once_leaves_no_leg_open_and_counts_attempts(
    told: list[tuple[float, Event]], prefills: int, decodes: int, burst: int, reachable: bool
) -> None:
    world = Watched(
        PREFILLS[:prefills],
        DECODES[:decodes],
        replace(RULES, wait_s=0.5),
        RetryBudget(burst, 0.0),
        others_out_of_reach=not reachable,
    )
    world.start()
    now = 0.0
    for passed, event in told:
        now += passed
        ended = world.request.ended
        event(world, now)
        assert not (ended and world.done), "an action after the end"
        world.follow()
    world.time(BUDGET_ENDS)
    world.follow()

    assert world.request.ended, "its budget is over and it has not ended"
    assert world.ends <= 1 and not world.open
    assert world.request.next_timer() is None
    assert 0 <= world.budget.tokens <= burst
