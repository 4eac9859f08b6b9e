"""What an embedder puts between an instance and the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.faults import Code, Fault, TransportFault
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.rpc_calls import Calls
from pd_grpc.telemetry.rpc_client import watch_aio_channel, watch_channel
from pd_grpc.telemetry.rpc_server import ServedCalls
from pd_grpc.telemetry.tracing import Tracing

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


class Wire:
    """What lies between an instance and its peers: its own record of every call, outermost, and the
    interceptors of its embedder."""

    def __init__(self, interceptors: Interceptors = NONE) -> None:
        self._interceptors = interceptors
        self.log = InstanceLog("protocol", "")
        """That of the instance, once it has its name."""
        self._served = ServedCalls()
        self._calls: Calls | None = None

    def connect(self, log: InstanceLog, tracing: Tracing, instruments: Instruments) -> None:
        """Record from now on. An instance may have its name from its port, and answers and makes no
        call before."""
        self.log = log
        self._calls = Calls(tracing, instruments, rpc.reason_in)
        self._served.connect(self._calls)

    def around(self, registry: ServerInterceptor) -> list[ServerInterceptor]:
        """The interceptors of a server, the outermost first."""
        return [self._served, registry, *self._interceptors.server]

    def aio_channel(
        self, endpoint: str, timeouts: Timeouts, sizes: Sizes, **kwargs: Any
    ) -> grpc.aio.Channel:
        """As `rpc.aio_channel`."""
        client = self._interceptors.client
        channel = rpc.aio_channel(endpoint, timeouts, sizes, interceptors=client, **kwargs)
        return channel if self._calls is None else watch_aio_channel(channel, self._calls, endpoint)

    def sync_channel(self, endpoint: str, timeouts: Timeouts, sizes: Sizes) -> grpc.Channel:
        """As `rpc.sync_channel`."""
        channel = self._interceptors.futures(rpc.sync_channel(endpoint, timeouts, sizes))
        return channel if self._calls is None else watch_channel(channel, self._calls, endpoint)


class Guard:
    """Around the making of a call: what is raised by it becomes its `fault`, and is raised no more.

    An embedder's code may raise anything; that is the end of the one call, INTERNAL. Only the
    FutureCancelledError of a call that we have cancelled passes, for nobody waits for its answer.
    """

    def __init__(self, log: InstanceLog | None = None) -> None:
        self.fault: Fault | TransportFault | None = None
        self._log = log or InstanceLog("protocol", "")

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, grpc.FutureCancelledError):
            return False
        if isinstance(error, grpc.RpcError):
            self.fault = rpc.read_error(error)
        else:
            self._log.note(Event.DEFECT, "a call could not be made", error=error)
            text = f"the call could not be made: {type(error).__name__}"
            self.fault = TransportFault(Code.INTERNAL, text)
        return True
