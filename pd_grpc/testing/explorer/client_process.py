"""One client and the router's part of its request: the real routing machine with its two legs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.machine import (
    Action,
    AskTransfer,
    CancelDecode,
    CancelPrefill,
    Fail,
    Finish,
    OpenDecode,
    OpenPrefill,
    PrefillLeg,
    RoutedRequest,
    RoutingTimes,
    TransferVerdict,
)
from pd_grpc.router.policies import Pairing, Target
from pd_grpc.testing.explorer.kv import answer_to
from pd_grpc.testing.explorer.process import Input, Looks, Process, server_of
from pd_grpc.testing.explorer.wire import BROKEN, END, Interned, Message
from pd_grpc.v1 import admin_pb2, inference_pb2, prefill_pb2, sampling_pb2, types_pb2

_VERDICTS = {
    types_pb2.TRANSFER_STATE_DECODING: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_PREEMPTED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_FINISHED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_READY: TransferVerdict.READY,
}


@dataclass(frozen=True)
class Wish:
    """What a client wants, and where the router's policy sends it."""

    prompt: tuple[int, ...]
    max_tokens: int
    pairing: Pairing
    budget_s: float


class BothLegs(RoutedRequest):
    """A client that knows a P and a D, and waits until both of its calls have ended."""

    _why: Fault | None = None

    def on_prefill_failed(self, error: Fault | TransportFault, now: float) -> list[Action]:
        """Of no consequence for the other leg."""
        if self.ended or self.prefill is not PrefillLeg.OPEN:
            return []
        self.prefill = PrefillLeg.FAILED
        self._why = self._of_prefill(error)
        if self._answer_complete:
            return self._finish()
        return [] if self._decode_open else self._fail(self._why)

    def on_decode_failed(self, leg: int, error: Fault | TransportFault, now: float) -> list[Action]:
        """Of no consequence for the other leg."""
        if self.ended or leg != self.leg or self._answer_complete:
            return []
        self._decode_open = False
        self._why = self._of_decode(error)
        return [] if self.prefill is PrefillLeg.OPEN else self._fail(self._why)

    def on_handed_off(self, now: float) -> list[Action]:
        """P has done its part."""
        actions = super().on_handed_off(now)
        if self.ended or self._decode_open or self._why is None:
            return actions
        return [*actions, *self._fail(self._why)]


