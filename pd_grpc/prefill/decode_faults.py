"""What a call to D that failed means for the request."""

from __future__ import annotations

from dataclasses import replace

from pd_grpc.protocol.faults import (
    Code,
    Fault,
    Reason,
    Retry,
    TransportFault,
    read_status,
    transport_fault,
)
from pd_grpc.v1 import decode_pb2, types_pb2

_NOT_OURS = frozenset(
    {
        Reason.DUPLICATE_TRANSFER,
        Reason.DUPLICATE_REQUEST,
        Reason.NOT_OWNER,
        Reason.STALE_ATTEMPT,
        Reason.SUPERSEDED,
        Reason.RELEASED,
        Reason.STALE_EPOCH,
        Reason.WRONG_INSTANCE,
        Reason.CREDENTIALS,
        Reason.ROLE,
    }
)
"""Refusals of a D that knows the transfer as another's or as ended, or is not the D we mean."""


def is_ours_to_end(fault: Fault) -> bool:
    """Whether the D that refused us may have a client that waits for this transfer in vain."""
    return fault.reason not in _NOT_OURS


def as_fault(fault: Fault | TransportFault, endpoint: str, stage: str) -> Fault:
    """D's own fault as it is; the transport's in the words of the status table."""
    if isinstance(fault, Fault):
        return fault
    return transport_fault(fault, f"decode instance at {endpoint}", Reason.DECODE_LOST, stage)


def our_mistake(fault: Fault, what: str) -> Fault:
    """What D finds malformed in that of which the client has no part is P's mistake, and none of
    the client's request."""
    if fault.reason is not Reason.BAD_REQUEST:
        return fault
    return Fault(Reason.WRONG_STATE, f"the decode instance refused {what}: {fault.message}")


def another_may_do(fault: Fault | TransportFault) -> bool:
    """Whether it is worth asking another D."""
    if isinstance(fault, Fault):
        # What this D lacks another may have, though the same one never will.
        return fault.retry is Retry.OTHER or fault.reason is Reason.FEATURE
    return fault.peer_lost


def has_no_room(fault: Fault | TransportFault | None) -> bool:
    """Whether D is well and lacks blocks, or room in its queue."""
    return isinstance(fault, Fault) and fault.reason in (Reason.NO_BLOCKS, Reason.QUEUE_FULL)


def unavailable(fault: Fault | TransportFault) -> bool:
    """Whether D cannot be had by anybody now. What it says of P's own loss is about P."""
    if isinstance(fault, Fault):
        return fault.code is Code.UNAVAILABLE and fault.reason is not Reason.PREFILL_LOST
    return fault.peer_lost


def is_silence(fault: Fault | TransportFault | None) -> bool:
    """Whether a call ended at its deadline without a word of D's."""
    return isinstance(fault, TransportFault) and fault.code is Code.DEADLINE_EXCEEDED


def no_answer(endpoint: str, stage: str) -> Fault:
    """A D that is silent, for whoever else turns to it."""
    text = f"decode instance at {endpoint} gave no answer in stage '{stage}'"
    return Fault(Reason.DECODE_LOST, text)


def again_in(fault: Fault, left_s: float) -> Fault:
    """The fault of a D that cannot be had now, with when it may be asked again: in `left_s`, unless
    it says so itself or nobody knows (0)."""
    told = fault.retry_after_s is not None or not left_s
    return fault if told or not unavailable(fault) else replace(fault, retry_after_s=left_s)


def ended_fault(ended: decode_pb2.TransferEnded) -> Fault:
    """Why a transfer ended on D, as D told it, or as its end state tells it."""
    said = read_status(ended.status)
    if isinstance(said, Fault):
        return said
    return end_state_fault(ended.state)


def end_state_fault(state: types_pb2.TransferState) -> Fault:
    """A transfer that D has ended, of which nothing more is known."""
    name = _name(state)
    expired = state == types_pb2.TRANSFER_STATE_EXPIRED
    reason = Reason.LEASE_EXPIRED if expired else Reason.RELEASED
    text = f"the decode instance had ended the transfer: {name}"
    return Fault(reason, text, {"state": name}, heard=True)


def _name(state: types_pb2.TransferState) -> str:
    """A newer D may know states that have no name here."""
    if state not in types_pb2.TransferState.values():
        return f"state {int(state)}"
    return types_pb2.TransferState.Name(state).removeprefix("TRANSFER_STATE_")
