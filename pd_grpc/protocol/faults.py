"""The status table: every way the conversation fails, with its code, reason and consequence.

This is the one place that maps a fault to a gRPC status and a status back to a fault; both the
raising and the reading side use it. Classes are read from code and reason, never from text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.sampling import FieldError

M = TypeVar("M", bound=Message)

DOMAIN = "pd_grpc"

MAX_MESSAGE_BYTES = 1024
MAX_VALUE_BYTES = 512
"""A status travels in trailers, which gRPC refuses above some 8 KiB: a long text would lose it."""

# Where QuotaFailure has numbers only in its text.
_NEEDED, _FREE = "blocks_needed", "blocks_free"


class Code(enum.IntEnum):
    """gRPC status codes by their canonical numbers."""

    OK = code_pb2.OK
    CANCELLED = code_pb2.CANCELLED
    UNKNOWN = code_pb2.UNKNOWN
    INVALID_ARGUMENT = code_pb2.INVALID_ARGUMENT
    DEADLINE_EXCEEDED = code_pb2.DEADLINE_EXCEEDED
    NOT_FOUND = code_pb2.NOT_FOUND
    ALREADY_EXISTS = code_pb2.ALREADY_EXISTS
    PERMISSION_DENIED = code_pb2.PERMISSION_DENIED
    RESOURCE_EXHAUSTED = code_pb2.RESOURCE_EXHAUSTED
    FAILED_PRECONDITION = code_pb2.FAILED_PRECONDITION
    ABORTED = code_pb2.ABORTED
    OUT_OF_RANGE = code_pb2.OUT_OF_RANGE
    UNIMPLEMENTED = code_pb2.UNIMPLEMENTED
    INTERNAL = code_pb2.INTERNAL
    UNAVAILABLE = code_pb2.UNAVAILABLE
    DATA_LOSS = code_pb2.DATA_LOSS
    UNAUTHENTICATED = code_pb2.UNAUTHENTICATED


class Reason(enum.Enum):
    """`google.rpc.ErrorInfo.reason` of every fault of ours."""

    BAD_REQUEST = "BAD_REQUEST"
    TOO_LARGE = "TOO_LARGE"
    HANDOFF_MISMATCH = "HANDOFF_MISMATCH"
    NO_BLOCKS = "NO_BLOCKS"
    QUEUE_FULL = "QUEUE_FULL"
    DUPLICATE_TRANSFER = "DUPLICATE_TRANSFER"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    STALE_EPOCH = "STALE_EPOCH"
    WRONG_INSTANCE = "WRONG_INSTANCE"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    SUPERSEDED = "SUPERSEDED"
    RELEASED = "RELEASED"
    UNKNOWN_TRANSFER = "UNKNOWN_TRANSFER"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    NO_SESSION = "NO_SESSION"
    WRONG_STATE = "WRONG_STATE"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    FEATURE = "FEATURE"
    KV_CORRUPT = "KV_CORRUPT"
    DRAINING = "DRAINING"
    NO_INSTANCE = "NO_INSTANCE"
    PREFILL_LOST = "PREFILL_LOST"
    DECODE_LOST = "DECODE_LOST"
    ENGINE_STUCK = "ENGINE_STUCK"
    SENDER_STUCK = "SENDER_STUCK"
    ENGINE_ERROR = "ENGINE_ERROR"
    CLIENT_GONE = "CLIENT_GONE"
    CLIENT_ABSENT = "CLIENT_ABSENT"
    STAGE_DEADLINE = "STAGE_DEADLINE"
    CREDENTIALS = "CREDENTIALS"
    ROLE = "ROLE"
    NOT_OWNER = "NOT_OWNER"


class Retry(enum.Enum):
    """Whether another try can help, and where."""

    NEVER = "never"
    OTHER = "other"
    """On another instance, with a new attempt."""


@dataclass(frozen=True)
class Row:
    """One row of the status table: when it happens, the code between P, D and router, the code a
    client sees, and whether a retry helps."""

    when: str
    code: Code
    client: Code
    retry: Retry


def _row(when: str, code: Code, retry: Retry = Retry.NEVER, client: Code | None = None) -> Row:
    return Row(when, code, code if client is None else client, retry)


STATUS_TABLE: Mapping[Reason, Row] = {
    Reason.BAD_REQUEST: _row(
        "a field is malformed, empty or out of its bounds; the prompt is longer than the model",
        Code.INVALID_ARGUMENT,
    ),
    Reason.TOO_LARGE: _row("prompt plus max_tokens could never fit", Code.INVALID_ARGUMENT),
    Reason.HANDOFF_MISMATCH: _row(
        "the two legs of a hand-over mean different requests",
        Code.INVALID_ARGUMENT,
        client=Code.INTERNAL,
    ),
    Reason.NO_BLOCKS: _row("no blocks within max_wait", Code.RESOURCE_EXHAUSTED, Retry.OTHER),
    Reason.QUEUE_FULL: _row("as many wait already as may", Code.RESOURCE_EXHAUSTED, Retry.OTHER),
    Reason.DUPLICATE_TRANSFER: _row(
        "the same ref is in flight with another body, or has that leg already", Code.ALREADY_EXISTS
    ),
    Reason.DUPLICATE_REQUEST: _row("the request id is in flight", Code.ALREADY_EXISTS),
    Reason.STALE_EPOCH: _row(
        "the call means another process of the instance, or comes from a superseded one",
        Code.FAILED_PRECONDITION,
        Retry.OTHER,
        Code.UNAVAILABLE,
    ),
    Reason.WRONG_INSTANCE: _row(
        "another instance listens at the address",
        Code.FAILED_PRECONDITION,
        Retry.OTHER,
        Code.UNAVAILABLE,
    ),
    Reason.STALE_ATTEMPT: _row("a newer attempt is known", Code.ABORTED),
    Reason.SUPERSEDED: _row("a newer attempt, session or stream took over", Code.ABORTED),
    Reason.RELEASED: _row("the transfer has ended: given back, or by an operator", Code.ABORTED),
    Reason.UNKNOWN_TRANSFER: _row(
        "nobody knows the transfer or grant", Code.NOT_FOUND, Retry.OTHER, Code.UNAVAILABLE
    ),
    Reason.LEASE_EXPIRED: _row(
        "the lease ended, or a session was silent", Code.NOT_FOUND, Retry.OTHER, Code.UNAVAILABLE
    ),
    Reason.NO_SESSION: _row(
        "the session is unknown or superseded", Code.FAILED_PRECONDITION, client=Code.INTERNAL
    ),
    Reason.WRONG_STATE: _row(
        "the call is out of order", Code.FAILED_PRECONDITION, client=Code.INTERNAL
    ),
    Reason.LAYOUT_MISMATCH: _row(
        "model, layout, transport or ranks differ",
        Code.FAILED_PRECONDITION,
        Retry.OTHER,
        Code.UNAVAILABLE,
    ),
    Reason.FEATURE: _row("a field is used that is reserved or not negotiated", Code.UNIMPLEMENTED),
    Reason.KV_CORRUPT: _row(
        "a checksum of KV is wrong", Code.DATA_LOSS, Retry.OTHER, Code.UNAVAILABLE
    ),
    Reason.DRAINING: _row(
        "the instance takes nothing new, or leaves", Code.UNAVAILABLE, Retry.OTHER
    ),
    Reason.NO_INSTANCE: _row(
        "the router has no ready instance of a role", Code.UNAVAILABLE, Retry.OTHER
    ),
    Reason.PREFILL_LOST: _row("P was lost before the hand-off", Code.UNAVAILABLE, Retry.OTHER),
    Reason.DECODE_LOST: _row("D was lost before the end", Code.UNAVAILABLE, Retry.OTHER),
    Reason.ENGINE_STUCK: _row("the engine makes no progress", Code.UNAVAILABLE, Retry.OTHER),
    Reason.SENDER_STUCK: _row("the KV sender makes no progress", Code.UNAVAILABLE, Retry.OTHER),
    Reason.ENGINE_ERROR: _row("the engine raised", Code.INTERNAL),
    Reason.CLIENT_GONE: _row("the client left before the hand-off", Code.CANCELLED),
    Reason.CLIENT_ABSENT: _row(
        "no client came for a transfer that is ready", Code.DEADLINE_EXCEEDED
    ),
    Reason.STAGE_DEADLINE: _row(
        "a stage's time, or the request's, is over", Code.DEADLINE_EXCEEDED
    ),
    Reason.CREDENTIALS: _row("no or wrong credentials (reserved)", Code.UNAUTHENTICATED),
    Reason.ROLE: _row("the role may not call this (reserved)", Code.PERMISSION_DENIED),
    Reason.NOT_OWNER: _row("the transfer is another's", Code.PERMISSION_DENIED),
}

RETRY_AFTER_S = 0.25
"""What one that finds no room is told to wait: a step or a few, after which there may be some."""


@dataclass(frozen=True)
class Quota:
    """What a pool lacks for a request, in blocks."""

    needed: int
    free: int


@dataclass(eq=False)
class Fault(Exception):
    """A failure of the conversation, with everything its status carries.

    `code` is the table's unless the fault was mapped for a client. `metadata` goes into ErrorInfo,
    `fields` into BadRequest, `retry_after_s` into RetryInfo, `quota` into QuotaFailure. `heard` is
    one that somebody else told, and does not travel.
    """

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: Sequence[FieldError] = ()
    retry_after_s: float | None = None
    quota: Quota | None = None
    mapped_code: Code | None = None
    heard: bool = False

    def __post_init__(self) -> None:
        # It may quote a caller, and is remembered for long as what a transfer ended with.
        self.message = self.message[:MAX_MESSAGE_BYTES]

    @property
    def code(self) -> Code:
        """The gRPC code it travels with."""
        return STATUS_TABLE[self.reason].code if self.mapped_code is None else self.mapped_code

    @property
    def retry(self) -> Retry:
        """Whether another try can help."""
        return STATUS_TABLE[self.reason].retry

    def for_client(self) -> Fault:
        """The same fault with the code that the table lets a client see; a code that was mapped
        already stays."""
        return Fault(
            self.reason,
            self.message,
            self.metadata,
            self.fields,
            self.retry_after_s,
            self.quota,
            self.mapped_code or STATUS_TABLE[self.reason].client,
            self.heard,
        )

    def status(self) -> status_pb2.Status:
        """As a `google.rpc.Status` with its details."""
        metadata = {key: _cut(value, MAX_VALUE_BYTES) for key, value in self.metadata.items()}
        if self.quota is not None:
            metadata[_NEEDED], metadata[_FREE] = str(self.quota.needed), str(self.quota.free)
        info = error_details_pb2.ErrorInfo(
            domain=DOMAIN, reason=self.reason.value, metadata=metadata
        )
        message = _cut(self.message, MAX_MESSAGE_BYTES)
        status = status_pb2.Status(code=int(self.code), message=message)
        status.details.add().Pack(info)
        if self.fields:
            bad = error_details_pb2.BadRequest()
            for wrong in self.fields:
                bad.field_violations.add(field=wrong.field, description=wrong.description)
            status.details.add().Pack(bad)
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo(retry_delay=duration(self.retry_after_s))
            status.details.add().Pack(retry)
        if self.quota is not None:
            failure = error_details_pb2.QuotaFailure()
            failure.violations.add(
                subject="blocks",
                description=f"{self.quota.needed} blocks needed, {self.quota.free} free",
            )
            status.details.add().Pack(failure)
        return status

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason.value}: {self.message}"


_OF_WHO_IS_GONE = frozenset({Code.UNAVAILABLE, Code.CANCELLED})


@dataclass(eq=False)
class TransportFault(Exception):
    """A status that is not ours: no ErrorInfo of our domain. UNAVAILABLE means that the peer is
    lost, and so does the CANCELLED of a call that we have not cancelled; RESOURCE_EXHAUSTED means
    a message too large. No other is retried."""

    code: Code
    message: str

    @property
    def peer_lost(self) -> bool:
        """Whether the peer is gone, or stops: a server that does cancels what it has taken."""
        return self.code in _OF_WHO_IS_GONE

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def code_and_reason(fault: Fault | TransportFault | None) -> tuple[str, str] | None:
    """What spans and metrics tell of a fault: nothing of its words, which may be a client's."""
    if fault is None:
        return None
    reason = fault.reason.value if isinstance(fault, Fault) else fault.code.name
    return fault.code.name, reason


