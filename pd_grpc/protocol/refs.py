"""Who speaks and which hand-over is meant: instances, epochs, transfer refs."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import types_pb2

_TRANSFER_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RANDOM_EPOCH_BITS = 20
MAX_NAME_CHARS = 128


class TransferKey(NamedTuple):
    """What P and D key a hand-over on."""

    transfer_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.transfer_id}#{self.attempt}"

    def ref(self, decode_epoch: int = 0) -> types_pb2.TransferRef:
        """As it goes on the wire, to or of the process of D with this epoch; 0 where none is
        known."""
        return types_pb2.TransferRef(
            transfer_id=self.transfer_id, attempt=self.attempt, decode_epoch=decode_epoch
        )


def key_of(ref: types_pb2.TransferRef) -> TransferKey:
    """The key of a ref."""
    return TransferKey(ref.transfer_id, ref.attempt)


def transfer_id_errors(transfer_id: str, field: str) -> list[FieldError]:
    """Whether a transfer id is malformed."""
    if _TRANSFER_ID.fullmatch(transfer_id):
        return []
    return [FieldError(field, "must be 1 to 128 characters of [A-Za-z0-9._:-]")]


def ref_errors(ref: types_pb2.TransferRef, prefix: str = "ref") -> list[FieldError]:
    """The fields of a ref that are malformed."""
    found = transfer_id_errors(ref.transfer_id, f"{prefix}.transfer_id")
    if ref.attempt < 1:
        found.append(FieldError(f"{prefix}.attempt", "must be at least 1"))
    return found


def name_errors(name: str, field: str, required: bool = False) -> list[FieldError]:
    """Whether a name of an instance or request is too long, or missing where it is required."""
    if len(name) > MAX_NAME_CHARS or (required and not name):
        least = 1 if required else 0
        return [FieldError(field, f"must have {least} to {MAX_NAME_CHARS} characters")]
    return []


def mint_epoch(clock: Clock) -> int:
    """A process's epoch: milliseconds since 1970 in the upper 44 bits, random in the lower 20."""
    millis = clock.wall_ns() // 1_000_000
    return (millis << _RANDOM_EPOCH_BITS) | secrets.randbits(_RANDOM_EPOCH_BITS)


def mint_id(prefix: str) -> str:
    """An id with 128 random bits, such as `t-1f...`."""
    return f"{prefix}-{secrets.token_hex(16)}"
