"""Telling of each layer of a forward pass once its KV is in the pool, for all to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pd_grpc.engine.device import Event, Stream


class LayerEvents:
    """Passes on the layers of one forward pass, in order, on the thread that runs it.

    The host asks a device for a whole pass long before the device has done it. So a layer is told
    of only when the event behind it is over. That is looked at whenever another layer has been
    asked for, and after the last one waited for: the device never waits for the host, nor the host
    for the device before it has asked for everything.
    """

    def __init__(self, stream: Stream, on_layer: Callable[[int], None]) -> None:
        self._stream = stream
        self._on_layer = on_layer
        self._asked: deque[tuple[int, Event]] = deque()
        self.raised: Exception | None = None
        """What the caller's `on_layer` raised, to tell it from a fault of the model."""

    def __call__(self, layer: int) -> None:
        """The stream has been asked to store a layer."""
        self._asked.append((layer, self._stream.record()))
        while self._asked and self._asked[0][1].done():
            self._tell(self._asked.popleft()[0])

    def finish(self) -> None:
        """The stream has been asked for everything: wait for the layers that are left."""
        while self._asked:
            layer, event = self._asked.popleft()
            event.wait()
            self._tell(layer)

    def _tell(self, layer: int) -> None:
        try:
            self._on_layer(layer)
        except (RuntimeError, IndexError, ValueError) as error:
            self.raised = error
            raise
