"""The device that a model and its pool are on: which, what it has free, and its streams.

What a device is asked to do it does later, in order within a stream, in none between two. So the
host waits for an event before it looks, and a stream waits for one of another before it goes on.
Nothing here needs a GPU until one is asked for.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import torch

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.pool_size import available_bytes

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """The device of this name: `cpu`, `cuda` (the first) or `cuda:N`. ModelError naming device when
    it is not there, or this torch cannot use it."""
    kind, colon, number = name.partition(":")
    if kind == "cpu" and not colon:
        return CPU
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise ModelError("device", f"{name} is not a device that is built: cpu, cuda or cuda:N")
    if not torch.backends.cuda.is_built():
        raise ModelError("device", f"{name}: torch {torch.__version__} is built without CUDA")
    count = torch.cuda.device_count()
    index = int(number or 0)
    if index >= count:
        there = f"torch sees {count} CUDA devices" if count else "torch sees no CUDA device"
        raise ModelError("device", f"{name}: {there}")
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Memory of `device` that a pool could have."""
    if device.type == "cpu":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def placed(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """CPU tensors of int64 on `device`, all by one copy that the host does not wait for; the
    tensors themselves where that is the CPU. The order of the current stream makes them right for
    what is asked of it from here on."""
    if device.type == "cpu":
        return tensors
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).pin_memory()
    there = packed.to(device, non_blocking=True)
    parts = there.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))


class Event(ABC):
    """A place in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all that was before it in its stream is over."""

    @abstractmethod
    def wait(self) -> None:
        """Have the host wait until it is."""


class Stream(ABC):
    """What a device does one thing after another."""

    @abstractmethod
    def use(self) -> contextlib.AbstractContextManager[object]:
        """A context in which what this thread asks of the device goes into this stream."""

    @abstractmethod
    def record(self) -> Event:
        """The place that the stream has been asked to get to."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Have the stream, not the host, wait for an event of another."""


class Streams(ABC):
    """The streams of one device. Safe from any thread."""

    @property
    @abstractmethod
    def compute(self) -> Stream:
        """The one that the model runs in."""

    @abstractmethod
    def another(self) -> Stream:
        """A new one, beside it."""

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory of so many bytes, uint8, that the device copies from and to by itself."""


def streams_of(device: torch.device) -> Streams:
    """Those of `device`."""
    return HostStreams() if device.type == "cpu" else CudaStreams(device)


class _Over(Event):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class HostStream(Stream):
    """The host does at once what it is asked."""

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record(self) -> Event:
        return _Over()

    def wait(self, event: Event) -> None:
        event.wait()


class HostStreams(Streams):
    """The host, which has nothing to wait for."""

    def __init__(self) -> None:
        self._compute = HostStream()

    @property
    def compute(self) -> Stream:
        return self._compute

    def another(self) -> Stream:
        return HostStream()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A host that waits for one of these sleeps; it would spin otherwise, and take a core.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class _CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def use(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        return _CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)


class CudaStreams(Streams):
    """Of a CUDA device. The model runs in the default stream, where its weights were copied too;
    those that torch makes beside it do not wait for that one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = _CudaStream(torch.cuda.default_stream(device))

    @property
    def compute(self) -> Stream:
        return self._compute

    def another(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self._device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
