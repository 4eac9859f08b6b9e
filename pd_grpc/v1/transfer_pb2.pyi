from pd_grpc.v1 import layout_pb2 as _layout_pb2
from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferRequest(_message.Message):
    __slots__ = ("open", "chunk", "end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    open: TransferOpen
    chunk: KvChunk
    end: TransferEnd
    def __init__(self, open: _Optional[_Union[TransferOpen, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., end: _Optional[_Union[TransferEnd, _Mapping]] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("opened", "ack", "completed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    opened: TransferOpened
    ack: TransferAck
    completed: TransferCompleted
    def __init__(self, opened: _Optional[_Union[TransferOpened, _Mapping]] = ..., ack: _Optional[_Union[TransferAck, _Mapping]] = ..., completed: _Optional[_Union[TransferCompleted, _Mapping]] = ...) -> None: ...

class TransferOpen(_message.Message):
    __slots__ = ("session_id", "ref", "grant_id", "transport", "sender", "shard_index", "sends", "kv_format")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ref: _types_pb2.TransferRef
    grant_id: str
    transport: _layout_pb2.Transport
    sender: _layout_pb2.Shard
    shard_index: int
    sends: _layout_pb2.KvPart
    kv_format: str
    def __init__(self, session_id: _Optional[str] = ..., ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., grant_id: _Optional[str] = ..., transport: _Optional[_Union[_layout_pb2.Transport, str]] = ..., sender: _Optional[_Union[_layout_pb2.Shard, _Mapping]] = ..., shard_index: _Optional[int] = ..., sends: _Optional[_Union[_layout_pb2.KvPart, _Mapping]] = ..., kv_format: _Optional[str] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("group", "layer_start", "layer_count", "block_start", "block_count", "crc32c", "descriptor", "head_start", "head_count", "payload")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_start: int
    layer_count: int
    block_start: int
    block_count: int
    crc32c: int
    descriptor: _layout_pb2.MemoryDescriptor
    head_start: int
    head_count: int
    payload: bytes
    def __init__(self, group: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_start: _Optional[int] = ..., block_count: _Optional[int] = ..., crc32c: _Optional[int] = ..., descriptor: _Optional[_Union[_layout_pb2.MemoryDescriptor, _Mapping]] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class TransferEnd(_message.Message):
    __slots__ = ("chunks", "bytes")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class KvRange(_message.Message):
    __slots__ = ("group", "layer_start", "layer_count", "block_start", "block_count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_start: int
    layer_count: int
    block_start: int
    block_count: int
    def __init__(self, group: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_start: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class TransferOpened(_message.Message):
    __slots__ = ("verified", "window_bytes", "target", "audit")
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    verified: _containers.RepeatedCompositeFieldContainer[KvRange]
    window_bytes: int
    target: _layout_pb2.MemoryDescriptor
    audit: bool
    def __init__(self, verified: _Optional[_Iterable[_Union[KvRange, _Mapping]]] = ..., window_bytes: _Optional[int] = ..., target: _Optional[_Union[_layout_pb2.MemoryDescriptor, _Mapping]] = ..., audit: bool = ...) -> None: ...

class TransferAck(_message.Message):
    __slots__ = ("ranges", "accepted_bytes")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[KvRange]
    accepted_bytes: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[KvRange, _Mapping]]] = ..., accepted_bytes: _Optional[int] = ...) -> None: ...

class TransferCompleted(_message.Message):
    __slots__ = ("chunks", "bytes")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
