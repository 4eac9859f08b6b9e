"""A request that can be tried elsewhere, with the instances a test has at hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.router.machine import Action as AttemptAction
from pd_grpc.router.machine import (
    CancelDecode,
    CancelPrefill,
    Fail,
    OpenDecode,
    OpenPrefill,
    RoutingTimes,
)
from pd_grpc.router.policies import LeastLoad, Target, pair
from pd_grpc.router.recovery import (
    Action,
    Begin,
    Kind,
    RecoveringRequest,
    Recovery,
    RecoveryRules,
    Seek,
)
from pd_grpc.router.retry_budget import RetryBudget
from pd_grpc.router.server import recovery_of

P1, P2, P3 = Target("p1", "h:1", 7), Target("p2", "h:2", 7), Target("p3", "h:3", 7)
D1, D2, D3 = Target("d1", "h:11", 7), Target("d2", "h:12", 7), Target("d3", "h:13", 7)
GRACE_S, SETTLE_S, WAIT_S, BUDGET_ENDS = 1.0, 0.5, 1.0, 60.0
RULES = replace(recovery_of(RouterConfig()).rules, wait_s=WAIT_S)
LOST = TransportFault(Code.UNAVAILABLE, "connection reset")


def fault(reason: Reason) -> Fault:
    return Fault(reason, reason.value.lower())


@dataclass
class World:
    """Which instances are ready, and one request; `done` is everything that was to be done.

    The shell's part is played at once: a Seek is answered with a pair of the ready instances.
    """

    prefill: list[Target] = field(default_factory=lambda: [P1, P2])
    decode: list[Target] = field(default_factory=lambda: [D1, D2])
    rules: RecoveryRules = RULES
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(10, 0.5))
    others_out_of_reach: bool = False
    whole: bool = False
    done: list[Action] = field(default_factory=list)

    def start(self) -> World:
        """Begin the request on the first pair; what that does is not kept."""
        self.recovery = Recovery(self.rules, self.budget)
        first = pair(
            self.prefill, self.decode, LeastLoad(), LeastLoad(), aggregated=not self.prefill
        )
        self.request = RecoveringRequest(
            first, RoutingTimes(GRACE_S, SETTLE_S), self.recovery, BUDGET_ENDS
        )
        self.act(self.request.start(0.0), 0.0)
        self.done.clear()
        return self

    def act(self, actions: list[Action], now: float) -> list[Action]:
        """Play the shell; returns what was done, with what followed from it."""
        request, before = self.request, len(self.done)
        for action in actions:
            if not isinstance(action, Seek):
                self.done.append(action)
            elif self.whole:
                self.act(request.on_whole(now), now)
            else:
                found = request.suspects.another_pair(
                    action.blame,
                    self.prefill,
                    self.decode,
                    LeastLoad(),
                    LeastLoad(),
                    aggregated=not self.prefill,
                )
                if found is not None:
                    self.act(request.on_pairing(found, now), now)
                else:
                    self.act(request.on_nowhere(self.others_out_of_reach, now), now)
        return self.done[before:]

    # What the legs of the current attempt say.

    def of_attempt(self, actions: list[AttemptAction], now: float) -> list[Action]:
        return self.act(self.request.after(actions, now), now)

    def tokens(self, count: int, now: float, complete: bool = False) -> list[Action]:
        one = self.request.request
        return self.of_attempt(one.on_tokens(one.leg, count, complete, now), now)

    def hands_over(self, now: float) -> list[Action]:
        return self.of_attempt(self.request.request.on_handed_off(now), now)

    def placing(self, target: Target, now: float) -> list[Action]:
        return self.of_attempt(self.request.request.on_placing(target, now), now)

    def prefill_fails(self, error: Fault | TransportFault, now: float) -> list[Action]:
        return self.of_attempt(self.request.request.on_prefill_failed(error, now), now)

    def decode_fails(self, error: Fault | TransportFault, now: float) -> list[Action]:
        one = self.request.request
        return self.of_attempt(one.on_decode_failed(one.leg, error, now), now)

    def time(self, now: float) -> list[Action]:
        return self.act(self.request.on_time(now), now)

    def streaming(self, tokens: int = 5, now: float = 1.0) -> World:
        """Handed over, with so many tokens seen."""
        self.tokens(1, now)
        self.hands_over(now)
        self.tokens(tokens - 1, now)
        self.done.clear()
        return self


def failure(actions: list[Action]) -> Fault:
    """The fault the client hears; the request must have ended with these actions."""
    assert isinstance(actions[-1], Fail), actions
    return actions[-1].fault


def begun(actions: list[Action]) -> tuple[int, Kind, str, str]:
    """The one new attempt: its number and kind, and the names of its P ("" for none) and D."""
    (begin,) = (action for action in actions if isinstance(action, Begin))
    after = actions[actions.index(begin) + 1 :]
    (decode,) = (action.target.name for action in after if isinstance(action, OpenDecode))
    prefill = [action.target.name for action in after if isinstance(action, OpenPrefill)]
    return begin.attempt, begin.kind, "".join(prefill), decode


def cancelled(actions: list[Action]) -> set[type]:
    """Which kinds of leg were cancelled, and all of them before another attempt began."""
    kinds = (CancelPrefill, CancelDecode)
    first = next((i for i, each in enumerate(actions) if isinstance(each, Begin)), len(actions))
    assert not [each for each in actions[first:] if isinstance(each, kinds)]
    return {type(each) for each in actions[:first] if isinstance(each, kinds)}
