"""The one home of configuration: every timeout, window and size, typed, with its unit in its name.

The classes are plain data; that of an engine is written in `engine_config` and found here. Reading
flags, `PD_*` environment variables and a TOML file into them is `pd_grpc.cli.settings`; each field
has the same name in all three.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from pd_grpc.protocol.config_section import Section
from pd_grpc.protocol.endpoints import MAX_PORT, check_endpoint
from pd_grpc.protocol.engine_config import EngineConfig as EngineConfig
from pd_grpc.protocol.engine_config import SimLayout as SimLayout

MIB = 1 << 20

SILENT_HEARTBEATS = 2
"""A session on which nothing was heard for this many heartbeats is broken, for either side."""


def _endpoint_or_empty(value: str) -> str:
    return check_endpoint(value) if value else value


def _one_or_many(value: object) -> object:
    """One alone may stand for a list of one, and an empty one for none."""
    return ((value,) if value else ()) if isinstance(value, str) else value


_TRANSPORTS = ("shm", "nixl", "inline")
"""Ours, to name them where one is asked for that is not there."""


def _module_name(value: str) -> str:
    if not value or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"must be a transport's name or a module's, not {value!r}")
    module = value if "." in value else f"pd_grpc.transport.{value}"
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        kind = "module" if "." in value else "transport"
        raise ValueError(
            f"must be among {', '.join(_TRANSPORTS)} and Python modules with a dot in their names:"
            f" there is no {kind} {value}"
        )
    return value


def _listen_or_empty(value: str) -> str:
    return check_endpoint(value, lowest_port=0) if value else value


def _shards(info: ValidationInfo) -> int:
    return int(info.data.get("tp", 1) * info.data.get("pp", 1))


TransportName = Annotated[str, AfterValidator(_module_name)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Endpoints = Annotated[tuple[Endpoint, ...], BeforeValidator(_one_or_many)]
TransportNames = Annotated[tuple[TransportName, ...], BeforeValidator(_one_or_many)]
EndpointOrEmpty = Annotated[str, AfterValidator(_endpoint_or_empty)]
ListenOrEmpty = Annotated[str, AfterValidator(_listen_or_empty)]


class Timeouts(Section):
    """How long each side waits, counted on the monotonic clock of the one that waits."""

    request_budget_s: float = Field(
        300.0, gt=0, description="budget of a request whose client gives no deadline"
    )
    hop_margin_s: float = Field(
        0.1, ge=0, description="how long before its budget ends each hop answers"
    )
    allocate_margin_s: float = Field(
        2.0, gt=0, description="deadline of an Allocate call beyond its max_wait"
    )
    heartbeat_s: float = Field(5.0, gt=0, description="time between two heartbeats of P")
    lease_s: float = Field(15.0, gt=0, description="life of a grant after it was last renewed")
    grace_s: float = Field(1.0, ge=0, description="life of a broken session's grants")
    reconnect_min_s: float = Field(0.05, gt=0, description="P's first reconnect back-off")
    reconnect_max_s: float = Field(0.25, gt=0, description="P's longest reconnect back-off")
    backoff_s: float = Field(
        0.25, gt=0, description="P asks a D without room no more for this long, if it names no time"
    )
    backoff_max_s: float = Field(
        5.0, gt=0, description="longest time named by a D without room that P keeps to"
    )
    backoff_jitter: float = Field(
        0.25, ge=0, le=1, description="part of each back-off added by chance, lest Ps ask together"
    )
    breaker_open_s: float = Field(
        0.25, gt=0, description="P turns from a D that is lost or silent for this long, then probes"
    )
    breaker_max_s: float = Field(
        2.0, gt=0, description="the longest that this gets; each probe that fails doubles it"
    )
    connect_s: float = Field(2.0, gt=0, description="how long opening a session may take")
    kv_progress_s: float = Field(
        10.0, gt=0, description="longest silence while KV chunks are unacknowledged"
    )
    first_token_s: float = Field(
        30.0, gt=0, description="wait for the first token once the KV is complete"
    )
    attach_s: float = Field(10.0, gt=0, description="READY without a client leg")
    no_progress_s: float = Field(
        120.0, gt=0, description="engine or sender silent with work waiting: readiness off"
    )
    tombstone_s: float = Field(60.0, gt=0, description="memory of a transfer that has ended")
    drain_s: float = Field(30.0, ge=0, description="how long a draining server finishes its work")
    call_s: float = Field(5.0, gt=0, description="deadline of SendFirstToken, Release and look-ups")
    session_idle_s: float = Field(
        300.0, gt=0, description="P closes a session without transfers after this long"
    )


class Sizes(Section):
    """Bounds of queues, messages and tables."""

    max_message_bytes: int = Field(
        16 * MIB, ge=MIB, description="largest control message (a prompt of a million tokens)"
    )
    # Of 512 KiB, 1 and 2 MiB (the legs of `pd-grpc bench kv` at 256 MiB, two busy cores): CPU of
    # sender and receiver together 1.7, 1.5 and 1.4 s a GiB; memory of the pair beyond its pools 45,
    # 50 and 88 MiB, of which 64 are allowed.
    chunk_bytes: int = Field(MIB, ge=4096, description="payload of a KV chunk, about")
    # 2, 4 and 8 MiB give the same rate over loopback; the largest serves longer links, and costs
    # no more memory, as all streams of a pair keep to one window together.
    send_window_bytes: int = Field(
        8 * MIB,
        ge=4096,
        description="KV bytes a shard lets a sender have unacknowledged, on a stream and, as P"
        " keeps to it, on all streams to that D together",
    )
    allocate_queue: int = Field(1024, ge=1, description="Allocates that may wait for blocks on D")
    client_legs: int = Field(
        16384, ge=1, description="clients whose prefill may still be under way, on D"
    )
    tombstones: int = Field(65536, ge=1, description="ended transfers remembered")
    prepare_window: int = Field(32, ge=1, description="Allocates in flight per D")
    prepare_total: int = Field(256, ge=1, description="Allocates in flight in total")
    prefill_queue: int = Field(1024, ge=1, description="requests that may wait on P for one D")
    prepare_ahead: int = Field(
        0, ge=0, description="grants not yet computed; 0 means twice P's batch"
    )


class TurnConfig(Section):
    """Which request is still served when its turn comes."""

    serving_quantile: float = Field(
        0.95,
        ge=0,
        le=1,
        description="part of the last requests for which a time was enough; one that has spent half"
        " of its own and has less left is refused when its turn comes. 0 refuses nobody",
    )


class TelemetryConfig(Section):
    """Where spans and logs go."""

    otlp: EndpointOrEmpty = Field(
        "", description="host:port of an OTLP collector over gRPC; empty is off"
    )
    prometheus: ListenOrEmpty = Field(
        "",
        description="host:port at which Prometheus is answered with metrics, port 0 takes a free"
        " one; empty is off. `pd-grpc up` counts on from it, a port for each server",
    )
    traces_kept: int = Field(
        256,
        ge=0,
        description="last traces kept in memory, for `pd-grpc trace`: some 10 KiB each, more for"
        " long prompts; 0 keeps none",
    )
    log_format: Literal["human", "json"] = Field("human", description="how log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line"
    )


class ServerConfig(Timeouts, Sizes, TelemetryConfig):
    """What every server has."""

    name: str = Field("", description="stable name of the instance; empty is role-port")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(0, ge=0, le=65535, description="control port; 0 takes a free one")
    advertise: EndpointOrEmpty = Field(
        "", description="host:port others reach it at; empty is what it bound"
    )


class TransportConfig(Section):
    """How KV goes from P to D."""

    transports: TransportNames = Field(
        ("shm", "inline"),
        description="ways for KV to move, best first: D takes the first of its own that P has too"
        " and that gets P there; inline is always there as the last. shm is for P and D on one"
        " host, nixl needs pd-grpc[nixl]. A name with a dot is a Python module",
    )


class PrefillConfig(ServerConfig, EngineConfig, TurnConfig, TransportConfig):
    """`pd-grpc serve prefill`."""


class DecodeConfig(ServerConfig, EngineConfig, TurnConfig, TransportConfig):
    """`pd-grpc serve decode`."""

    audit_every: int = Field(
        64,
        ge=0,
        description="one in so many transfers by which P writes into D's memory has its bytes"
        " checked there; 1 checks all, 0 none. inline checks every chunk",
    )

    @property
    def shares_pool(self) -> bool:
        """See `EngineConfig.shares_pool`: a P may be going to write to it, if it is only one."""
        return self.tp * self.pp == 1 and any(name != "inline" for name in self.transports)

    # On two cores with eight transfers coming in, 0 and 10: the p99 of the time between two tokens
    # 2.8 and 2.4 times that of a D that only decodes: docs/kv.md. At 19 an engine that takes all
    # cores would leave KV next to nothing.
    bulk_nice: int = Field(
        10,
        ge=0,
        le=19,
        description="how much nicer the thread that takes KV in is than its process, so that where"
        " cores are scarce the engine and small calls come first; Linux",
    )
    bulk_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the TransferService shard; of several that of the first, and others"
        " count on from it; 0 takes free ones",
    )
    bulk_advertise: Endpoints = Field(
        (), description="host:port of each shard as P reaches it; empty is what they bound"
    )

    @field_validator("bulk_port")
    @classmethod
    def _ports_for_all(cls, value: int, info: ValidationInfo) -> int:
        more = _shards(info) - 1
        if value and value + more > MAX_PORT:
            raise ValueError(f"counts on to {value + more}, and {MAX_PORT} is the last")
        port = info.data.get("port", 0)
        if value and value <= port <= value + more:
            ports = f"{value} to {value + more}" if more else f"{value}"
            raise ValueError(f"takes {ports}, and {port} is the control port (port)")
        return value

    @field_validator("bulk_advertise")
    @classmethod
    def _one_for_each(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        shards = _shards(info)
        if value and len(value) != shards:
            raise ValueError(f"must name each of {shards} shards, not {len(value)}")
        return value


class RouterConfig(ServerConfig):
    """`pd-grpc serve router`."""

    prefill: Endpoints = Field((), description="control endpoints of prefill instances")
    decode: Endpoints = Field((), description="control endpoints of decode instances")
    aggregated: bool = Field(
        False, description="send requests to decode instances alone, which prefill themselves"
    )
    engine: Literal["torch", "sim"] = Field("torch", description="whose tokenizer to use")
    model: str = Field("smollm2", description="whose tokenizer to use; as for the engines")
    sim_vocab: int = Field(32000, ge=300, description="sim: size of the vocabulary")
    default_max_tokens: int = Field(
        256, ge=1, description="max_tokens of a request that names none; shrinks to fit the model"
    )
    settle_s: float = Field(
        0.5, ge=0, description="how long one leg's news waits for the other leg's own word"
    )
    watch_backoff_max_s: float = Field(
        5.0, gt=0, description="longest wait before an instance that answers wrongly is asked again"
    )
    retry: bool = Field(
        True, description="try a request that has no token yet elsewhere when an instance fails it"
    )
    continuation: bool = Field(
        True, description="go on elsewhere with an answer whose decode or prefill instance fails"
    )
    retry_attempts: int = Field(
        4, ge=1, description="attempts of a request that may fail in a row without bringing it on"
    )
    retry_burst: int = Field(
        1000, ge=0, description="retry budget: tries elsewhere that it holds when it is full"
    )
    retry_share: float = Field(
        0.1, ge=0, description="retry budget: tries elsewhere that each answered request adds"
    )
    unread_tokens: int = Field(
        16384,
        ge=1,
        description="tokens of all answers to a request that wait for a client that does not read,"
        " each log-probability as one more, before no more is read from D",
    )
    retry_wait_s: float = Field(
        1.0, ge=0, description="how long a request waits for others of a role that are out of reach"
    )
