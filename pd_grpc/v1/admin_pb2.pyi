import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from pd_grpc.v1 import sampling_pb2 as _sampling_pb2
from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]

class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_UNSPECIFIED: _ClassVar[Health]
    HEALTH_SERVING: _ClassVar[Health]
    HEALTH_NOT_SERVING: _ClassVar[Health]
    HEALTH_DRAINING: _ClassVar[Health]
    HEALTH_UNREACHABLE: _ClassVar[Health]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_RESERVED: _ClassVar[BlockState]
    BLOCK_STATE_RECEIVING: _ClassVar[BlockState]
    BLOCK_STATE_DECODING: _ClassVar[BlockState]
    BLOCK_STATE_QUARANTINED: _ClassVar[BlockState]
    BLOCK_STATE_COMPUTING: _ClassVar[BlockState]
    BLOCK_STATE_SENDING: _ClassVar[BlockState]
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState
HEALTH_UNSPECIFIED: Health
HEALTH_SERVING: Health
HEALTH_NOT_SERVING: Health
HEALTH_DRAINING: Health
HEALTH_UNREACHABLE: Health
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_RESERVED: BlockState
BLOCK_STATE_RECEIVING: BlockState
BLOCK_STATE_DECODING: BlockState
BLOCK_STATE_QUARANTINED: BlockState
BLOCK_STATE_COMPUTING: BlockState
BLOCK_STATE_SENDING: BlockState

class GetServerInfoRequest(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: bool
    def __init__(self, peers: bool = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server", "peers")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    server: ServerInfo
    peers: _containers.RepeatedCompositeFieldContainer[ServerInfo]
    def __init__(self, server: _Optional[_Union[ServerInfo, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[ServerInfo, _Mapping]]] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("instance", "endpoint", "health", "health_reason", "version", "model", "uptime", "blocks", "transfers", "ended", "late_events", "settings", "prepare", "paused", "recovery")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LATE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    endpoint: str
    health: Health
    health_reason: str
    version: str
    model: str
    uptime: _duration_pb2.Duration
    blocks: _containers.RepeatedCompositeFieldContainer[BlockCount]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCount]
    ended: _containers.RepeatedCompositeFieldContainer[TransferCount]
    late_events: int
    settings: _containers.ScalarMap[str, str]
    prepare: _containers.RepeatedCompositeFieldContainer[PrepareLane]
    paused: bool
    recovery: Recovery
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., endpoint: _Optional[str] = ..., health: _Optional[_Union[Health, str]] = ..., health_reason: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockCount, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[TransferCount, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[TransferCount, _Mapping]]] = ..., late_events: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., prepare: _Optional[_Iterable[_Union[PrepareLane, _Mapping]]] = ..., paused: bool = ..., recovery: _Optional[_Union[Recovery, _Mapping]] = ...) -> None: ...

class Recovery(_message.Message):
    __slots__ = ("retries", "continuations", "refused", "budget_left")
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEFT_FIELD_NUMBER: _ClassVar[int]
    retries: int
    continuations: int
    refused: int
    budget_left: int
    def __init__(self, retries: _Optional[int] = ..., continuations: _Optional[int] = ..., refused: _Optional[int] = ..., budget_left: _Optional[int] = ...) -> None: ...

