"""What an embedder puts between an instance and the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:  # generic in the stubs alone
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor


def _as_it_is(channel: grpc.Channel) -> grpc.Channel:
    return channel


@dataclass(frozen=True)
class Interceptors:
    """Interceptors of every call that an instance serves and makes, the outermost first.

    `server` sees the calls served, on control and shard endpoints. `client` sees the calls made on
    asyncio channels: give one object for each shape of call, for grpc.aio takes an object for the
    first shape that it knows alone. `futures` wraps the synchronous channels whose calls are made
    as futures, which is P's Allocate; to make one must not block, for P's loop does it. An object
    may be called on several threads: P and D move KV on a loop of its own.
    """

    server: tuple[ServerInterceptor, ...] = ()
    client: tuple[grpc.aio.ClientInterceptor, ...] = ()
    futures: Callable[[grpc.Channel], grpc.Channel] = _as_it_is


NONE = Interceptors()
"""Nothing in between."""
