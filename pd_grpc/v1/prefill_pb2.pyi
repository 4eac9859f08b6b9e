from pd_grpc.v1 import sampling_pb2 as _sampling_pb2
from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeTarget(_message.Message):
    __slots__ = ("name", "endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("ref", "request_id", "token_ids", "generated_token_ids", "sampling", "decodes", "prefill_name", "scope")
    REF_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    ref: _types_pb2.TransferRef
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    decodes: _containers.RepeatedCompositeFieldContainer[DecodeTarget]
    prefill_name: str
    scope: _sampling_pb2.RequestScope
    def __init__(self, ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., decodes: _Optional[_Iterable[_Union[DecodeTarget, _Mapping]]] = ..., prefill_name: _Optional[str] = ..., scope: _Optional[_Union[_sampling_pb2.RequestScope, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("queued", "placing", "progress", "handed_off")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PLACING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    queued: Queued
    placing: Placing
    progress: Progress
    handed_off: HandedOff
    def __init__(self, queued: _Optional[_Union[Queued, _Mapping]] = ..., placing: _Optional[_Union[Placing, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("ahead",)
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ahead: int
    def __init__(self, ahead: _Optional[int] = ...) -> None: ...

class Placing(_message.Message):
    __slots__ = ("decode",)
    DECODE_FIELD_NUMBER: _ClassVar[int]
    decode: DecodeTarget
    def __init__(self, decode: _Optional[_Union[DecodeTarget, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("decode", "usage", "timings")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    decode: _types_pb2.Instance
    usage: _types_pb2.Usage
    timings: _types_pb2.Timings
    def __init__(self, decode: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ...) -> None: ...