def read_status(status: status_pb2.Status) -> Fault | TransportFault:
    """The fault a status carries; a status without our ErrorInfo is the transport's.

    A reason this version does not know is read as the transport's too: its code still says what
    kind it is.
    """
    try:
        code = Code(status.code)
    except ValueError:
        code = Code.UNKNOWN
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN or info.reason not in Reason.__members__:
        return TransportFault(code, status.message)
    reason = Reason[info.reason]
    metadata = dict(info.metadata)
    bad = _detail(status, error_details_pb2.BadRequest)
    retry = _detail(status, error_details_pb2.RetryInfo)
    return Fault(
        reason,
        status.message,
        metadata,
        tuple(FieldError(v.field, v.description) for v in bad.field_violations) if bad else (),
        retry_after_s=max(0.0, seconds(retry.retry_delay)) if retry else None,
        quota=_take_quota(metadata),
        mapped_code=None if code is STATUS_TABLE[reason].code else code,
        heard=True,
    )


def transport_fault(error: TransportFault, who: str, lost: Reason, stage: str) -> Fault:
    """What a status that is not ours means for the request whose stage `stage` called `who`, an
    instance in a few words; `lost` is the reason for a connection that is gone."""
    if error.peer_lost:
        return Fault(lost, f"{who} was lost in stage '{stage}': {error.message}")
    if error.code is Code.DEADLINE_EXCEEDED:
        return stage_deadline(stage)
    if error.code is Code.RESOURCE_EXHAUSTED:
        # Without our ErrorInfo it is never about blocks.
        text = f"a message of stage '{stage}' is too large for {who}: {error.message}"
        return Fault(Reason.TOO_LARGE, text)
    if error.code is Code.UNIMPLEMENTED:
        text = f"another service answered stage '{stage}' where {who} was: {error.message}"
        return not_meant(Reason.WRONG_INSTANCE, text, who, "")
    text = f"{who} failed in stage '{stage}': {error}"
    return Fault(Reason.ENGINE_ERROR, text)


