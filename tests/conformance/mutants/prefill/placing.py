"""P21x to P22x: the way to another D gone wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill import asking, placement, sessions, validation
from pd_grpc.prefill.asking import objection
from pd_grpc.prefill.decode_faults import another_may_do, as_fault
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.prefill.states import PrefillRecord
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import (
    Code,
    Fault,
    Reason,
    TransportFault,
    not_meant,
    read_status,
)
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant
from tests.conformance.mutants.prefill.sessions import deaf_to


@mutant("P210")
def every_refusal_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        placement,
        "as_fault",
        lambda fault, endpoint, stage: Fault(Reason.DECODE_LOST, f"{endpoint}: {fault}"),
    )


@mutant("P211")
def refusals_lose_their_details(patch: pytest.MonkeyPatch) -> None:
    right = as_fault

    def wrong(fault, endpoint, stage):  # type: ignore[no-untyped-def]
        own = right(fault, endpoint, stage)
        return Fault(own.reason, own.message)

    patch.setattr(placement, "as_fault", wrong)


@mutant("P212")
def placing_is_told_afterwards(patch: pytest.MonkeyPatch) -> None:
    right = Requests.emit
    held: dict[Any, Any] = {}

    def wrong(self, record, response):  # type: ignore[no-untyped-def]
        if response.HasField("placing"):
            held[record.key] = response
            return
        if record.key in held and response.HasField("progress"):
            right(self, record, held.pop(record.key))
        right(self, record, response)

    patch.setattr(Requests, "emit", wrong)


@mutant("P213")
def only_a_lost_decode_leads_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        placement,
        "another_may_do",
        lambda fault: isinstance(fault, TransportFault) and fault.peer_lost,
    )


@mutant("P214")
def alternates_from_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PrefillRecord, "target", property(lambda self: self.request.decodes[-self.choice])
    )


@mutant("P215")
def every_refusal_leads_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement, "another_may_do", lambda fault: True)


@mutant("P216")
def every_status_of_the_transport_leads_on(patch: pytest.MonkeyPatch) -> None:
    right = another_may_do
    patch.setattr(
        placement,
        "another_may_do",
        lambda fault: isinstance(fault, TransportFault) or right(fault),
    )


@mutant("P217")
def unknown_reasons_are_final(patch: pytest.MonkeyPatch) -> None:
    def wrong(status):  # type: ignore[no-untyped-def]
        found = read_status(status)
        if isinstance(found, TransportFault) and status.details:
            return Fault(Reason.ENGINE_ERROR, f"an unknown reason: {found.message}")
        return found

    patch.setattr(rpc, "read_status", wrong)


@mutant("P220")
def a_decode_is_tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, why, now):  # type: ignore[no-untyped-def]
        self._timers.cancel("connect")
        self._back_off(now)
        return []

    patch.setattr(DecodeSession, "_failed_to_connect", wrong)


@mutant("P221")
def a_drain_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    deaf_to(patch, "drain")


@mutant("P222")
def a_refused_hello_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession.broken

    def wrong(self, link, fault, now):  # type: ignore[no-untyped-def]
        if isinstance(fault, Fault):
            fault = TransportFault(Code.UNAVAILABLE, fault.message)
        return right(self, link, fault, now)

    patch.setattr(DecodeSession, "broken", wrong)


@mutant("P223")
def a_refused_hello_loses_its_details(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession.broken

    def wrong(self, link, fault, now):  # type: ignore[no-untyped-def]
        if isinstance(fault, Fault):
            fault = Fault(fault.reason, fault.message)
        return right(self, link, fault, now)

    patch.setattr(DecodeSession, "broken", wrong)


@mutant("P224")
def any_process_of_d_will_do(patch: pytest.MonkeyPatch) -> None:
    right = objection

    def wrong(record, session):  # type: ignore[no-untyped-def]
        found = right(record, session)
        return None if found is not None and found.reason is Reason.STALE_EPOCH else found

    patch.setattr(placement, "objection", wrong)


@mutant("P227")
def who_is_there_is_said_of_p_alone(patch: pytest.MonkeyPatch) -> None:
    for module in (asking, sessions):
        patch.setattr(module, "not_meant", lambda reason, text, meant, here: Fault(reason, text))


@mutant("P227")
def ours_is_what_is_meant(patch: pytest.MonkeyPatch) -> None:
    def wrong(reason, text, meant, here):  # type: ignore[no-untyped-def]
        return not_meant(reason, text, here, meant)

    patch.setattr(validation, "not_meant", wrong)


@mutant("P225")
def one_window_for_all_decodes(patch: pytest.MonkeyPatch) -> None:
    right = PreparePool.__init__

    def wrong(self, limits, jitter):  # type: ignore[no-untyped-def]
        right(self, replace(limits, window=1, total=1), jitter)

    patch.setattr(PreparePool, "__init__", wrong)


@mutant("P226")
def blocks_are_taken_at_once(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._called

    def wrong(self, event, now):  # type: ignore[no-untyped-def]
        right(self, event, now)
        record = self.requests.of_call(event.call)
        blocks = -(-len(event.request.token_ids) // 16)
        if record is not None and blocks <= self.pool.free:
            self.pool.reserve(blocks, BlockState.COMPUTING, str(record.key))

    patch.setattr(PrefillMachine, "_called", wrong)
