"""How the kit uses gRPC: connections of its own, room for large messages, no bound of its own."""

from __future__ import annotations

import grpc.aio

from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.refs import mint_epoch

# More than any message of the protocol, so that it is the subject who finds one too large.
_MAX_MESSAGE_BYTES = 64 << 20

MESSAGE_SIZES = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
)
CHANNEL_OPTIONS = (*MESSAGE_SIZES, ("grpc.use_local_subchannel_pool", 1))
SERVER_OPTIONS = (
    *MESSAGE_SIZES,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


def connect(endpoint: str) -> grpc.aio.Channel:
    """A connection of its own to an endpoint."""
    return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)


def new_epoch() -> int:
    """The epoch of a process that starts now."""
    return mint_epoch(SystemClock())
