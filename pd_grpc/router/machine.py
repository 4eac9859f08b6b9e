"""One routed request with its two legs, without a socket or a clock: events in, actions out.

The prefill leg is `PrefillService.Prefill` on P, the decode leg `InferenceService.Generate` on D.
Tokens come from the decode leg alone. Before the hand-off a failure of either leg ends the request;
after it, only the decode leg counts. The rules:

* **Root cause.** The first leg to fail for a reason of its own decides what the client hears. A leg
  that fails as a consequence of something else (`CLIENT_GONE`, `RELEASED`, `SUPERSEDED`, a bare
  `CANCELLED`) waits `settle_s` for the other leg to name the cause. `CLIENT_GONE` of one leg, with
  the client here, means that the other instance is lost to us.
* **P lost.** Only D knows whether the hand-off had happened: its leg has `grace_s + settle_s` to
  fail or to go on, then it is asked. Before a token came there was most likely none: it is asked
  after `settle_s`.
* **P failed after the first token came.** D has heard P's cause through Release and says the same
  on its leg within `settle_s`, or is asked: a request that D owns goes on.
* **Placing.** P turns to another D before that D hears of the request, so the decode leg moves
  there first. A D that refuses or is lost before its first token, while P may still turn to another
  one, waits `settle_s` for P to do so.

This is one attempt, on one P and one of the Ds it was given. Where `Fail` is made `recovery` may
begin another one elsewhere, with the tokens seen so far.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from pd_grpc.protocol.faults import (
    Code,
    Fault,
    Reason,
    Retry,
    TransportFault,
    stage_deadline,
    transport_fault,
)
from pd_grpc.protocol.timers import Timers
from pd_grpc.router.policies import Pairing, Target

_CONSEQUENCES = frozenset({Reason.CLIENT_GONE, Reason.RELEASED, Reason.SUPERSEDED})

LEG, INSTANCE, STATUS = "leg", "instance", "transport_status"
"""Metadata of a fault of a leg: which leg, whose name, and the code where the status was bare, as
the transport makes it."""


class Leg(enum.Enum):
    """One of the two calls of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillLeg(enum.Enum):
    """What is known of the prefill leg."""

    NONE = "none"
    """Aggregated mode: there is none."""
    OPEN = "open"
    HANDED_OFF = "handed off"
    FAILED = "failed"


class TransferVerdict(enum.Enum):
    """What D says of a transfer whose P is silent."""

    OWNED = "owned"
    """Generating, preempted or finished: D needs P no longer."""
    READY = "ready"
    """All KV is verified; with the first token seen, D owns it."""
    OTHER = "other"
    """Not handed off, unknown, or no answer."""


@dataclass(frozen=True)
class OpenPrefill:
    """Call Prefill on `target` with `decodes` in order of preference."""

    target: Target
    decodes: tuple[Target, ...]


@dataclass(frozen=True)
class OpenDecode:
    """Call Generate on `target`; its events carry `leg`."""

    leg: int
    target: Target


@dataclass(frozen=True)
class CancelPrefill:
    """Cancel the prefill leg."""


@dataclass(frozen=True)
class CancelDecode:
    """Cancel one decode leg."""

    leg: int


@dataclass(frozen=True)
class AskTransfer:
    """Ask D, by `AdminService.GetTransfer`, how the transfer stands; report with `on_verdict`."""

    leg: int
    target: Target


@dataclass(frozen=True)
class Finish:
    """The answer is complete and every token has been forwarded: send the last message."""


@dataclass(frozen=True)
class Fail:
    """The request has failed; `fault` is what the client hears."""

    fault: Fault


Action = OpenPrefill | OpenDecode | CancelPrefill | CancelDecode | AskTransfer | Finish | Fail


@dataclass(frozen=True)
class RoutingTimes:
    """The waits of the rules above, in seconds; see `Timeouts` and `RouterConfig`."""

    grace_s: float
    settle_s: float


