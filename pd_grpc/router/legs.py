"""The shell of one attempt: its two gRPC calls, and what they are charged to instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any, Protocol

import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.discovery import MISTAKEN_IDENTITY
from pd_grpc.router.intake import RoutableRequest
from pd_grpc.router.machine import (
    Action,
    AskTransfer,
    CancelDecode,
    CancelPrefill,
    OpenDecode,
    OpenPrefill,
    PrefillLeg,
    RoutedRequest,
    TransferVerdict,
)
from pd_grpc.router.policies import LeastLoad, Target
from pd_grpc.router.recovery import FIRST_ATTEMPT
from pd_grpc.router.routing import Routing
from pd_grpc.router.unread import Unread
from pd_grpc.v1 import admin_pb2, inference_pb2, prefill_pb2, types_pb2

STATUS_S = 0.2
"""How long a status may be behind the last message of a leg."""

LegAction = OpenPrefill | OpenDecode | CancelPrefill | CancelDecode | AskTransfer

_VERDICTS = {
    types_pb2.TRANSFER_STATE_DECODING: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_PREEMPTED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_FINISHED: TransferVerdict.OWNED,
    types_pb2.TRANSFER_STATE_READY: TransferVerdict.READY,
}


class Call(Protocol):
    """The client's call that an attempt is made for."""

    def took(self, actions: list[Action]) -> None:
        """The attempt's machine has taken an event and wants this done."""
        ...

    def came(self, message: inference_pb2.GenerateResponse) -> None:
        """D has sent tokens, its last word, or both; told before `took`."""
        ...

    def queued(self) -> None:
        """P has the request; told before `took`."""
        ...

    def handed_off(self, timings: types_pb2.Timings) -> None:
        """P has, and says where its time went; told before `took`."""
        ...

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine until the call is closed."""
        ...


class AttemptLegs:
    """Performs what one attempt's `machine` wants of its legs, and feeds it what they say.

    `generated` is the output the client has when the attempt begins. The legs to D are not read
    while too much is `unread`.
    """

    def __init__(
        self,
        call: Call,
        routing: Routing,
        request: RoutableRequest,
        generated: Sequence[int],
        key: TransferKey,
        machine: RoutedRequest,
        metadata: list[tuple[str, str]],
        unread: Unread,
    ) -> None:
        self.machine = machine
        self._call = call
        self._routing = routing
        self._request = request
        self._generated = list(generated)
        self._key = key
        self._metadata = metadata
        self._unread = unread
        self._prefill_call: Any = None
        self._decode_calls: dict[int, Any] = {}
        self._charges: dict[int | str, Callable[[], None]] = {}
        self._readers: list[asyncio.Task[None]] = []

    def perform(self, action: LegAction) -> None:
        """Open, cancel or ask. To cancel a leg that could not be opened is nothing."""
        match action:
            case OpenPrefill(target, decodes):
                self._open_prefill(target, decodes)
            case OpenDecode(leg, target):
                self._open_decode(leg, target)
            case CancelPrefill():
                if self._prefill_call is not None:
                    self._prefill_call.cancel()
                self._give_back("prefill")
            case CancelDecode(leg):
                if leg in self._decode_calls:
                    self._decode_calls[leg].cancel()
                self._give_back(leg)
            case AskTransfer(leg, target):
                self._call.spawn(self._ask(leg, target))

    async def statuses(self) -> None:
        """Wait a moment for the status of each leg, which is on its way when the answer has come: a
        leg that were cancelled just before it would count as one that failed."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=STATUS_S)

    def close(self) -> None:
        """Nothing is charged any more, whether or not the readers have ended."""
        for leg in list(self._charges):
            self._give_back(leg)

    # --- the calls --------------------------------------------------------------------------------

    def _open_prefill(self, target: Target, decodes: tuple[Target, ...]) -> None:
        request = self._request
        view = self._routing.discovery.at(target.endpoint)
        message = prefill_pb2.PrefillRequest(
            ref=self._key.ref(),
            request_id=request.request_id,
            token_ids=request.token_ids,
            generated_token_ids=self._generated,
            sampling=request.params,
            decodes=[prefill_pb2.DecodeTarget(name=d.name, endpoint=d.endpoint) for d in decodes],
            prefill_name=target.name,
            scope=request.scope,
        )
        self._prefill_call = view.prefill.Prefill(
            message, timeout=self._left(), metadata=self._metadata
        )
        tokens = len(request.token_ids) + len(self._generated)
        self._charge("prefill", self._routing.prefill_load, target, tokens)
        self._readers.append(self._call.spawn(self._read_prefill(self._prefill_call, target)))

    def _open_decode(self, leg: int, target: Target) -> None:
        request = self._request
        view = self._routing.discovery.at(target.endpoint)
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            token_ids=inference_pb2.TokenIds(ids=request.token_ids),
            sampling=request.params,
            generated_token_ids=self._generated,
            scope=request.scope,
        )
        prefill = self.machine.pairing.prefill
        if prefill is not None:
            message.handoff.ref.transfer_id = self._key.transfer_id
            message.handoff.ref.attempt = self._key.attempt
            message.handoff.ref.decode_epoch = view.epoch
            message.handoff.decode_name = target.name
            message.handoff.prefill_name = prefill.name
        elif self._key.attempt > FIRST_ATTEMPT or request.choice:
            # D knows it by its name alone. It may not have heard of the last attempt's end, and the
            # name is that of choice 0 too.
            message.request_id = str(self._key)
        call = view.inference.Generate(message, timeout=self._left(), metadata=self._metadata)
        self._decode_calls[leg] = call
        self._charge(leg, self._routing.decode_load, target, request.total_tokens)
        self._readers.append(self._call.spawn(self._read_decode(leg, call, target)))

    # --- what they say ----------------------------------------------------------------------------

    async def _read_prefill(
        self, call: AsyncIterable[prefill_pb2.PrefillResponse], target: Target
    ) -> None:
        try:
            async for message in call:
                self._on_prefill_message(message)
        except grpc.aio.AioRpcError as error:
            fault = rpc.read_error(error)
            if is_about(target, fault):
                self._suspect(target, fault)
            self._prefill_is_late()
            self._call.took(self.machine.on_prefill_failed(fault, self._now()))
        else:
            self._call.took(self.machine.on_prefill_ended(self._now()))
        finally:
            self._give_back("prefill")

    def _on_prefill_message(self, message: prefill_pb2.PrefillResponse) -> None:
        machine, now = self.machine, self._now()
        if self._prefill_is_late():
            return
        match message.WhichOneof("event"):
            case "queued":
                self._call.queued()
                self._call.took(machine.on_queued(now))
            case "placing":
                decode = message.placing.decode
                self._call.took(machine.on_placing(Target(decode.name, decode.endpoint), now))
            case "progress":
                self._call.took(machine.on_progress(now))
            case "handed_off":
                self._call.handed_off(message.handed_off.timings)
                self._call.took(machine.on_handed_off(now))

    def _prefill_is_late(self) -> bool:
        """Whether nothing that P says can change anything any more; counts that it spoke."""
        late = self.machine.ended or self.machine.prefill is not PrefillLeg.OPEN
        self._routing.in_flight.late_events += late
        return late

    async def _read_decode(
        self, leg: int, call: AsyncIterable[inference_pb2.GenerateResponse], target: Target
    ) -> None:
        machine = self.machine
        try:
            async for message in call:
                self._on_decode_message(leg, message, target)
                if not machine.ended:
                    await self._unread.room()
        except grpc.aio.AioRpcError as error:
            fault = rpc.read_error(error)
            self._suspect(target, fault)
            self._decode_is_late(leg)
            self._call.took(machine.on_decode_failed(leg, fault, self._now()))
        else:
            self._call.took(machine.on_decode_ended(leg, self._now()))
        finally:
            self._give_back(leg)

    def _on_decode_message(
        self, leg: int, message: inference_pb2.GenerateResponse, target: Target
    ) -> None:
        if self._decode_is_late(leg):
            return
        complete = message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        self._call.came(message)
        tokens = len(message.token_ids)
        self._call.took(self.machine.on_tokens(leg, tokens, complete, self._now()))

    def _decode_is_late(self, leg: int) -> bool:
        """Whether a leg was left behind by Placing, or all is over; counts that it spoke."""
        late = leg != self.machine.leg or self.machine.ended
        self._routing.in_flight.late_events += late
        return late

    async def _ask(self, leg: int, target: Target) -> None:
        admin = self._routing.discovery.at(target.endpoint).admin
        request = admin_pb2.GetTransferRequest(
            transfer_id=self._key.transfer_id, attempt=self._key.attempt
        )
        try:
            answer = await admin.GetTransfer(
                request, timeout=self._routing.config.settle_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            verdict = TransferVerdict.OTHER
        else:
            verdict = _VERDICTS.get(answer.transfer.state, TransferVerdict.OTHER)
        self._call.took(self.machine.on_verdict(leg, verdict, self._now()))

    def _suspect(self, target: Target, fault: Fault | TransportFault) -> None:
        if isinstance(fault, Fault) and fault.reason in MISTAKEN_IDENTITY:
            self._routing.discovery.suspect(target.endpoint)

    # --- load and time ----------------------------------------------------------------------------

    def _charge(self, leg: int | str, load: LeastLoad, target: Target, tokens: int) -> None:
        load.charge(target.endpoint, tokens)
        self._charges[leg] = lambda: load.discharge(target.endpoint, tokens)

    def _give_back(self, leg: int | str) -> None:
        if (discharge := self._charges.pop(leg, None)) is not None:
            discharge()

    def _left(self) -> float:
        return max(0.0, self.machine.budget_ends - self._now())

    def _now(self) -> float:
        return self._routing.clock.now()


def is_about(target: Target, fault: Fault | TransportFault) -> bool:
    """Whether a P that finds somebody mistaken finds it of itself, and not of a D."""
    if isinstance(fault, TransportFault):
        return False
    return fault.metadata.get("meant", target.name) == target.name
