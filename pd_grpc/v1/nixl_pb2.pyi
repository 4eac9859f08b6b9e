from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NixlShard(_message.Message):
    __slots__ = ("port", "secret", "pool_id", "pool_bytes")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    port: int
    secret: bytes
    pool_id: bytes
    pool_bytes: int
    def __init__(self, port: _Optional[int] = ..., secret: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class NixlAttach(_message.Message):
    __slots__ = ("secret", "instance")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    instance: _types_pb2.Instance
    def __init__(self, secret: _Optional[bytes] = ..., instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ...) -> None: ...

class NixlPool(_message.Message):
    __slots__ = ("pool_id", "pool_bytes", "agent", "base_address", "device")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    pool_bytes: int
    agent: bytes
    base_address: int
    device: int
    def __init__(self, pool_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., agent: _Optional[bytes] = ..., base_address: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class NixlState(_message.Message):
    __slots__ = ("pool_id", "attached")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    attached: bool
    def __init__(self, pool_id: _Optional[bytes] = ..., attached: bool = ...) -> None: ...

class NixlTarget(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[NixlRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[NixlRun, _Mapping]]] = ...) -> None: ...

class NixlRun(_message.Message):
    __slots__ = ("start", "blocks")
    START_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    start: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...