def _detail(status: status_pb2.Status, kind: type[M]) -> M | None:
    """The first detail of a kind; one that cannot be parsed is as good as none."""
    for detail in status.details:
        found = kind()
        try:
            if detail.Unpack(found):
                return found
        except DecodeError:
            continue
    return None


def _take_quota(metadata: dict[str, str]) -> Quota | None:
    """The quota that `Fault.status` put beside a fault's own metadata."""
    needed, free = metadata.get(_NEEDED, ""), metadata.get(_FREE, "")
    if not (needed.isdecimal() and free.isdecimal()):
        return None
    del metadata[_NEEDED], metadata[_FREE]
    return Quota(int(needed), int(free))


def _cut(text: str, size: int) -> str:
    """The first `size` bytes of a text, in whole characters."""
    return text.encode()[:size].decode(errors="ignore")


def bad_request(fields: Sequence[FieldError]) -> Fault:
    """INVALID_ARGUMENT naming every field that is wrong, and its limit."""
    text = "; ".join(f"{f.field}: {f.description}" for f in fields)
    return Fault(Reason.BAD_REQUEST, text, fields=tuple(fields))


def not_meant(reason: Reason, text: str, meant: object, here: object) -> Fault:
    """WRONG_INSTANCE or STALE_EPOCH: who is `meant` and who is `here`, by name or by epoch; the
    latter is empty where nobody knows."""
    told = {"meant": str(meant)[:MAX_VALUE_BYTES], "here": str(here)}
    return Fault(reason, text, told)


def stage_deadline(stage: str, budget: str = "") -> Fault:
    """The time of a stage is over, be it the stage's own or what the request had left."""
    text = f"time ran out in stage '{stage}'"
    return Fault(Reason.STAGE_DEADLINE, f"{text}{budget}", {"stage": stage})
