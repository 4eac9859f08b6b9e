"""gRPC as this project uses it: channels, servers, deadlines, and faults as statuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.protocol.endpoints import PortInUse, address, check_can_listen
from pd_grpc.protocol.faults import Code, Fault, TransportFault, read_status, stage_deadline

_NO_DEADLINE_S = 1e9
"""grpc reports about 9e18 s for a call without a deadline."""

_MAX_METADATA_BYTES = 16 << 10
"""Of a call. gRPC refuses some calls above 8 KiB and all above 16, by chance in between; a caller's
baggage alone may have 8 by its standard."""

_LEAST_PING_MS = 100
_LEAST_PATIENCE_MS = 300
"""However short a heartbeat is: a peer that is busy for a moment is no lost one."""

STATUS_READ_S = 1.0
"""How long a peer may take to read the status that ends its call."""

STATUS_METADATA = "grpc-status-details-bin"
"""Where a status travels beside its code, as gRPC has it in every language."""


def channel_options(timeouts: Timeouts, sizes: Sizes) -> list[tuple[str, Any]]:
    """Options of every channel: quick reconnects, bounded messages, keepalive that finds a frozen
    peer (`ping_timeout_ms` beside `keepalive_timeout_ms`), no compression."""
    return [
        ("grpc.initial_reconnect_backoff_ms", int(timeouts.reconnect_min_s * 1000)),
        # By its name a back-off, in effect how long one attempt to connect may take: a peer that
        # is busy for a moment is no lost one.
        ("grpc.min_reconnect_backoff_ms", int(timeouts.connect_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(timeouts.reconnect_max_s * 1000)),
        ("grpc.max_receive_message_length", sizes.max_message_bytes),
        ("grpc.max_send_message_length", sizes.max_message_bytes),
        *_keepalive(timeouts),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Options of every server: a port in use is an error, keepalive pings of our channels pass, and
    a caller that has frozen or been cut off is found as a frozen server is, with its calls."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        *_keepalive(config),
    ]


def _keepalive(timeouts: Timeouts) -> list[tuple[str, Any]]:
    """Find a silent peer within two heartbeats, from either end of a connection.

    grpc looks each keepalive_time whether anything has come since it looked last, and pings if not:
    up to twice that time passes before the ping, and the patience after it. A client pings no more
    often than once a second, so that a heartbeat below 0.8 s is not kept to.
    """
    ping_ms = max(_LEAST_PING_MS, int(timeouts.heartbeat_s * 1000 / 2))
    patience_ms = max(_LEAST_PATIENCE_MS, int(timeouts.heartbeat_s * 1000 * 3 / 4))
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        # keepalive_timeout_ms alone finds a frozen peer only after a minute.
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def aio_channel(endpoint: str, timeouts: Timeouts, sizes: Sizes, **kwargs: Any) -> grpc.aio.Channel:
    """A channel for the loop that calls this, with a connection of its own."""
    return grpc.aio.insecure_channel(endpoint, options=channel_options(timeouts, sizes), **kwargs)


def sync_channel(endpoint: str, timeouts: Timeouts, sizes: Sizes) -> grpc.Channel:
    """A channel whose calls are futures, for work that must not hold a coroutine per call."""
    return grpc.insecure_channel(endpoint, options=channel_options(timeouts, sizes))


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind and return the port. PortInUse when that cannot be; grpc, whose words are for those who
    debug it, is asked only for what a plain socket can bind."""
    check_can_listen(host, port)
    wanted = address(host, port)
    try:
        bound = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise PortInUse(f"cannot listen on {wanted}: {error}") from error
    if bound == 0:
        raise PortInUse(f"cannot listen on {wanted}")
    return int(bound)


def time_left(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline, at the start of its call; None when it has none.

    grpc sends what is left rounded up, to 10 ms below 10 s, to 100 ms below 100 s, to 1 s below
    1,000 s and so on; that much is taken off, so that the caller's own timer is never the first.
    """
    left = context.time_remaining()
    if left is None or left > _NO_DEADLINE_S:
        return None
    return max(0.0, float(left) - _sent_in_steps_of(left))


def _sent_in_steps_of(seconds: float) -> float:
    step = 0.001
    while seconds >= 1000 * step:
        step *= 10
    return step


def budget_of(context: grpc.aio.ServicerContext[Any, Any], timeouts: Timeouts) -> float:
    """The budget of a request: the caller's deadline less the hop margin, or the default."""
    left = time_left(context)
    if left is None:
        return timeouts.request_budget_s
    return max(0.0, left - timeouts.hop_margin_s)


async def abort(context: grpc.aio.ServicerContext[Any, Any], fault: Fault) -> NoReturn:
    """End the call with the fault's status and details.

    The fault may be remembered for long as what a transfer ended with; what it went through on its
    way here need not be, for that holds the request.
    """
    fault.__traceback__ = fault.__context__ = fault.__cause__ = None
    await abort_with(context, fault.status())


async def abort_with(
    context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status
) -> NoReturn:
    """End the call with a status.

    A peer that reads nothing holds the status back; after `STATUS_READ_S` the handler ends without
    waiting for it to be taken.
    """
    aborting = context.abort(
        grpc_code(Code(status.code)),
        status.message,
        trailing_metadata=((STATUS_METADATA, status.SerializeToString()),),
    )
    try:
        await asyncio.wait_for(aborting, STATUS_READ_S)
    except asyncio.TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returns never")


async def write(context: grpc.aio.ServicerContext[Any, Any], message: Message) -> None:
    """Write a message of a stream. CancelledError when the call is no more, for its caller left."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def write_within(writing: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Write a stream to its end. Fault STAGE_DEADLINE when the reader has not taken it by then."""
    try:
        await asyncio.wait_for(writing, limit_s)
    except asyncio.TimeoutError:
        raise stage_deadline("read") from None


def grpc_code(code: Code) -> grpc.StatusCode:
    """grpc's own enum for a code."""
    return grpc.StatusCode[code.name]


def reason_in(trailing: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The reason of the fault that a call's trailing metadata tells of; "" when it tells of none
    of ours."""
    fault = _fault_in(trailing)
    return fault.reason.value if isinstance(fault, Fault) else ""


def read_error(error: grpc.RpcError) -> Fault | TransportFault:
    """What a failed call of either API says."""
    metadata: Any = error.trailing_metadata()  # pairs in both APIs, whatever the stubs say
    fault = _fault_in(metadata)
    return fault or TransportFault(Code[error.code().name], error.details() or "")


def _fault_in(
    trailing: Iterable[tuple[str, str | bytes]] | None,
) -> Fault | TransportFault | None:
    for key, value in trailing or ():
        if key == STATUS_METADATA and isinstance(value, bytes):
            # What cannot be parsed is not of our making.
            with contextlib.suppress(DecodeError):
                return read_status(status_pb2.Status.FromString(value))
    return None


__all__ = [
    "PortInUse",
    "abort",
    "abort_with",
    "address",
    "aio_channel",
    "bind",
    "budget_of",
    "channel_options",
    "grpc_code",
    "read_error",
    "reason_in",
    "server_options",
    "sync_channel",
    "time_left",
    "write",
    "write_within",
]