class ClientProcess(Process):
    """One request, from the choice of its instances to its answer."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        key: TransferKey,
        wish: Wish,
        epochs: dict[str, int],
        config: RouterConfig,
        direct: bool,
    ) -> None:
        """`epochs` are those of the Ds when the router last looked."""
        super().__init__(name, epoch, ids)
        self.key = key
        self.wish = wish
        self.right = answer_to(wish.prompt, wish.max_tokens)
        self.tokens: list[int] = []
        self.result: str = ""
        """How it ended for the client: `ok`, `left`, or why it failed; empty until then."""
        self.answers = 0
        self.prefill_call: int | None = None
        self.legs: dict[int, int] = {}
        self.asking: dict[int, tuple[int, float]] = {}
        self._epochs = epochs
        self._config = config
        times = RoutingTimes(config.grace_s, config.settle_s)
        kind = BothLegs if direct else RoutedRequest
        self.request: RoutedRequest = kind(wish.pairing, times, self.now + wish.budget_s)
        self.generated: list[int] = []
        """The output that the client had when the attempt began."""
        self.started = False

    # --- what others see -------------------------------------------------------------------------

    def looks(self) -> Looks:
        """See `Process.looks`."""
        steps = []
        wake = self._next_timer()
        if not self.started:
            steps.append("start")
        if wake is not None and wake <= self.now:
            steps.append("tick")
        asked = [at for _, at in self.asking.values()]
        if any(at <= self.now for at in asked):
            steps.append("expire")
        request = self.request
        calls = frozenset(
            [*self.legs.values(), *self.asking]
            + ([self.prefill_call] if self.prefill_call is not None else [])
        )
        facts = (
            self.key,
            self.result,
            request.prefill is PrefillLeg.OPEN,
            server_of(request.decode.endpoint),
            self._waits(),
            calls,
        )
        wake_s = self._wake_s(wake, *asked)
        return Looks(tuple(steps), wake_s, bool(self.result), facts)

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        if not self.result:
            return [f"{self.name}: the client has no answer"]
        return [f"{self.name}: calls are open"] * bool(self.legs or self.prefill_call is not None)

    # --- what happens ----------------------------------------------------------------------------

    def _happen(self, happens: Input) -> None:
        kind = happens[0]
        if kind == "start":
            self.started = True
            self._started()
        elif kind == "leave":
            self.started = True
            self._end_as("left")
            self._left_alone()
        elif kind == "tick":
            self._due()
        elif kind == "expire":
            for call, (leg, at) in list(self.asking.items()):
                if call in self.asking and at <= self.now:
                    del self.asking[call]
                    self._cancel(call)
                    self._took(self.request.on_verdict(leg, TransferVerdict.OTHER, self.now))
        elif happens[1] == self.prefill_call:
            self._prefill(self._ids.messages[happens[2]])
        elif happens[1] in self.asking:
            self._verdict(happens[1], self._ids.messages[happens[2]])
        else:
            for leg, call in list(self.legs.items()):
                if call == happens[1]:
                    self._decode(leg, self._ids.messages[happens[2]])

    def _started(self) -> None:
        # A budget begins when the request does.
        self.request.budget_ends = self.now + self.wish.budget_s
        self._perform(self.request.start(self.now))

    def _left_alone(self) -> None:
        self._perform(self.request.on_client_gone(self.now))

    def _due(self) -> None:
        self._perform(self.request.on_time(self.now))

    def _next_timer(self) -> float | None:
        return self.request.timers.next()

    def _took(self, actions: list[Action]) -> None:
        """The attempt's machine has heard something, and wants this done."""
        self._perform(actions)

    def _failed(self, target: Target, error: Any) -> None:
        """A leg has ended with a status, or with OK when it is None."""

    def _waits(self) -> bool:
        """Whether it knows that something is wrong, and gives it time."""
        return self.request.timers.at("settle") is not None or bool(self.asking)

    def _prefill(self, message: Message) -> None:
        request, now = self.request, self.now
        if message.kind in (END, BROKEN):
            self.prefill_call = None
            assert request.pairing.prefill is not None
            self._failed(request.pairing.prefill, message.body)
            if message.body is None:
                self._took(request.on_prefill_ended(now))
            else:
                self._took(request.on_prefill_failed(message.body, now))
            return
        match message.body.WhichOneof("event"):
            case "queued":
                self._took(request.on_queued(now))
            case "placing":
                decode = message.body.placing.decode
                self._took(request.on_placing(Target(decode.name, decode.endpoint), now))
            case "progress":
                self._took(request.on_progress(now))
            case "handed_off":
                self._took(request.on_handed_off(now))

    def _decode(self, leg: int, message: Message) -> None:
        request, now = self.request, self.now
        if message.kind in (END, BROKEN):
            del self.legs[leg]
            self._failed(request.decode, message.body)
            if message.body is None:
                self._took(request.on_decode_ended(leg, now))
            else:
                self._took(request.on_decode_failed(leg, message.body, now))
            return
        ids = list(message.body.token_ids)
        complete = bool(message.body.finish_reason)
        if leg == request.leg and not request.ended:
            self.tokens += ids
        self._took(request.on_tokens(leg, len(ids), complete, now))

    def _verdict(self, call: int, message: Message) -> None:
        leg, _ = self.asking.pop(call)
        verdict = TransferVerdict.OTHER
        if message.kind not in (END, BROKEN):
            state = message.body.transfer.state
            verdict = _VERDICTS.get(state, TransferVerdict.OTHER)
        self._took(self.request.on_verdict(leg, verdict, self.now))

    # --- what it does ----------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenPrefill(target, decodes):
                    named = [(d.name, d.endpoint) for d in decodes]
                    request = prefill_request(
                        self.key, self.wish.prompt, named, self.generated, self._sampling()
                    )
                    body = (request, self._left())
                    server = server_of(target.endpoint)
                    self.prefill_call = self._open(
                        "prefill", server, str(self.key), "prefill", body
                    )
                case OpenDecode(leg, target):
                    self._open_decode(leg, target)
                case CancelPrefill():
                    if self.prefill_call is not None:
                        self._cancel(self.prefill_call)
                        self.prefill_call = None
                case CancelDecode(leg):
                    if leg in self.legs:
                        self._cancel(self.legs.pop(leg))
                case AskTransfer(leg, target):
                    asked = admin_pb2.GetTransferRequest(
                        transfer_id=self.key.transfer_id, attempt=self.key.attempt
                    )
                    server, name = server_of(target.endpoint), f"{self.key}/{leg}"
                    call = self._open("verdict", server, name, "verdict", asked)
                    self.asking[call] = (leg, self.now + self._config.settle_s)
                case Finish():
                    self._end_as("ok")
                case Fail(fault):
                    self._end_as(fault.reason.name)

    def _open_decode(self, leg: int, target: Target) -> None:
        server = server_of(target.endpoint)
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=self.wish.prompt),
            generated_token_ids=self.generated,
            sampling=self._sampling(),
        )
        if self.wish.pairing.prefill is not None:
            request.handoff.ref.transfer_id = self.key.transfer_id
            request.handoff.ref.attempt = self.key.attempt
            request.handoff.ref.decode_epoch = self._epoch_of(target.endpoint)
            request.handoff.decode_name = target.name
        else:
            request.request_id = str(self.key)
        name = f"{self.key}/{leg}"
        body = (request, self._left())
        self.legs[leg] = self._open("generate", server, name, "generate", body)

    def _sampling(self) -> sampling_pb2.SamplingParams:
        return sampling_pb2.SamplingParams(max_tokens=self.wish.max_tokens, temperature=0)

    def _left(self) -> float:
        return round(max(0.0, self.request.budget_ends - self.now), 6)

    def _epoch_of(self, endpoint: str) -> int:
        return self._epochs[server_of(endpoint)]

    def _end_as(self, result: str) -> None:
        self.answers += 1
        self.result = self.result or result

    # --- what must hold --------------------------------------------------------------------------

    def _check(self) -> None:
        if self.tokens != self.right[: len(self.tokens)]:
            self._wrong("no wrong token", f"{self.tokens} instead of {self.right}")
        if self.result == "ok" and self.tokens != self.right:
            self._wrong("no wrong token", f"{self.tokens} is all of {self.right}")
        if self.answers > 1:
            self._wrong("every client is answered once", f"{self.answers} answers")


def prefill_request(
    key: TransferKey,
    prompt: tuple[int, ...],
    decodes: list[tuple[str, str]],
    generated: Sequence[int] = (),
    sampling: sampling_pb2.SamplingParams | None = None,
) -> prefill_pb2.PrefillRequest:
    """What a router asks of P; `decodes` are names and endpoints, `generated` what the client has
    already."""
    return prefill_pb2.PrefillRequest(
        ref=types_pb2.TransferRef(transfer_id=key.transfer_id, attempt=key.attempt),
        token_ids=prompt,
        generated_token_ids=generated,
        decodes=[prefill_pb2.DecodeTarget(name=n, endpoint=e) for n, e in decodes],
        sampling=sampling,
    )
