"""A request that outlives its instances, without a socket or a clock: attempts one after another,
each a `RoutedRequest` on a pair of its own. Events in, actions out.

* **Retry.** An attempt failed before the client had a token: the request begins anew elsewhere.
* **Continuation.** It failed later: the tokens that came go along as `generated_token_ids`, and
  the answer goes on behind them. The client sees one stream.

The rules:

* Only what the status table would try elsewhere is, and a leg whose connection is gone. What ends
  the request from outside (its budget, its client, an operator) ends it.
* `attempt` rises by one each time, so that P and D take the new attempt as superseding the old one,
  whose legs are cancelled before. The time is what is left of the request's budget.
* Elsewhere means without the instance to blame; see `suspects`. A request fails with what happened
  last where there is nobody else, so one in front of a single P and a single D fails at once: it
  does not wait for that D to come back. Where another instance of the role to blame is out of reach
  just then, the request waits `wait_s` for one; so does a new request that finds nobody. Whoever is
  ready first within that time has it, and that may be the instance to blame itself, as another
  process under the same address. And where the failure is that an instance is not to be had now,
  with a RetryInfo within that time, everybody may be tried again then: so P tells of a D that it
  lost and has not yet met again. So it is after `settle_s` where one was lost before another
  failed.
* `attempts` of them may fail in a row without bringing the request on. What does is a second token,
  for the first is P's own; a request that kills whoever decodes it gets no further. One that was
  only told when to come again counts for none, for `wait_s` after the first.
* The retry budget must have a token; an attempt that counts for none gives it back, and so does one
  that ends the answer or brings enough of it. One that brings little may be of a request that kills
  whoever decodes it.

The shell answers `Seek` at once, by `on_pairing`, `on_nowhere`, or by `on_whole` when the tokens
that came are the whole answer and only the word of it was lost.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from pd_grpc.protocol.faults import Code, Fault, Reason, stage_deadline
from pd_grpc.protocol.timers import Timers
from pd_grpc.router.machine import Action as AttemptAction
from pd_grpc.router.machine import Fail, Finish, RoutedRequest, RoutingTimes
from pd_grpc.router.policies import Pairing, Target
from pd_grpc.router.retry_budget import RetryBudget
from pd_grpc.router.suspects import NOBODY, Blame, Suspects, blamed

FIRST_ATTEMPT = 1

_FEWEST_TOKENS = 2
"""By so many an attempt has brought its request on."""
_REPAID_TOKENS = 16
"""By so many it has been worth its token of the retry budget."""


_TIMERS = ("budget", "wait", "again", "settle")


class Kind(enum.Enum):
    """How a request is tried elsewhere."""

    RETRY = "retry"
    CONTINUATION = "continuation"


@dataclass(frozen=True)
class RecoveryRules:
    """What a router tries elsewhere, how often, and how long it waits for somebody; see
    `RouterConfig`."""

    retry: bool
    continuation: bool
    attempts: int
    wait_s: float


@dataclass
class RecoveryCounts:
    """How often requests were tried elsewhere since the router started, by the reason that the
    attempt before had failed for; `refused` is what the retry budget forbade."""

    tried: dict[Kind, Counter[Reason]] = field(
        default_factory=lambda: {kind: Counter() for kind in Kind}
    )
    refused: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True)
class Recovery:
    """What all requests of one router share."""

    rules: RecoveryRules
    budget: RetryBudget
    counts: RecoveryCounts = field(default_factory=RecoveryCounts)


@dataclass(frozen=True)
class Seek:
    """Look for a pair that `suspects.another_pair` allows with this blame."""

    blame: Blame


@dataclass(frozen=True)
class Begin:
    """The actions that follow are those of a new attempt, `request` its machine; `fault` is what
    the attempt before it failed with."""

    attempt: int
    kind: Kind
    fault: Fault


Action = AttemptAction | Seek | Begin


class RecoveringRequest:
    """One request of a client. What the legs say goes to `request`, the current attempt's machine,
    and what that returns goes through `after`; everything else comes here.

    `ended` is final: every event afterwards is a no-op. A machine that was left has ended too.
    """

    def __init__(
        self,
        pairing: Pairing,
        times: RoutingTimes,
        recovery: Recovery,
        budget_ends: float,
        attempt: int = FIRST_ATTEMPT,
    ) -> None:
        self.attempt = attempt
        self.budget_ends = budget_ends
        self.request = RoutedRequest(pairing, times, budget_ends)
        self.suspects = Suspects()
        self.timers: Timers[str] = Timers()
        self._times = times
        self._recovery = recovery
        self._tokens_before = 0
        self._without_progress = 0
        self._patient_until: float | None = None
        self._borrowed = False
        self._failed: Fault | None = None
        self._began_with: Fault | None = None
        """What the attempt before this one failed with."""
        self._blame = NOBODY

    @property
    def tokens(self) -> int:
        """Tokens that came, over all attempts."""
        return self._tokens_before + self.request.tokens

    @property
    def seeking(self) -> bool:
        """Whether it is between two attempts."""
        return self._failed is not None

    @property
    def waiting(self) -> bool:
        """Whether it waits for an instance to become ready: tell of each change by
        `on_instances`."""
        return self.timers.at("wait") is not None

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.request.ended and not self.seeking

    @property
    def pairing(self) -> Pairing:
        """The pair of the current attempt, or of the last."""
        return self.request.pairing

    @property
    def decode(self) -> Target:
        """The D it is with, or was last."""
        return self.request.decode

    @property
    def stage(self) -> str:
        """Where its time is being spent, for STAGE_DEADLINE."""
        return self.request.stage

    def next_timer(self) -> float | None:
        """When to call `on_time`."""
        times = [at for at in (self.timers.next(), self.request.timers.next()) if at is not None]
        return min(times, default=None)

    def timer_at(self, at: float) -> str:
        """What is due then, as an operator reads it."""
        both = (self.timers, self.request.timers)
        return next(name for name in _TIMERS if any(timers.at(name) == at for timers in both))

    def start(self, now: float) -> list[Action]:
        """Open both legs of the first attempt, unless it was ended before."""
        return [] if self.ended else self.after(self.request.start(now), now)

    def after(self, actions: list[AttemptAction], now: float) -> list[Action]:
        """What `request` wants done, with another attempt in place of a failure where there may be
        one."""
        if self.seeking:
            return []  # A late word of a leg that is over.
        if self.request.tokens >= _FEWEST_TOKENS:
            self._came_on()
        if self.request.tokens >= _REPAID_TOKENS:
            self._pay_back()
        if Finish() in actions:
            self._answered()
        if not actions or not isinstance(actions[-1], Fail):
            return list(actions)
        return [*actions[:-1], *self._fail(actions[-1].fault, now)]

    # --- between two attempts ---------------------------------------------------------------------

    def on_pairing(self, pairing: Pairing, now: float) -> list[Action]:
        """There is another pair to try."""
        fault = self._failed
        if fault is None:
            return []
        counts = self._recovery.counts
        if not self._recovery.budget.take():
            counts.refused[fault.reason] += 1
            return self._give_up(fault)
        self._stop_seeking()
        kind = self._kind
        counts.tried[kind][fault.reason] += 1
        self._borrowed = True
        self._tokens_before = self.tokens
        self.attempt += 1
        self.request = RoutedRequest(pairing, self._times, self.budget_ends)
        self._began_with = fault
        begin = Begin(self.attempt, kind, fault)
        return [begin, *self.after(self.request.start(now), now)]

    def on_nowhere(self, others_out_of_reach: bool, now: float) -> list[Action]:
        """There is nobody else now; whether instances other than the one to blame may come back."""
        fault, wait_s = self._failed, self._recovery.rules.wait_s
        if fault is None or self.waiting:
            return []
        again_s = _again_s(fault)
        if again_s is None and self.suspects.lost_before(self._blame):
            again_s = self._times.settle_s
        if again_s is not None and again_s < wait_s:
            self.timers.set("again", now + again_s)
        elif not others_out_of_reach or not wait_s:
            return self._give_up(fault)
        self.timers.set("wait", now + wait_s)
        return []

    def on_instances(self) -> list[Action]:
        """Which instances are ready has changed."""
        return [Seek(self._blame)] if self.waiting else []

    def on_whole(self, now: float) -> list[Action]:
        """The tokens that came are the whole answer."""
        if self._failed is None:
            return []
        self._stop_seeking()
        self._answered()
        return [Finish()]

    # --- from outside -----------------------------------------------------------------------------

    def on_client_gone(self, now: float) -> list[Action]:
        """The client cancelled or vanished: nothing is to be said."""
        self._pay_back()
        if self._failed is not None:
            self._stop_seeking()
            return []
        return list(self.request.on_client_gone(now))

    def on_fault(self, fault: Fault, now: float) -> list[Action]:
        """Something outside the legs ends it: an operator, or a defect of the router."""
        self._pay_back()
        if self._failed is not None:
            return self._give_up(fault)
        return list(self.request.on_fault(fault, now))

    def on_time(self, now: float) -> list[Action]:
        """Time has passed."""
        due = self.timers.pop_due(now)
        if self._failed is None:
            return self.after(self.request.on_time(now), now)
        if "budget" in due:
            return self._give_up(stage_deadline(self.stage))
        if "again" in due:
            self.suspects.clear()
            if "wait" in due:
                self.timers.set("wait", now)  # Once the Seek is answered.
            return [Seek(self._blame)]
        return self._give_up(self._failed) if "wait" in due else []

    # --- how it goes on ---------------------------------------------------------------------------

    @property
    def _kind(self) -> Kind:
        return Kind.CONTINUATION if self.tokens else Kind.RETRY

    def _fail(self, fault: Fault, now: float) -> list[Action]:
        rules = self._recovery.rules
        if self._patient(fault, now):
            self._pay_back()
        else:
            self._without_progress += 1
        self._borrowed = False
        blame = blamed(fault, self.request)
        allowed = rules.continuation if self._kind is Kind.CONTINUATION else rules.retry
        bounded = self._without_progress < rules.attempts and now < self.budget_ends
        if fault.reason is Reason.TOO_LARGE and self._began_with is not None:
            # Prompt and tokens that came together do not fit where the prompt did. That is no
            # mistake of the client's: what broke the attempt before is why it fails.
            return [Fail(self._began_with)]
        if blame == NOBODY or not (allowed and bounded):
            return [Fail(fault)]
        self.suspects.add(blame, fault, self.request)
        self._failed, self._blame = fault, blame
        self.timers.set("budget", self.budget_ends)
        return [Seek(blame)]

    def _patient(self, fault: Fault, now: float) -> bool:
        """Whether it was only told when to come again, and may be told so still."""
        if _again_s(fault) is None:
            return False
        if self._patient_until is None:
            self._patient_until = now + self._recovery.rules.wait_s
        return now < self._patient_until

    def _came_on(self) -> None:
        """The request is further than it was: whoever failed it before may have it again."""
        if not self._without_progress and self._patient_until is None:
            return
        self._without_progress, self._patient_until = 0, None
        self.suspects.clear()

    def _pay_back(self) -> None:
        """The attempt has helped, will never be known to, or counts for none."""
        if self._borrowed:
            self._recovery.budget.give_back()
        self._borrowed = False

    def _answered(self) -> None:
        self._came_on()
        self._pay_back()
        self._recovery.budget.answered()

    def _give_up(self, fault: Fault) -> list[Action]:
        self._stop_seeking()
        return [Fail(fault)]

    def _stop_seeking(self) -> None:
        self._failed = None
        for name in ("budget", "wait", "again"):
            self.timers.cancel(name)


def _again_s(fault: Fault) -> float | None:
    """When an instance that is not to be had now may be asked again, if it is known."""
    return fault.retry_after_s if fault.code is Code.UNAVAILABLE else None
