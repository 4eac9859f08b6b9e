"""What a call to D that failed means for the request."""

from __future__ import annotations

from pd_grpc.protocol.faults import (
    Code,
    Fault,
    Reason,
    Retry,
    TransportFault,
    read_status,
    stage_deadline,
)
from pd_grpc.v1 import decode_pb2, types_pb2


def as_fault(fault: Fault | TransportFault, endpoint: str, stage: str) -> Fault:
    """D's own fault as it is; the transport's in the words of the status table."""
    if isinstance(fault, Fault):
        return fault
    if fault.code is Code.DEADLINE_EXCEEDED:
        return stage_deadline(stage)
    if fault.code is Code.RESOURCE_EXHAUSTED:
        # Without our ErrorInfo it is never about blocks.
        text = f"a message of stage '{stage}' is too large for {endpoint}: {fault.message}"
        return Fault(Reason.TOO_LARGE, text)
    if fault.code is Code.UNIMPLEMENTED:
        return Fault(Reason.WRONG_INSTANCE, f"{endpoint} is no decode instance: {fault.message}")
    text = f"decode instance at {endpoint} was lost in stage '{stage}': {fault}"
    return Fault(Reason.DECODE_LOST, text)


def another_may_do(fault: Fault | TransportFault) -> bool:
    """Whether it is worth asking another D."""
    if isinstance(fault, Fault):
        return fault.retry is Retry.OTHER
    return fault.peer_lost


def ended_fault(ended: decode_pb2.TransferEnded) -> Fault:
    """Why a transfer ended on D, as D told it, or as its end state tells it."""
    said = read_status(ended.status)
    if isinstance(said, Fault):
        return said
    return end_state_fault(ended.state)


def end_state_fault(state: types_pb2.TransferState) -> Fault:
    """A transfer that D has ended, of which nothing more is known."""
    name = types_pb2.TransferState.Name(state).removeprefix("TRANSFER_STATE_")
    expired = state == types_pb2.TRANSFER_STATE_EXPIRED
    reason = Reason.LEASE_EXPIRED if expired else Reason.RELEASED
    return Fault(reason, f"the decode instance had ended the transfer: {name}", {"state": name})