class PrepareLane(_message.Message):
    __slots__ = ("decode", "in_flight", "ready", "waiting", "backoff_left", "breaker", "breaker_left", "breaker_fault")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_LEFT_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    BREAKER_LEFT_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FAULT_FIELD_NUMBER: _ClassVar[int]
    decode: str
    in_flight: int
    ready: int
    waiting: int
    backoff_left: _duration_pb2.Duration
    breaker: BreakerState
    breaker_left: _duration_pb2.Duration
    breaker_fault: _status_pb2.Status
    def __init__(self, decode: _Optional[str] = ..., in_flight: _Optional[int] = ..., ready: _Optional[int] = ..., waiting: _Optional[int] = ..., backoff_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., breaker: _Optional[_Union[BreakerState, str]] = ..., breaker_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., breaker_fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class BlockCount(_message.Message):
    __slots__ = ("state", "blocks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    state: BlockState
    blocks: int
    def __init__(self, state: _Optional[_Union[BlockState, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class TransferCount(_message.Message):
    __slots__ = ("state", "transfers")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    transfers: int
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ..., transfers: _Optional[int] = ...) -> None: ...

class TransferInfo(_message.Message):
    __slots__ = ("ref", "request_id", "state", "age", "state_age", "holder", "blocks", "waits_for", "next_timer", "next_timer_in", "last_error", "peer", "prompt_tokens", "generated_tokens", "scope")
    REF_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    STATE_AGE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    NEXT_TIMER_FIELD_NUMBER: _ClassVar[int]
    NEXT_TIMER_IN_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    ref: _types_pb2.TransferRef
    request_id: str
    state: _types_pb2.TransferState
    age: _duration_pb2.Duration
    state_age: _duration_pb2.Duration
    holder: str
    blocks: int
    waits_for: str
    next_timer: str
    next_timer_in: _duration_pb2.Duration
    last_error: _status_pb2.Status
    peer: str
    prompt_tokens: int
    generated_tokens: int
    scope: _sampling_pb2.RequestScope
    def __init__(self, ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.TransferState, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., holder: _Optional[str] = ..., blocks: _Optional[int] = ..., waits_for: _Optional[str] = ..., next_timer: _Optional[str] = ..., next_timer_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., peer: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., scope: _Optional[_Union[_sampling_pb2.RequestScope, _Mapping]] = ...) -> None: ...

class ListTransfersRequest(_message.Message):
    __slots__ = ("states", "page_size", "page_token")
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[_types_pb2.TransferState]
    page_size: int
    page_token: str
    def __init__(self, states: _Optional[_Iterable[_Union[_types_pb2.TransferState, str]]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTransfersResponse(_message.Message):
    __slots__ = ("transfers", "next_page_token")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferInfo]
    next_page_token: str
    def __init__(self, transfers: _Optional[_Iterable[_Union[TransferInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class GetTransferResponse(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferInfo
    def __init__(self, transfer: _Optional[_Union[TransferInfo, _Mapping]] = ...) -> None: ...

class WatchTransfersRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class WatchTransfersResponse(_message.Message):
    __slots__ = ("transfer", "skipped")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferInfo
    skipped: int
    def __init__(self, transfer: _Optional[_Union[TransferInfo, _Mapping]] = ..., skipped: _Optional[int] = ...) -> None: ...

class ReleaseTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseTransferResponse(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferInfo
    def __init__(self, transfer: _Optional[_Union[TransferInfo, _Mapping]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("id", "peers")
    ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    peers: bool
    def __init__(self, id: _Optional[str] = ..., peers: bool = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("spans", "traces_kept")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TRACES_KEPT_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    traces_kept: int
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., traces_kept: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("trace_id", "span_id", "parent_id", "name", "instance", "role", "start", "duration", "outcome", "attributes", "events")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    instance: str
    role: str
    start: _timestamp_pb2.Timestamp
    duration: _duration_pb2.Duration
    outcome: str
    attributes: _containers.ScalarMap[str, str]
    events: _containers.RepeatedCompositeFieldContainer[SpanEvent]
    def __init__(self, trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_id: _Optional[str] = ..., name: _Optional[str] = ..., instance: _Optional[str] = ..., role: _Optional[str] = ..., start: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., outcome: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., events: _Optional[_Iterable[_Union[SpanEvent, _Mapping]]] = ...) -> None: ...

class SpanEvent(_message.Message):
    __slots__ = ("name", "after", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: _duration_pb2.Duration
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("transfers",)
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    transfers: int
    def __init__(self, transfers: _Optional[int] = ...) -> None: ...