@dataclass
class RoutedRequest:
    """State of one request. Every `on_...` takes the time of the event and returns what to do.

    `stage` names where the request's time is being spent, for STAGE_DEADLINE. Once `ended`, every
    event is a no-op.
    """

    pairing: Pairing
    times: RoutingTimes
    budget_ends: float
    stage: str = "route"
    tokens: int = 0
    ended: bool = False
    prefill: PrefillLeg = PrefillLeg.NONE
    leg: int = 0
    timers: Timers[str] = field(default_factory=Timers)
    _decode: Target | None = None
    _alternates: list[Target] = field(default_factory=list)
    _decode_open: bool = False
    _answer_complete: bool = False
    _held: Fault | None = None
    _held_by: Leg | None = None

    @property
    def decode(self) -> Target:
        """The decode instance the request is with now."""
        return self._decode or self.pairing.decode

    def start(self, now: float) -> list[Action]:
        """Open both legs at once; D first, so that it usually expects P's Allocate."""
        self._decode = self.pairing.decode
        self._alternates = list(self.pairing.alternates)
        if now >= self.budget_ends:
            return self._fail(stage_deadline(self.stage))
        self._decode_open = True
        self.timers.set("budget", self.budget_ends)
        self.stage = "prepare" if self.pairing.prefill else "decode"
        actions: list[Action] = [OpenDecode(self.leg, self.pairing.decode)]
        if self.pairing.prefill is not None:
            self.prefill = PrefillLeg.OPEN
            decodes = (self.pairing.decode, *self.pairing.alternates)
            actions.append(OpenPrefill(self.pairing.prefill, decodes))
        return actions

    # --- the prefill leg --------------------------------------------------------------------------

    def on_queued(self, now: float) -> list[Action]:
        """P has the request and has not begun."""
        self._advance_to("queue")
        return []

    def on_progress(self, now: float) -> list[Action]:
        """P computes."""
        self._advance_to("compute")
        return []

    def on_placing(self, target: Target, now: float) -> list[Action]:
        """P will now ask another D: move the decode leg there first."""
        if self.ended or self.prefill is not PrefillLeg.OPEN:
            return []
        if target.endpoint == self.decode.endpoint and self._decode_open:
            return []
        known = next((d for d in self._alternates if d.endpoint == target.endpoint), None)
        if known is None or self.tokens:
            why = "after the first token" if self.tokens else "with a decode instance not offered"
            return self._fail(self._of_prefill(_out_of_order(f"prefill placed the request {why}")))
        self._alternates.remove(known)
        self._release_hold()
        old, old_open = self.leg, self._decode_open
        self.leg += 1
        self._decode = known
        self._decode_open = True
        actions: list[Action] = [OpenDecode(self.leg, known)]
        if old_open:
            actions.append(CancelDecode(old))
        return actions

    def on_handed_off(self, now: float) -> list[Action]:
        """D has the KV and the first token: P no longer matters."""
        if self.ended or self.prefill is not PrefillLeg.OPEN:
            return []
        self.prefill = PrefillLeg.HANDED_OFF
        self.stage = "decode"
        if self._held is not None and self._held_by is Leg.DECODE:
            return self._fail(self._held)
        return self._finish() if self._answer_complete else []

    def on_prefill_ended(self, now: float) -> list[Action]:
        """The prefill leg ended with OK."""
        if self.prefill is not PrefillLeg.OPEN:
            return []
        return self.on_prefill_failed(_out_of_order("prefill ended without handing over"), now)

    def on_prefill_failed(self, error: Fault | TransportFault, now: float) -> list[Action]:
        """The prefill leg ended with a status."""
        if self.ended or self.prefill is not PrefillLeg.OPEN:
            return []
        self.prefill = PrefillLeg.FAILED
        fault = self._of_prefill(error)
        if self._answer_complete:
            return self._finish()
        if self.tokens > 1:
            return []
        if self._held is not None:
            return self._fail(self._held if _is_consequence(error) else fault)
        if isinstance(error, TransportFault) and error.peer_lost:
            grace_s = self.times.grace_s if self.tokens else 0.0
            self._hold(fault, Leg.PREFILL, now + grace_s + self.times.settle_s)
            return []
        if _is_consequence(error) or self.tokens:
            self._hold(fault, Leg.PREFILL, now + self.times.settle_s)
            return []
        return self._fail(fault)

    # --- the decode leg ---------------------------------------------------------------------------

    def on_tokens(self, leg: int, count: int, complete: bool, now: float) -> list[Action]:
        """The decode leg brought `count` tokens, and with `complete` its last message."""
        if self.ended or leg != self.leg or self._answer_complete:
            return []
        self.tokens += count
        if self.tokens:
            handing_over = self.prefill is PrefillLeg.OPEN and self.tokens == 1
            self.stage = "transfer" if handing_over else "decode"
        if self.tokens > 1 and self._held_by is Leg.PREFILL:
            self._release_hold()  # only a D that owns the request has a second token
        if not complete:
            return []
        self._answer_complete = True
        self._decode_open = False
        if self.prefill is PrefillLeg.OPEN:
            self.timers.set("settle", now + self.times.settle_s)  # for P's part of the timings
            return []
        return self._finish()

    def on_decode_ended(self, leg: int, now: float) -> list[Action]:
        """The decode leg ended with OK."""
        if self._answer_complete:
            return []
        return self.on_decode_failed(leg, _out_of_order("decode ended without its answer"), now)

    def on_decode_failed(self, leg: int, error: Fault | TransportFault, now: float) -> list[Action]:
        """The decode leg ended with a status."""
        if self.ended or leg != self.leg or self._answer_complete:
            return []
        self._decode_open = False
        fault = self._of_decode(error)
        if self._held is not None:
            # Of two losses the first counts; of a consequence and a loss, the loss.
            first = not isinstance(error, Fault) and not _is_consequence(self._held)
            return self._fail(self._held if first or _is_consequence(error) else fault)
        if self.prefill is PrefillLeg.OPEN:
            may_move = bool(self._alternates) and not self.tokens and fault.retry is Retry.OTHER
            if may_move or _is_consequence(error):
                self._hold(fault, Leg.DECODE, now + self.times.settle_s)
                return []
        return self._fail(fault)

    def on_verdict(self, leg: int, verdict: TransferVerdict, now: float) -> list[Action]:
        """D's answer to AskTransfer."""
        if self.ended or leg != self.leg or self._held is None:
            return []
        owned = verdict is TransferVerdict.OWNED
        if owned or (verdict is TransferVerdict.READY and self.tokens):
            self._release_hold()
            self.stage = "decode"
            return []
        return self._fail(self._held)

    # --- everything else --------------------------------------------------------------------------

    def on_client_gone(self, now: float) -> list[Action]:
        """The client cancelled or vanished: nothing is to be said, both legs end."""
        if self.ended:
            return []
        return self._end()

    def on_fault(self, fault: Fault, now: float) -> list[Action]:
        """Something outside both legs ends it: an operator, or a defect of the router."""
        return [] if self.ended else self._fail(fault)

    def on_time(self, now: float) -> list[Action]:
        """Time has passed; see `timers.next()` for when to call."""
        actions: list[Action] = []
        for timer in self.timers.pop_due(now):
            if self.ended:
                break
            if timer == "budget" and not self._answer_complete:
                actions += self._fail(stage_deadline(self.stage))
            else:
                actions += self._settled()
        return actions

    def _settled(self) -> list[Action]:
        if self._answer_complete:
            return self._finish()
        if self._held is None:
            return []
        lost = self._held.reason is Reason.PREFILL_LOST
        if self._held_by is Leg.PREFILL and self._decode_open and (lost or self.tokens):
            return [AskTransfer(self.leg, self.decode)]
        return self._fail(self._held)

    def _hold(self, fault: Fault, by: Leg, until: float) -> None:
        gone = fault.reason is Reason.CLIENT_GONE
        self._held, self._held_by = (self._cut_off_from_other(by) if gone else fault), by
        self.timers.set("settle", until)

    def _cut_off_from_other(self, by: Leg) -> Fault:
        """A leg that can be heard passes on that its client has left: the other instance has found
        out before us that the connection to it is no more."""
        lost = TransportFault(Code.UNAVAILABLE, "the connection to it was lost")
        return self._of_prefill(lost) if by is Leg.DECODE else self._of_decode(lost)

    def _release_hold(self) -> None:
        self._held, self._held_by = None, None
        self.timers.cancel("settle")

    def _advance_to(self, stage: str) -> None:
        if not self.ended and self.prefill is PrefillLeg.OPEN and not self.tokens:
            self.stage = stage

    def _finish(self) -> list[Action]:
        return [*self._end(), Finish()]

    def _fail(self, fault: Fault) -> list[Action]:
        return [*self._end(), Fail(fault)]

    def _end(self) -> list[Action]:
        actions: list[Action] = []
        if self.prefill is PrefillLeg.OPEN:
            actions.append(CancelPrefill())
        if self._decode_open:
            actions.append(CancelDecode(self.leg))
        self.ended = True
        self._decode_open = False
        for name in ("budget", "settle"):
            self.timers.cancel(name)
        return actions

    def _of_prefill(self, error: Fault | TransportFault) -> Fault:
        name = self.pairing.prefill.name if self.pairing.prefill else ""
        return self._of_leg(error, Leg.PREFILL, name, Reason.PREFILL_LOST)

    def _of_decode(self, error: Fault | TransportFault) -> Fault:
        return self._of_leg(error, Leg.DECODE, self.decode.name, Reason.DECODE_LOST)

    def _of_leg(self, error: Fault | TransportFault, leg: Leg, name: str, lost: Reason) -> Fault:
        """A status of a leg as a fault of ours that names the leg and the instance."""
        told = {LEG: leg.value, INSTANCE: name}
        if isinstance(error, TransportFault):
            told[STATUS] = error.code.name
            error = transport_fault(error, f"{leg.value} instance {name}", lost, self.stage)
        return replace(error, metadata={**error.metadata, **told})


def _is_consequence(error: Fault | TransportFault) -> bool:
    if isinstance(error, Fault):
        return error.reason in _CONSEQUENCES
    return error.code is Code.CANCELLED


def _out_of_order(message: str) -> Fault:
    return Fault(Reason.WRONG_STATE, message)
