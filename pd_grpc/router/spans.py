"""What the router's spans say of a request."""

from __future__ import annotations

from opentelemetry.trace import Span

from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.machine import INSTANCE
from pd_grpc.router.recovery import Begin
from pd_grpc.telemetry import names


def name_transfer(key: TransferKey, *spans: Span) -> None:
    """They are of this transfer."""
    for span in spans:
        span.set_attributes(
            {names.ATTR_TRANSFER_ID: key.transfer_id, names.ATTR_ATTEMPT: key.attempt}
        )


def of_recovery(begin: Begin) -> dict[str, str | int]:
    """What the event of another attempt says."""
    return {
        names.ATTR_ATTEMPT: begin.attempt,
        names.ATTR_RECOVERY: begin.kind.value,
        names.ATTR_ERROR_TYPE: begin.fault.reason.value,
        names.ATTR_PEER: begin.fault.metadata.get(INSTANCE, ""),
    }
