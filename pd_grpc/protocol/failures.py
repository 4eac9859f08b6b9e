"""Which instance writes the line of a failed request: one of all that hear of the failure does."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from opentelemetry.context import Context

from pd_grpc.protocol.faults import STATUS_TABLE, Code, Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.tracing import trace_id

ROUTER_METADATA = "pd-grpc-router"
"""With what a router calls P and D: its name, so that they leave to it what it hears as well."""

NOTED_WHERE_IT_AROSE = frozenset(
    {
        Reason.ENGINE_ERROR,
        Reason.ENGINE_STUCK,
        Reason.SENDER_STUCK,
        Reason.KV_CORRUPT,
        Reason.LEASE_EXPIRED,
        Reason.CLIENT_ABSENT,
    }
)
"""They arise in one place, and the others hear of them. All other reasons several instances may
find by themselves, each in its own words: that a peer is lost, that time is over, that a request
cannot be taken, that it has ended elsewhere. They are noted once by whom the client called."""

_OF_NO_INTEREST = frozenset({Reason.SUPERSEDED})
"""What took over has its own end."""

_CLIENTS_OWN = frozenset(
    {
        Code.CANCELLED,
        Code.INVALID_ARGUMENT,
        Code.ALREADY_EXISTS,
        Code.DEADLINE_EXCEEDED,
        Code.UNIMPLEMENTED,
        Code.ABORTED,
    }
)
"""Codes that a client sees for what is its own doing, its own time or an operator's will."""


_INDEX = re.compile(r"\[[^]]*\]")


def called_directly(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call with this metadata comes from no router of ours."""
    return all(key != ROUTER_METADATA for key, _ in metadata or ())


def noted_here(fault: Fault, direct: bool) -> bool:
    """Whether the line is this instance's to write; `direct` says that the client called it without
    a router of ours in between."""
    if fault.reason in _OF_NO_INTEREST:
        return False
    if fault.reason in NOTED_WHERE_IT_AROSE:
        return not fault.heard
    return direct


class FailureLog:
    """The failed requests of one instance."""

    def __init__(self, log: InstanceLog) -> None:
        self._log = log

    def note(
        self,
        fault: Fault,
        *,
        direct: bool,
        context: Context | None,
        key: TransferKey | None = None,
        request_id: str = "",
        peer: str = "",
    ) -> None:
        """A request ends here by `fault`: at debug where the line is another's to write. `context`
        is its trace's; `peer` the instance that told of the fault."""
        if noted_here(fault, direct):
            client = STATUS_TABLE[fault.reason].client
            level = logging.INFO if client in _CLIENTS_OWN else logging.WARNING
        else:
            level = logging.DEBUG
        transfer_id, attempt = (None, None) if key is None else key
        self._log.note(
            Event.REQUEST_FAILED,
            "%s",
            _told(fault),
            level=level,
            transfer_id=transfer_id,
            attempt=attempt,
            request_id=request_id,
            trace_id=trace_id(context),
            peer=peer,
            code=fault.code.name,
            reason=fault.reason.value,
        )


def _told(fault: Fault) -> str:
    """What a line may say of a fault: of a malformed request no value, which may be a token."""
    wrong = sorted({_INDEX.sub("[]", each.field) for each in fault.fields})
    return f"malformed: {', '.join(wrong)}" if wrong else fault.message
