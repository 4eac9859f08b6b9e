"""Of all that hear of a failure one writes its line."""

from __future__ import annotations

import pytest
from opentelemetry.context import Context

from pd_grpc.protocol.failures import (
    NOTED_WHERE_IT_AROSE,
    ROUTER_METADATA,
    FailureLog,
    called_directly,
    noted_here,
)
from pd_grpc.protocol.faults import Fault, Reason, bad_request, read_status
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.telemetry.instance_log import InstanceLog

REASONS = sorted(Reason, key=lambda reason: reason.value)


def _heard(fault: Fault) -> Fault:
    """As it is on the other side of the wire."""
    read = read_status(fault.status())
    assert isinstance(read, Fault)
    return read


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.value)
def test_of_an_instance_and_the_router_that_hears_of_it_one_notes_a_fault(reason: Reason) -> None:
    arose = Fault(reason, "text")
    notes = [noted_here(arose, direct=False), noted_here(_heard(arose), direct=True)]
    assert notes.count(True) == (0 if reason is Reason.SUPERSEDED else 1)
    assert notes[0] == (reason in NOTED_WHERE_IT_AROSE)


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.value)
def test_what_the_client_called_notes_what_is_its_own(reason: Reason) -> None:
    assert noted_here(Fault(reason, "text"), direct=True) == (reason is not Reason.SUPERSEDED)


def test_a_fault_stays_heard_when_its_code_is_mapped_for_a_client() -> None:
    assert _heard(Fault(Reason.KV_CORRUPT, "text")).for_client().heard
    assert not Fault(Reason.KV_CORRUPT, "text").for_client().heard


def test_a_router_is_known_by_its_metadata() -> None:
    assert called_directly([("user-agent", "grpc"), ("traceparent", "00-...")])
    assert called_directly(None)
    assert not called_directly([("user-agent", "grpc"), (ROUTER_METADATA, "router-1")])


def test_a_line_names_a_malformed_field_and_not_its_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = [FieldError("token_ids.ids[3]", "29711 is outside the vocabulary")]
    with caplog.at_level("INFO", "pd_grpc"):
        FailureLog(InstanceLog("router", "r")).note(
            bad_request(wrong), direct=True, context=Context(), key=TransferKey("t-1", 2)
        )
    (record,) = caplog.records
    assert record.getMessage() == "malformed: token_ids.ids[]"
    about = {name: getattr(record, name) for name in ("transfer_id", "attempt", "code", "reason")}
    assert about == {
        "transfer_id": "t-1",
        "attempt": 2,
        "code": "INVALID_ARGUMENT",
        "reason": "BAD_REQUEST",
    }
