from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShmShard(_message.Message):
    __slots__ = ("socket", "secret", "pool_id", "pool_bytes")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    socket: str
    secret: bytes
    pool_id: bytes
    pool_bytes: int
    def __init__(self, socket: _Optional[str] = ..., secret: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class ShmAttach(_message.Message):
    __slots__ = ("secret", "instance")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    instance: _types_pb2.Instance
    def __init__(self, secret: _Optional[bytes] = ..., instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ...) -> None: ...

class ShmPool(_message.Message):
    __slots__ = ("pool_id", "pool_bytes")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    pool_bytes: int
    def __init__(self, pool_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class ShmState(_message.Message):
    __slots__ = ("pool_id", "attached")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    attached: bool
    def __init__(self, pool_id: _Optional[bytes] = ..., attached: bool = ...) -> None: ...

class ShmTarget(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[ShmRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[ShmRun, _Mapping]]] = ...) -> None: ...

class ShmRun(_message.Message):
    __slots__ = ("start", "blocks")
    START_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    start: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...
