import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from pd_grpc.v1 import layout_pb2 as _layout_pb2
from pd_grpc.v1 import sampling_pb2 as _sampling_pb2
from pd_grpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat_ack", "load", "drain", "transfer_ended", "goodbye")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    heartbeat_ack: HeartbeatAck
    load: Load
    drain: Drain
    transfer_ended: TransferEnded
    goodbye: Goodbye
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., transfer_ended: _Optional[_Union[TransferEnded, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance", "decode_name", "features", "layouts", "transports", "shards", "hash_algorithm")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NAME_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    decode_name: str
    features: _containers.RepeatedScalarFieldContainer[str]
    layouts: _containers.RepeatedCompositeFieldContainer[_layout_pb2.KvLayout]
    transports: _containers.RepeatedScalarFieldContainer[_layout_pb2.Transport]
    shards: _containers.RepeatedCompositeFieldContainer[_layout_pb2.Shard]
    hash_algorithm: str
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., decode_name: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., layouts: _Optional[_Iterable[_Union[_layout_pb2.KvLayout, _Mapping]]] = ..., transports: _Optional[_Iterable[_Union[_layout_pb2.Transport, str]]] = ..., shards: _Optional[_Iterable[_Union[_layout_pb2.Shard, _Mapping]]] = ..., hash_algorithm: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("instance", "session_id", "features", "layout", "transport", "shards", "lease", "grace", "heartbeat", "grant_needs_client", "first_token_by_decode", "max_model_len", "kv_progress", "first_token", "attach", "tombstone", "kv_format")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRANT_NEEDS_CLIENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_BY_DECODE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    session_id: str
    features: _containers.RepeatedScalarFieldContainer[str]
    layout: _layout_pb2.KvLayout
    transport: _layout_pb2.Transport
    shards: _containers.RepeatedCompositeFieldContainer[_layout_pb2.Shard]
    lease: _duration_pb2.Duration
    grace: _duration_pb2.Duration
    heartbeat: _duration_pb2.Duration
    grant_needs_client: bool
    first_token_by_decode: bool
    max_model_len: int
    kv_progress: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    attach: _duration_pb2.Duration
    tombstone: _duration_pb2.Duration
    kv_format: str
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., session_id: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ..., transport: _Optional[_Union[_layout_pb2.Transport, str]] = ..., shards: _Optional[_Iterable[_Union[_layout_pb2.Shard, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grant_needs_client: bool = ..., first_token_by_decode: bool = ..., max_model_len: _Optional[int] = ..., kv_progress: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attach: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tombstone: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_format: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "grant_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GRANT_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    grant_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[int] = ..., grant_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("sequence", "unknown_grant_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_GRANT_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unknown_grant_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[int] = ..., unknown_grant_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("free_blocks", "total_blocks", "queued_tokens", "queued_requests", "decoding_requests", "decoding", "decoding_each")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    DECODING_EACH_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    total_blocks: int
    queued_tokens: int
    queued_requests: int
    decoding_requests: int
    decoding: _duration_pb2.Duration
    decoding_each: _duration_pb2.Duration
    def __init__(self, free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., queued_requests: _Optional[int] = ..., decoding_requests: _Optional[int] = ..., decoding: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decoding_each: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TransferEnded(_message.Message):
    __slots__ = ("ref", "status", "state")
    REF_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ref: _types_pb2.TransferRef
    status: _status_pb2.Status
    state: _types_pb2.TransferState
    def __init__(self, ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., state: _Optional[_Union[_types_pb2.TransferState, str]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class BlockHash(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    def __init__(self, hash: _Optional[bytes] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("session_id", "ref", "prompt_tokens", "max_new_tokens", "prompt_digest", "sampling", "block_hashes", "max_wait", "budget", "kv_needed", "scope", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    KV_NEEDED_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ref: _types_pb2.TransferRef
    prompt_tokens: int
    max_new_tokens: int
    prompt_digest: bytes
    sampling: _sampling_pb2.SamplingParams
    block_hashes: _containers.RepeatedCompositeFieldContainer[BlockHash]
    max_wait: _duration_pb2.Duration
    budget: _duration_pb2.Duration
    kv_needed: bool
    scope: _sampling_pb2.RequestScope
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., block_hashes: _Optional[_Iterable[_Union[BlockHash, _Mapping]]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., budget: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_needed: bool = ..., scope: _Optional[_Union[_sampling_pb2.RequestScope, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("grant_id", "wanted", "cached_tokens", "shards", "transport", "kv_format", "lease")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    grant_id: str
    wanted: _containers.RepeatedCompositeFieldContainer[_types_pb2.BlockRange]
    cached_tokens: int
    shards: _containers.RepeatedCompositeFieldContainer[_layout_pb2.Shard]
    transport: _layout_pb2.Transport
    kv_format: str
    lease: _duration_pb2.Duration
    def __init__(self, grant_id: _Optional[str] = ..., wanted: _Optional[_Iterable[_Union[_types_pb2.BlockRange, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_layout_pb2.Shard, _Mapping]]] = ..., transport: _Optional[_Union[_layout_pb2.Transport, str]] = ..., kv_format: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "finish_reason", "sibling")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SIBLING_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _types_pb2.PositionLogprobs
    finish_reason: _types_pb2.FinishReason
    sibling: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., sibling: _Optional[int] = ...) -> None: ...

class SendFirstTokenRequest(_message.Message):
    __slots__ = ("session_id", "ref", "grant_id", "tokens", "computed_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ref: _types_pb2.TransferRef
    grant_id: str
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    computed_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., grant_id: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class SendFirstTokenResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "ref", "cause", "writes_stopped")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WRITES_STOPPED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ref: _types_pb2.TransferRef
    cause: _status_pb2.Status
    writes_stopped: bool
    def __init__(self, session_id: _Optional[str] = ..., ref: _Optional[_Union[_types_pb2.TransferRef, _Mapping]] = ..., cause: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., writes_stopped: bool = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ...) -> None: ...
