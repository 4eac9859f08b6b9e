"""What of one request's KV goes to one shard of D, in which pieces, and when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.shards import heads_of
from pd_grpc.transport.base import SendPlan, Slab

_UNSENT, _SENT, _VERIFIED = 0, 1, 2


class _Layer:
    """One layer's wanted blocks by their place in the plan's order: what has become of each, and
    how many from the front are computed, and whether all tokens are, wanted or not."""

    __slots__ = ("block_bytes", "computed", "first_unsent", "group", "layer", "ready", "state")

    def __init__(self, group: int, layer: int, blocks: int, block_bytes: int) -> None:
        self.group = group
        self.layer = layer
        self.block_bytes = block_bytes
        self.state = bytearray(blocks)
        self.ready = 0
        self.computed = False
        self.first_unsent = 0

    def unsent(self, start: int, end: int) -> int:
        """Length of the unsent run at the front of [start, end)."""
        if not any(self.state[start:end]):
            return end - start
        return next(i for i in range(start, end) if self.state[i] != _UNSENT) - start

    def seek(self) -> bool:
        """Move to the first ready block that is unsent; whether there is one."""
        at = self.state.find(_UNSENT, self.first_unsent, self.ready)
        self.first_unsent = self.ready if at < 0 else at
        return at >= 0


class TransferSender:
    """Decides what is sent next; it moves no byte and reads no clock.

    A block-layer may go once its tokens are all computed, or the prompt is. It goes in a slab of
    about `chunk_bytes` at least and `slab_bytes` at the most, over several blocks and layers; less
    is sent only when a pass of the engine is over, so that nothing waits for the next one. Never
    more than D's window is unacknowledged. After a break everything that D has not verified is sent
    again.
    """

    def __init__(
        self,
        layout: KvLayout,
        plan: SendPlan,
        chunk_bytes: int,
        progress_s: float,
        slab_bytes: int = 0,
    ) -> None:
        """`slab_bytes` is no less than `chunk_bytes`; 0 is the same."""
        self.plan = plan
        self.acked_bytes = 0
        """Payload bytes that D has verified, over all streams."""
        self._block_size = layout.block_size
        self._all_blocks = layout.blocks_for(plan.tokens)
        self._chunk_bytes = chunk_bytes
        self._slab_bytes = slab_bytes or chunk_bytes
        self._progress_s = progress_s
        # The place of each wanted run's first block among all wanted blocks, and their sum.
        self._places = [0, *accumulate(count for _, count in plan.wanted)]
        self._layers = [
            _Layer(run.group, layer, self._places[-1], _layer_bytes(layout, run.group, plan.heads))
            for run in plan.layers
            for layer in range(run.layer, run.layer + run.layers)
        ]
        self._pass_over = True
        """Every layer is computed as far as every other."""
        self._by_name = {(each.group, each.layer): each for each in self._layers}
        self._layers_end = max((each.layer + 1 for each in self._layers), default=0)
        self._open = False
        self._window_bytes = 0
        self._stream_chunks = 0
        self._stream_bytes = 0
        self._stream_accepted = 0
        self._end_sent = False
        self._completed = False
        self._heard_at: float | None = None
        for layer in self._layers:
            self.advance(layer.group, layer.layer, plan.ready)

    @property
    def unacked_bytes(self) -> int:
        """Payload bytes on their way on the open stream."""
        return self._stream_bytes - self._stream_accepted if self._open else 0

    @property
    def window_bytes(self) -> int:
        """What the shard lets be on its way on one stream."""
        return self._window_bytes

    # --- what is known -------------------------------------------------------------------------

    def advance(self, group: int, layer: int, tokens: int) -> None:
        """The KV of the first `tokens` tokens of a layer is in P's pool."""
        found = self._by_name.get((group, layer))
        if found is not None:
            whole = tokens // self._block_size
            found.computed = found.computed or tokens >= self.plan.tokens
            blocks = self._all_blocks if found.computed else whole
            found.ready = max(found.ready, self._place_of(blocks))
            self._pass_over = all(layer.ready == found.ready for layer in self._layers)

    def opening(self, now: float) -> None:
        """A stream begins. Nothing is sent before the shard has answered."""
        self._open = False
        self._stream_chunks = self._stream_bytes = self._stream_accepted = 0
        self._end_sent = False
        self._heard_at = now
        for layer in self._layers:
            layer.state = layer.state.replace(bytes([_SENT]), bytes([_UNSENT]))
            layer.first_unsent = 0

    def opened(self, verified: Iterable[Slab], window_bytes: int, now: float) -> list[Slab]:
        """The shard has answered; `verified` need not be sent again. Returns those of them whose
        acknowledgement was lost with an earlier stream."""
        self._open = True
        self._window_bytes = window_bytes
        self._heard_at = now
        return [slab for slab in verified if self._mark_verified(slab)]

    def acked(self, ranges: Iterable[Slab], accepted_bytes: int, now: float) -> None:
        """The shard has verified `ranges`; `accepted_bytes` on this stream so far."""
        self._heard_at = now
        # A shard may say anything, of which no more counts than was sent.
        accepted = min(accepted_bytes, self._stream_bytes)
        self._stream_accepted = max(self._stream_accepted, accepted)
        for slab in ranges:
            self._mark_verified(slab)

    def completed(self) -> bool:
        """The shard has everything. False when it says so before all was sent: it lies."""
        self._completed = self._end_sent
        return self._completed

    def broken(self) -> None:
        """The stream has ended; nothing is sent until the next one."""
        self._open = False
        self._heard_at = None

    # --- what follows --------------------------------------------------------------------------

    def next_slab(self, now: float, most_bytes: int | None = None) -> Slab | None:
        """The slab to send now, of at most `most_bytes` if that is told, counted as sent; None when
        there is nothing to send, or no room in the window."""
        unacked = self._stream_bytes - self._stream_accepted
        if not self._open or self._end_sent or (at := self._sendable()) is None:
            return None
        most = self._window_bytes if most_bytes is None else min(most_bytes, self._window_bytes)
        slab, size = self._slab(at, most)
        if unacked and unacked + size > self._window_bytes:
            return None
        place = self._place_of(slab.block)
        sent = bytes([_SENT]) * slab.blocks
        for layer in self._layers_of(slab):
            layer.state[place : place + slab.blocks] = sent
        if not unacked:
            self._heard_at = now
        self._stream_chunks += 1
        self._stream_bytes += size
        return slab

    def end(self, now: float) -> tuple[int, int] | None:
        """Chunks and payload bytes of this stream, once, when everything has been sent. Where D has
        the last blocks already, the prompt is computed to its end all the same, for only then can
        the first token follow at once."""
        if not self._open or self._end_sent:
            return None
        if any(not layer.computed or layer.seek() for layer in self._layers):
            return None
        self._end_sent = True
        self._heard_at = now
        return self._stream_chunks, self._stream_bytes

    def deadline(self) -> float | None:
        """When the shard will have been silent too long; None while nothing is owed by it."""
        owed = self._stream_bytes > self._stream_accepted or self._end_sent or not self._open
        if self._completed or self._heard_at is None or not owed:
            return None
        return self._heard_at + self._progress_s

    # --- how -----------------------------------------------------------------------------------

    def _sendable(self) -> int | None:
        """The first layer with something to send, by its place in the plan; None while it is worth
        waiting for more of this pass."""
        at = next((i for i, layer in enumerate(self._layers) if layer.seek()), None)
        if at is None or self._pass_over:
            return at
        ready_bytes = 0
        for layer in self._layers[at:]:
            if layer.seek():
                unsent = layer.state.count(_UNSENT, layer.first_unsent, layer.ready)
                ready_bytes += unsent * layer.block_bytes
        return at if ready_bytes >= self._chunk_bytes else None

    def _slab(self, at: int, most_bytes: int) -> tuple[Slab, int]:
        """The next slab, which begins with the layer at `at` in the plan, and its size in bytes."""
        first = self._layers[at]
        # Less room than for a slab bounds the slab; a block-layer is the least there is.
        limit = min(self._slab_bytes, most_bytes)
        place = first.first_unsent
        run_end = self._places[self._run_of(place) + 1]
        most = max(1, limit // first.block_bytes)
        # All layers of a block lie together in memory, the same layer of two blocks does not: fewer
        # and longer pieces are read at one end and written at the other. A block of which all
        # layers are there is P's to free, too.
        run = [first]
        for layer in self._layers[at + 1 : at + most]:
            follows = (layer.group, layer.layer) == (first.group, first.layer + len(run))
            if not follows or layer.ready <= place or layer.state[place] != _UNSENT:
                break
            run.append(layer)
        count = len(run)
        end = min(run_end, place + max(1, most // count))
        blocks = min(layer.unsent(place, min(end, layer.ready)) for layer in run)
        slab = Slab(first.group, first.layer, count, self._block_at(place), blocks)
        return slab, count * blocks * first.block_bytes

    def _mark_verified(self, slab: Slab) -> bool:
        """Note what D has; whether any of it was news."""
        before = self.acked_bytes
        place = self._place_of(slab.block)
        end = self._place_of(slab.block + slab.blocks)
        verified = bytes([_VERIFIED]) * (end - place)
        for layer in self._layers_of(slab):
            news = end - place - layer.state.count(_VERIFIED, place, end)
            layer.state[place:end] = verified
            self.acked_bytes += news * layer.block_bytes
        return self.acked_bytes > before

    def _layers_of(self, slab: Slab) -> list[_Layer]:
        end = min(slab.layer + slab.layers, self._layers_end)
        names = ((slab.group, layer) for layer in range(slab.layer, end))
        return [self._by_name[name] for name in names if name in self._by_name]

    def _place_of(self, block: int) -> int:
        """How many wanted blocks lie before logical block `block`."""
        run = bisect_left(self.plan.wanted, (block,)) - 1
        if run < 0:
            return 0
        start, count = self.plan.wanted[run]
        return self._places[run] + min(block - start, count)

    def _run_of(self, place: int) -> int:
        """The wanted run that a place lies in."""
        return bisect_left(self._places, place + 1) - 1

    def _block_at(self, place: int) -> int:
        run = self._run_of(place)
        return self.plan.wanted[run][0] + place - self._places[run]


def _layer_bytes(layout: KvLayout, group: int, heads: int) -> int:
    """Of one block in one layer, with so many of the model's heads; 0 is all."""
    every = heads_of(layout)
    return layout.layer_bytes(group) * (heads or every) // every
