"""What a transfer is on D, and the one table of how it moves."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from pd_grpc.v1 import types_pb2


class DecodeState(enum.Enum):
    """State of a transfer on D; the values are those of `TransferState` on the wire."""

    EXPECTED = types_pb2.TRANSFER_STATE_EXPECTED
    WAITING = types_pb2.TRANSFER_STATE_WAITING
    RESERVED = types_pb2.TRANSFER_STATE_RESERVED
    RECEIVING = types_pb2.TRANSFER_STATE_RECEIVING
    READY = types_pb2.TRANSFER_STATE_READY
    DECODING = types_pb2.TRANSFER_STATE_DECODING
    PREEMPTED = types_pb2.TRANSFER_STATE_PREEMPTED
    FINISHED = types_pb2.TRANSFER_STATE_FINISHED
    FAILED = types_pb2.TRANSFER_STATE_FAILED
    RELEASED = types_pb2.TRANSFER_STATE_RELEASED
    EXPIRED = types_pb2.TRANSFER_STATE_EXPIRED

    @property
    def wire(self) -> types_pb2.TransferState:
        """As it goes on the wire."""
        return self.value

    @property
    def terminal(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self in ENDS


S = DecodeState
ENDS = frozenset({S.FINISHED, S.FAILED, S.RELEASED, S.EXPIRED})

TRANSITIONS: Mapping[DecodeState, frozenset[DecodeState]] = {
    S.EXPECTED: frozenset({S.WAITING, S.RESERVED}) | ENDS,
    # Back to EXPECTED when the Allocate ends without a grant and the client still waits.
    S.WAITING: frozenset({S.EXPECTED, S.RESERVED}) | ENDS,
    S.RESERVED: frozenset({S.RECEIVING}) | ENDS,
    # Put aside before its first token: one that D prefills itself.
    S.RECEIVING: frozenset({S.READY, S.PREEMPTED}) | ENDS,
    S.READY: frozenset({S.DECODING}) | ENDS,
    S.DECODING: frozenset({S.PREEMPTED}) | ENDS,
    S.PREEMPTED: frozenset({S.DECODING}) | ENDS,
    S.FINISHED: frozenset(),
    S.FAILED: frozenset(),
    S.RELEASED: frozenset(),
    S.EXPIRED: frozenset(),
}

STAGES: Mapping[DecodeState, str] = {
    S.EXPECTED: "prefill",
    S.WAITING: "allocate",
    S.RESERVED: "transfer",
    S.RECEIVING: "transfer",
    S.READY: "first_token",
    S.DECODING: "decode",
    S.PREEMPTED: "decode",
}
"""What a request was doing when its time ended, as STAGE_DEADLINE names it."""
