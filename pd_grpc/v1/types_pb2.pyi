import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class TransferState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_STATE_UNSPECIFIED: _ClassVar[TransferState]
    TRANSFER_STATE_EXPECTED: _ClassVar[TransferState]
    TRANSFER_STATE_WAITING: _ClassVar[TransferState]
    TRANSFER_STATE_RESERVED: _ClassVar[TransferState]
    TRANSFER_STATE_RECEIVING: _ClassVar[TransferState]
    TRANSFER_STATE_READY: _ClassVar[TransferState]
    TRANSFER_STATE_DECODING: _ClassVar[TransferState]
    TRANSFER_STATE_PREEMPTED: _ClassVar[TransferState]
    TRANSFER_STATE_FINISHED: _ClassVar[TransferState]
    TRANSFER_STATE_FAILED: _ClassVar[TransferState]
    TRANSFER_STATE_RELEASED: _ClassVar[TransferState]
    TRANSFER_STATE_EXPIRED: _ClassVar[TransferState]
    TRANSFER_STATE_QUEUED: _ClassVar[TransferState]
    TRANSFER_STATE_ALLOCATING: _ClassVar[TransferState]
    TRANSFER_STATE_PREPARED: _ClassVar[TransferState]
    TRANSFER_STATE_COMPUTING: _ClassVar[TransferState]
    TRANSFER_STATE_SENDING: _ClassVar[TransferState]
    TRANSFER_STATE_HANDED_OFF: _ClassVar[TransferState]
    TRANSFER_STATE_CANCELLED: _ClassVar[TransferState]
    TRANSFER_STATE_ROUTED: _ClassVar[TransferState]
    TRANSFER_STATE_STREAMING: _ClassVar[TransferState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ROUTER: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
TRANSFER_STATE_UNSPECIFIED: TransferState
TRANSFER_STATE_EXPECTED: TransferState
TRANSFER_STATE_WAITING: TransferState
TRANSFER_STATE_RESERVED: TransferState
TRANSFER_STATE_RECEIVING: TransferState
TRANSFER_STATE_READY: TransferState
TRANSFER_STATE_DECODING: TransferState
TRANSFER_STATE_PREEMPTED: TransferState
TRANSFER_STATE_FINISHED: TransferState
TRANSFER_STATE_FAILED: TransferState
TRANSFER_STATE_RELEASED: TransferState
TRANSFER_STATE_EXPIRED: TransferState
TRANSFER_STATE_QUEUED: TransferState
TRANSFER_STATE_ALLOCATING: TransferState
TRANSFER_STATE_PREPARED: TransferState
TRANSFER_STATE_COMPUTING: TransferState
TRANSFER_STATE_SENDING: TransferState
TRANSFER_STATE_HANDED_OFF: TransferState
TRANSFER_STATE_CANCELLED: TransferState
TRANSFER_STATE_ROUTED: TransferState
TRANSFER_STATE_STREAMING: TransferState

class Instance(_message.Message):
    __slots__ = ("name", "epoch", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    role: Role
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class TransferRef(_message.Message):
    __slots__ = ("transfer_id", "attempt", "decode_epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    decode_epoch: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decode_epoch: _Optional[int] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("route", "queue", "prepare", "allocate", "compute", "first_token", "exposed_send", "total")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SEND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    route: _duration_pb2.Duration
    queue: _duration_pb2.Duration
    prepare: _duration_pb2.Duration
    allocate: _duration_pb2.Duration
    compute: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    exposed_send: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, route: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prepare: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., allocate: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., compute: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., exposed_send: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...
