"""The shell of one routed request: its two gRPC calls, its timer, and what waits for the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable
from typing import Any

import grpc.aio
from opentelemetry.context import Context

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey, mint_id
from pd_grpc.router.discovery import MISTAKEN_IDENTITY
from pd_grpc.router.intake import RoutableRequest
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
from pd_grpc.router.outbox import Outbox
from pd_grpc.router.policies import LeastLoad, Pairing, Target
from pd_grpc.router.routing import Routing
from pd_grpc.router.timing import AnswerTimes
from pd_grpc.telemetry.tracing import inject, trace_id
from pd_grpc.v1 import admin_pb2, inference_pb2, prefill_pb2, types_pb2

_log = logging.getLogger("pd_grpc.router.runtime")

_FIRST_ATTEMPT = 1

_VERDICTS = {
    types_pb2.TRANSFER_STATE_DECODING: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_PREEMPTED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_FINISHED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_READY: TransferVerdict.READY,
}


class RoutedCall:
    """Drives a `RoutedRequest`: performs its actions, feeds it what the legs and the clock say.

    Made, used and closed by the handler of one client call. `key` is the transfer it minted.
    """

    def __init__(
        self,
        routing: Routing,
        request: RoutableRequest,
        pairing: Pairing,
        times: AnswerTimes,
        budget_ends: float,
        context: Context,
    ) -> None:
        config = routing.config
        self.key = TransferKey(mint_id("t"), _FIRST_ATTEMPT)
        self._routing = routing
        self._request = request
        self._times = times
        self._metadata = inject(context)
        self._log_fields = {
            "transfer_id": self.key.transfer_id,
            "request_id": request.request_id,
            "trace_id": trace_id(context),
        }
        self._machine = RoutedRequest(
            pairing, RoutingTimes(config.grace_s, config.settle_s), budget_ends
        )
        self._outbox = Outbox(routing.tokenizer, request.sampling, request.generated)
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefill_call: Any = None
        self._decode_calls: dict[int, Any] = {}
        self._charges: dict[int | str, Callable[[], None]] = {}
        self._last: inference_pb2.GenerateResponse | None = None
        self._named = False
        self._fault: Fault | None = None
        self._state = types_pb2.TRANSFER_STATE_ROUTED
        self._since = times.accepted

    @property
    def state(self) -> types_pb2.TransferState:
        """ROUTED, STREAMING, or how it ended."""
        return self._state

    # --- for the handler --------------------------------------------------------------------------

    def start(self) -> None:
        """Open both legs."""
        self._routing.in_flight.add(self)
        self._perform(self._machine.start(self._now()))
        self._times.opened = self._now()

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """The next message for the client, with everything that is ready; None at the end.

        Fault when the request has failed; tokens that came before are given out first.
        """
        while not (self._outbox or self._machine.ended):
            self._wake.clear()
            await self._wake.wait()
        if not self._outbox:
            if self._fault is not None:
                raise self._fault
            if self._last is None:
                return None
        message = self._outbox.take()
        if not self._named:
            self._named, message.request_id = True, self._request.request_id
        if self._machine.ended and self._fault is None and not self._outbox:
            last, self._last = self._last, None
            if last is not None:
                self._complete(message, last)
        return message

    async def close(self) -> None:
        """End whatever is still open; returns when no task of the request is left."""
        self._perform(self._machine.on_client_gone(self._now()))
        if self._timer is not None:
            self._timer.cancel()
        for leg in list(self._charges):
            self._give_back(leg)
        if self._state in (types_pb2.TRANSFER_STATE_ROUTED, types_pb2.TRANSFER_STATE_STREAMING):
            self._state_is(types_pb2.TRANSFER_STATE_CANCELLED)
        self._routing.in_flight.remove(self)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for an operator --------------------------------------------------------------------------

    def info(self) -> admin_pb2.TransferInfo:
        """As AdminService shows it."""
        now, pairing = self._now(), self._machine.pairing
        names = [t.name for t in (pairing.prefill, self._machine.decode) if t is not None]
        info = admin_pb2.TransferInfo(
            ref=types_pb2.TransferRef(transfer_id=self.key.transfer_id, attempt=self.key.attempt),
            request_id=self._request.request_id,
            state=self._state,
            age=duration(now - self._times.accepted),
            state_age=duration(now - self._since),
            peer=" > ".join(names),
            prompt_tokens=len(self._request.token_ids),
            generated_tokens=len(self._request.generated) + self._machine.tokens,
        )
        if self._fault is not None:
            info.last_error.CopyFrom(self._fault.status())
        if not self._machine.ended:
            info.holder = "the client's stream"
            info.waits_for = f"stage '{self._machine.stage}'"
            if (at := self._machine.timers.next()) is not None:
                info.next_timer = "settle" if at < self._machine.budget_ends else "budget"
                info.next_timer_in.CopyFrom(duration(at - now))
        return info

    def fail(self, fault: Fault) -> None:
        """End it with a fault, unless it has ended."""
        self._perform(self._machine.on_fault(fault, self._now()))

    # --- actions ----------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenPrefill(target, decodes):
                    self._open_prefill(target, decodes)
                case OpenDecode(leg, target):
                    self._open_decode(leg, target)
                case CancelPrefill():
                    self._prefill_call.cancel()
                    self._give_back("prefill")
                case CancelDecode(leg):
                    self._decode_calls[leg].cancel()
                    self._give_back(leg)
                case AskTransfer(leg, target):
                    self._spawn(self._ask(leg, target))
                case Finish():
                    self._outbox.close()
                    self._state_is(types_pb2.TRANSFER_STATE_FINISHED)
                case Fail(fault):
                    self._fault = fault
                    released = fault.reason is Reason.RELEASED
                    failed = types_pb2.TRANSFER_STATE_FAILED
                    self._state_is(types_pb2.TRANSFER_STATE_RELEASED if released else failed)
        if actions:
            self._wake.set()
        self._set_timer()

    def _open_prefill(self, target: Target, decodes: tuple[Target, ...]) -> None:
        request = self._request
        view = self._routing.discovery.at(target.endpoint)
        message = prefill_pb2.PrefillRequest(
            ref=types_pb2.TransferRef(transfer_id=self.key.transfer_id, attempt=self.key.attempt),
            request_id=request.request_id,
            token_ids=request.token_ids,
            generated_token_ids=request.generated,
            sampling=request.params,
            decodes=[prefill_pb2.DecodeTarget(name=d.name, endpoint=d.endpoint) for d in decodes],
            prefill_name=target.name,
        )
        self._prefill_call = view.prefill.Prefill(
            message, timeout=self._left(), metadata=self._metadata
        )
        self._charge("prefill", self._routing.prefill_load, target, request.prompt_tokens)
        self._spawn(self._read_prefill(self._prefill_call, target))

    def _open_decode(self, leg: int, target: Target) -> None:
        request = self._request
        view = self._routing.discovery.at(target.endpoint)
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            token_ids=inference_pb2.TokenIds(ids=request.token_ids),
            sampling=request.params,
            generated_token_ids=request.generated,
        )
        prefill = self._machine.pairing.prefill
        if prefill is not None:
            message.handoff.ref.transfer_id = self.key.transfer_id
            message.handoff.ref.attempt = self.key.attempt
            message.handoff.ref.decode_epoch = view.epoch
            message.handoff.decode_name = target.name
            message.handoff.prefill_name = prefill.name
        call = view.inference.Generate(message, timeout=self._left(), metadata=self._metadata)
        self._decode_calls[leg] = call
        self._charge(leg, self._routing.decode_load, target, request.total_tokens)
        self._spawn(self._read_decode(leg, call, target))

    # --- events -----------------------------------------------------------------------------------

    async def _read_prefill(
        self, call: AsyncIterable[prefill_pb2.PrefillResponse], target: Target
    ) -> None:
        try:
            async for message in call:
                self._on_prefill_message(message)
        except grpc.aio.AioRpcError as error:
            fault = rpc.read_error(error)
            self._suspect(target, fault)
            self._prefill_is_late()
            self._perform(self._machine.on_prefill_failed(fault, self._now()))
        else:
            self._perform(self._machine.on_prefill_ended(self._now()))
        finally:
            self._give_back("prefill")

    def _on_prefill_message(self, message: prefill_pb2.PrefillResponse) -> None:
        machine, now = self._machine, self._now()
        if self._prefill_is_late():
            return
        match message.WhichOneof("event"):
            case "queued":
                self._perform(machine.on_queued(now))
            case "placing":
                decode = message.placing.decode
                self._perform(machine.on_placing(Target(decode.name, decode.endpoint), now))
            case "progress":
                self._perform(machine.on_progress(now))
            case "handed_off":
                self._times.prefill = message.handed_off.timings
                self._perform(machine.on_handed_off(now))

    def _prefill_is_late(self) -> bool:
        """Whether nothing that P says can change anything any more; counts that it spoke."""
        late = self._machine.ended or self._machine.prefill is not PrefillLeg.OPEN
        self._routing.in_flight.late_events += late
        return late

    async def _read_decode(
        self, leg: int, call: AsyncIterable[inference_pb2.GenerateResponse], target: Target
    ) -> None:
        machine = self._machine
        try:
            async for message in call:
                self._on_decode_message(leg, message, target)
        except grpc.aio.AioRpcError as error:
            fault = rpc.read_error(error)
            self._suspect(target, fault)
            self._decode_is_late(leg)
            self._perform(machine.on_decode_failed(leg, fault, self._now()))
        else:
            self._perform(machine.on_decode_ended(leg, self._now()))
        finally:
            self._give_back(leg)

    def _on_decode_message(
        self, leg: int, message: inference_pb2.GenerateResponse, target: Target
    ) -> None:
        if self._decode_is_late(leg):
            return
        now = self._now()
        complete = message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        if message.token_ids:
            if self._times.first_token_at is None:
                self._times.first_token_at = now
                self._state_is(types_pb2.TRANSFER_STATE_STREAMING)
            self._outbox.push(message)
            self._wake.set()
        if complete:
            self._last = message
        actions = self._machine.on_tokens(leg, len(message.token_ids), complete, now)
        self._perform(actions)

    def _decode_is_late(self, leg: int) -> bool:
        """Whether a leg was left behind by Placing, or all is over; counts that it spoke."""
        late = leg != self._machine.leg or self._machine.ended
        self._routing.in_flight.late_events += late
        return late

    async def _ask(self, leg: int, target: Target) -> None:
        admin = self._routing.discovery.at(target.endpoint).admin
        request = admin_pb2.GetTransferRequest(
            transfer_id=self.key.transfer_id, attempt=self.key.attempt
        )
        try:
            answer = await admin.GetTransfer(
                request, timeout=self._routing.config.settle_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            verdict = TransferVerdict.OTHER
        else:
            verdict = _VERDICTS.get(answer.transfer.state, TransferVerdict.OTHER)
        self._perform(self._machine.on_verdict(leg, verdict, self._now()))

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self._machine.on_time(self._now()))

    # --- bookkeeping ------------------------------------------------------------------------------

    def _complete(
        self, message: inference_pb2.GenerateResponse, last: inference_pb2.GenerateResponse
    ) -> None:
        pairing, decode = self._machine.pairing, self._machine.decode
        message.finish_reason = last.finish_reason
        message.usage.CopyFrom(last.usage)
        if pairing.prefill is None:
            self._times.prefill = last.timings
        message.timings.CopyFrom(self._times.timings(self._now()))
        message.prefill_instance = (pairing.prefill or decode).name
        message.decode_instance = last.decode_instance or decode.name

    def _state_is(self, state: types_pb2.TransferState) -> None:
        self._state, self._since = state, self._now()
        if not self._machine.ended:
            self._routing.in_flight.changed(self)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._machine.timers.next()) is not None:
            delay = max(0.0, at - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _charge(self, leg: int | str, load: LeastLoad, target: Target, tokens: int) -> None:
        load.charge(target.endpoint, tokens)
        self._charges[leg] = lambda: load.discharge(target.endpoint, tokens)

    def _give_back(self, leg: int | str) -> None:
        if (discharge := self._charges.pop(leg, None)) is not None:
            discharge()

    def _suspect(self, target: Target, fault: Fault | TransportFault) -> None:
        if isinstance(fault, Fault) and fault.reason in MISTAKEN_IDENTITY:
            self._routing.discovery.suspect(target.endpoint)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a leg's reader failed", exc_info=error, extra=self._log_fields)
        fault = Fault(Reason.ENGINE_ERROR, f"the router failed: {type(error).__name__}")
        self._perform(self._machine.on_fault(fault, self._now()))

    def _left(self) -> float:
        return max(0.0, self._machine.budget_ends - self._now())

    def _now(self) -> float:
        return self._routing.clock.now()
