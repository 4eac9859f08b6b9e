"""The injector on synchronous channels: unary calls, waited for or as futures."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from pd_grpc.testing.faults import WHOLE, CallFates, Injector
from pd_grpc.testing.faults_client import damaged

if TYPE_CHECKING:  # generic in the stubs alone
    _Interceptor = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _Future = grpc.Future[Any]
else:
    _Interceptor = grpc.UnaryUnaryClientInterceptor
    _Future = grpc.Future

_CLOSING_S = 5.0
"""How long closing a channel waits for calls that are just being made, or waited for."""

_Begin = Callable[["float | None"], Any]
"""Makes the call with so much time left, and returns it; None when it cannot be made any more."""


class _Details(
    namedtuple(
        "_Details",
        ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression"),
    ),
    grpc.ClientCallDetails,
):
    pass


class StruckChannel(grpc.Channel):
    """A synchronous channel whose unary calls may be struck; all else of it is as it was.

    To make a future never blocks: what is held is held by a timer. Once the channel is closed
    nothing held is sent, for a call that is made on a closed channel crashes the interpreter in
    grpc; so this wraps the channel, and is no interceptor alone, which hears of no close.
    """

    def __init__(self, channel: grpc.Channel, injector: Injector) -> None:
        self._channel = channel
        self._open = _Open()
        self._struck = grpc.intercept_channel(channel, _FutureInterceptor(injector, self._open))

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel has it, struck."""
        return self._struck.unary_unary(*args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel has it."""
        return self._channel.unary_stream(*args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel has it."""
        return self._channel.stream_unary(*args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.Channel has it."""
        return self._channel.stream_stream(*args, **kwargs)

    def subscribe(self, *args: Any, **kwargs: Any) -> None:
        """As grpc.Channel has it."""
        self._channel.subscribe(*args, **kwargs)

    def unsubscribe(self, *args: Any, **kwargs: Any) -> None:
        """As grpc.Channel has it."""
        self._channel.unsubscribe(*args, **kwargs)

    def close(self) -> None:
        """Close it; held calls are never made."""
        self._open.end()
        self._channel.close()

    def __enter__(self) -> StruckChannel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Open:
    """Whether calls can be made, and who is making one by a timer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._making = 0

    def make(self, begin: _Begin, left_s: float | None) -> Any:
        """The call that `begin` makes; None when the channel is closed."""
        with self._changed:
            if self._closed:
                return None
            self._making += 1
        try:
            return begin(left_s)
        finally:
            with self._changed:
                self._making -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """No more; waits for those that are being made."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._making == 0, _CLOSING_S)


class _FutureInterceptor(_Interceptor):
    def __init__(self, injector: Injector, channel: _Open) -> None:
        self._injector = injector
        self._channel = channel
        self._copies: set[Any] = set()

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        fates = self._injector.begin(str(details.method))
        fate = fates.request()
        arrives = damaged(request, fate)

        def begin(left_s: float | None) -> Any:
            timed = _with_timeout(details, left_s)
            return self._channel.make(lambda _: continuation(timed, arrives), left_s)

        call = HeldCall(begin, fates, details.timeout)
        if fate.duplicated:
            _after(fate.delay_s + fate.copy_delay_s, lambda: self._copy(begin, details.timeout))
        call.start(None if fate.dropped else fate.delay_s)
        return call

    def _copy(self, begin: _Begin, timeout_s: float | None) -> None:
        copy = begin(timeout_s)
        if copy is None:
            return
        self._copies.add(copy)  # Else it may be cancelled, for nobody holds it.
        copy.add_done_callback(self._copies.discard)


class Silence(grpc.RpcError):
    """What a caller hears that hears nothing: a status of the transport's own."""

    def code(self) -> grpc.StatusCode:
        """DEADLINE_EXCEEDED."""
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        """As gRPC puts it."""
        return "Deadline Exceeded"

    def trailing_metadata(self) -> tuple[()]:
        """None at all."""
        return ()


class HeldCall(_Future, grpc.Call):
    """A call that may begin, or tell its answer, later than it would by itself."""

    def __init__(self, begin: _Begin, fates: CallFates, timeout_s: float | None) -> None:
        self._begin = begin
        self._fates = fates
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._changed = threading.Condition()
        self._inner: Any = None
        self._done = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._value: Any = None
        self._timers: list[threading.Timer] = []
        self._callbacks: list[Callable[[Any], None]] = []

    def start(self, delay_s: float | None) -> None:
        """Make the call after a while; never with None."""
        if delay_s == 0.0:
            self._make()
            return
        left = self.time_remaining()
        if delay_s is None or (left is not None and left < delay_s):
            self._give_up_at_deadline()
        else:
            self._later(delay_s, self._make)

    # What a caller asks.

    def result(self, timeout: float | None = None) -> Any:
        """The answer. FutureTimeoutError, FutureCancelledError, RpcError."""
        self._wait(timeout)
        if self._cancelled:
            raise grpc.FutureCancelledError
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> Any:
        """What went wrong; None when nothing did."""
        self._wait(timeout)
        if self._cancelled:
            raise grpc.FutureCancelledError
        return self._error

    def traceback(self, timeout: float | None = None) -> Any:
        """Of what went wrong."""
        error = self.exception(timeout)
        return None if error is None else error.__traceback__

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call back when it is over, at once if it is."""
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn(self)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """As grpc.Call has it; False when it is over."""
        with self._changed:
            if self._done:
                return False
            self._callbacks.append(lambda _: callback())
            return True

    def cancel(self) -> bool:
        """End it; what has not been sent never will be."""
        with self._changed:
            inner, done = self._inner, self._done
        if done:
            return False
        if inner is not None:
            inner.cancel()
        return self._finish(cancelled=True)

    def cancelled(self) -> bool:
        """Whether it was cancelled before it was over."""
        return self._cancelled

    def running(self) -> bool:
        """Whether it goes on."""
        return not self._done

    def is_active(self) -> bool:
        """Whether it goes on."""
        return not self._done

    def done(self) -> bool:
        """Whether it is over."""
        return self._done

    def time_remaining(self) -> Any:
        """Seconds until its deadline; None without one."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def code(self) -> Any:
        """Its status once it is over."""
        self._wait(None)
        if self._cancelled:
            return grpc.StatusCode.CANCELLED
        if self._error is None:
            return grpc.StatusCode.OK
        if isinstance(self._error, grpc.RpcError):
            return self._error.code()
        return grpc.StatusCode.UNKNOWN

    def details(self) -> Any:
        """Of its status."""
        self._wait(None)
        return self._error.details() if isinstance(self._error, grpc.RpcError) else ""

    def initial_metadata(self) -> Any:
        """The server's; none where it was never asked."""
        self._wait(None)
        return () if self._inner is None else self._inner.initial_metadata()

    def trailing_metadata(self) -> Any:
        """The server's; none where its answer was not heard."""
        self._wait(None)
        silent = self._inner is None or isinstance(self._error, Silence)
        return () if silent else self._inner.trailing_metadata()

    # What happens to it.

    def _make(self) -> None:
        if self.done():
            return
        inner = self._begin(self.time_remaining())
        if inner is None:
            self._finish(cancelled=True)
            return
        with self._changed:
            self._inner = inner
        if self.done():  # Another thread has ended it meanwhile.
            inner.cancel()
        inner.add_done_callback(self._answered)

    def _answered(self, inner: Any) -> None:
        if inner.cancelled():
            self._finish(cancelled=True)
            return
        error = inner.exception()
        if error is not None:
            self._finish(error=error)
            return
        answer = inner.result()
        fate = self._fates.response()
        if fate is WHOLE:
            self._finish(value=answer)
            return
        left = self.time_remaining()
        if fate.dropped or (left is not None and left < fate.delay_s):
            self._give_up_at_deadline()
            return
        try:
            answer = damaged(answer, fate)
        except ValueError as no_message:  # Raised here it would end in grpc's log, and no call.
            self._finish(error=no_message)
            return
        self._later(fate.delay_s, lambda: self._finish(value=answer))

    def _give_up_at_deadline(self) -> None:
        left = self.time_remaining()
        if left is not None:
            self._later(left, lambda: self._finish(error=Silence()))

    def _later(self, delay_s: float, do: Callable[[], object]) -> None:
        with self._changed:
            if not self._done:
                self._timers.append(_after(delay_s, do))

    def _finish(
        self, value: Any = None, error: BaseException | None = None, cancelled: bool = False
    ) -> bool:
        with self._changed:
            if self._done:
                return False
            self._done = True
            self._value, self._error, self._cancelled = value, error, cancelled
            callbacks, self._callbacks = self._callbacks, []
            for timer in self._timers:
                timer.cancel()
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)
        return True

    def _wait(self, timeout: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise grpc.FutureTimeoutError


def _after(delay_s: float, do: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(delay_s, do)
    timer.daemon = True
    timer.name = "pd-injected"
    timer.start()
    return timer


def _with_timeout(details: Any, timeout_s: float | None) -> _Details:
    return _Details(
        details.method,
        timeout_s,
        details.metadata,
        details.credentials,
        details.wait_for_ready,
        details.compression,
    )
