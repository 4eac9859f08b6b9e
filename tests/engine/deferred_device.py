"""A device on the CPU that does nothing before it is waited for.

What is asked of a stream is kept in a queue, and done when the host waits for an event of it, or a
stream that is waited for does. Until then what it computes is not a number, and what it stores is
not there. On a GPU a wait that is missing goes wrong once in a while; here it does every time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch, _pytree

from pd_grpc.engine.device import Event, Stream, Streams

WAITS = ("host waits", "host looks", "stream waits")


# Of torch's own, without annotations.
_Mode: Any = _python_dispatch.TorchDispatchMode
_disable_current_modes: Any = _python_dispatch._disable_current_modes
tree_leaves: Any = _pytree.tree_leaves
tree_map_only: Any = _pytree.tree_map_only


class DeferredStreams(Streams):
    """`ignored` names a kind of wait that does nothing, as if it were forgotten. `pace` is how much
    a stream does by itself whenever the host looks whether it is done."""

    def __init__(self, pace: int = 0, ignored: str = "") -> None:
        assert ignored in ("", *WAITS)
        self.ignored = ignored
        self.pace = pace
        self.lock = threading.RLock()
        self._compute = DeferredStream(self)

    @property
    def compute(self) -> DeferredStream:
        return self._compute

    def another(self) -> DeferredStream:
        return DeferredStream(self)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


class DeferredStream(Stream):
    def __init__(self, streams: DeferredStreams) -> None:
        self.streams = streams
        self._asked: deque[Callable[[], object]] = deque()
        self._done = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        with _Deferring(self):
            yield

    def record(self) -> Event:
        with self.streams.lock:
            return _Place(self, self._done + len(self._asked))

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Place)
        if self.streams.ignored != "stream waits":
            self.ask(lambda: event.stream.do(event.place))

    def ask(self, work: Callable[[], object]) -> None:
        """Have it done after what has been asked for before."""
        with self.streams.lock:
            self._asked.append(work)

    def do(self, place: int) -> None:
        """Get as far as `place`."""
        with self.streams.lock, _disable_current_modes(), torch.inference_mode():
            while self._done < place and self._asked:
                work = self._asked.popleft()
                self._done += 1
                work()

    def reached(self, place: int) -> bool:
        self.do(min(place, self._done + self.streams.pace))
        return self._done >= place


class _Place(Event):
    def __init__(self, stream: DeferredStream, place: int) -> None:
        self.stream = stream
        self.place = place

    def done(self) -> bool:
        return self.stream.streams.ignored == "host looks" or self.stream.reached(self.place)

    def wait(self) -> None:
        if self.stream.streams.ignored != "host waits":
            self.stream.do(self.place)


class _Deferring(_Mode):  # type: ignore[misc]
    """Puts every operation of this thread into a stream."""

    def __init__(self, stream: DeferredStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def work() -> Any:
            return func(*args, **kwargs)

        if func._schema.is_mutable:
            self._stream.ask(work)
            return kwargs["out"] if "out" in kwargs else args[0]
        if any("Tensor" not in str(value.type) for value in func._schema.returns):
            # The host wants a number.
            self._stream.record().wait()
            return work()
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if _lies_plain(t)}
        # The shape is known at once, and so is a view. What a tensor of its own holds is not.
        out = work()
        if any(isinstance(t, torch.Tensor) and _memory(t) in given for t in tree_leaves(out)):
            return out
        later = tree_map_only(torch.Tensor, _unknown, out)
        self._stream.ask(lambda: _fill(later, work()))
        return later


def _lies_plain(value: object) -> bool:
    """Weights that were packed have no memory that could be looked at."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unknown(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _fill(outs: Any, values: Any) -> None:
    for out, value in zip(tree_leaves(outs), tree_leaves(values), strict=True):
        if isinstance(out, torch.Tensor):
            out.copy_(value)
