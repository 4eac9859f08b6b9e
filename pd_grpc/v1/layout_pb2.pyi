from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvGroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_GROUP_KIND_UNSPECIFIED: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_FULL: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_SLIDING: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_LATENT: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_STATE: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_DRAFT: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_INDEX: _ClassVar[KvGroupKind]

class PlaneKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANE_KIND_UNSPECIFIED: _ClassVar[PlaneKind]
    PLANE_KIND_K: _ClassVar[PlaneKind]
    PLANE_KIND_V: _ClassVar[PlaneKind]
    PLANE_KIND_LATENT: _ClassVar[PlaneKind]
    PLANE_KIND_SCALE: _ClassVar[PlaneKind]
    PLANE_KIND_STATE: _ClassVar[PlaneKind]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_INLINE: _ClassVar[Transport]
    TRANSPORT_SHM: _ClassVar[Transport]
    TRANSPORT_NIXL: _ClassVar[Transport]
KV_GROUP_KIND_UNSPECIFIED: KvGroupKind
KV_GROUP_KIND_FULL: KvGroupKind
KV_GROUP_KIND_SLIDING: KvGroupKind
KV_GROUP_KIND_LATENT: KvGroupKind
KV_GROUP_KIND_STATE: KvGroupKind
KV_GROUP_KIND_DRAFT: KvGroupKind
KV_GROUP_KIND_INDEX: KvGroupKind
PLANE_KIND_UNSPECIFIED: PlaneKind
PLANE_KIND_K: PlaneKind
PLANE_KIND_V: PlaneKind
PLANE_KIND_LATENT: PlaneKind
PLANE_KIND_SCALE: PlaneKind
PLANE_KIND_STATE: PlaneKind
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_INLINE: Transport
TRANSPORT_SHM: Transport
TRANSPORT_NIXL: Transport

class KvLayout(_message.Message):
    __slots__ = ("model", "positions", "block_size", "groups", "format")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    positions: str
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    format: str
    def __init__(self, model: _Optional[str] = ..., positions: _Optional[str] = ..., block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., format: _Optional[str] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("kind", "layers", "window", "planes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    kind: KvGroupKind
    layers: int
    window: int
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, kind: _Optional[_Union[KvGroupKind, str]] = ..., layers: _Optional[int] = ..., window: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("kind", "dtype", "heads", "head_dim")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    kind: PlaneKind
    dtype: str
    heads: int
    head_dim: int
    def __init__(self, kind: _Optional[_Union[PlaneKind, str]] = ..., dtype: _Optional[str] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("endpoint", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "dp_rank", "dp_size", "layer_start", "layer_count", "head_start", "head_count", "transport_metadata")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_RANK_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_METADATA_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    transport_metadata: bytes
    def __init__(self, endpoint: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., cp_rank: _Optional[int] = ..., cp_size: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ..., transport_metadata: _Optional[bytes] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("layer_start", "layer_count", "head_start", "head_count")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    def __init__(self, layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ...) -> None: ...

class MemoryDescriptor(_message.Message):
    __slots__ = ("kind", "device", "handle")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    kind: Transport
    device: int
    handle: bytes
    def __init__(self, kind: _Optional[_Union[Transport, str]] = ..., device: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...
