"""How much of what P sends to one D may be unacknowledged, over all transfers and shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import NamedTuple

from pd_grpc.prefill.sender import TransferSender

WRITES_AT_ONCE = 1
"""Of all transfers over a connection. Two are cut into frames that alternate, and put together at
the same time: eight transfers came at 0.79 to 0.81 of the rate of one, and come at 0.86 to 0.88."""

TURN_WRITES = 4
"""Of a turn: chunks of one transfer that come together are acknowledged together, where transfers
that alternate chunk by chunk get an ack for each."""

TURN_S = 0.05
"""A turn that takes longer waits for its own stream, and the others for it no more."""

SLABS_PER_SHARE = 4
"""Of a connection in the window, where there are several."""

LEAST_SHARE_BYTES = 8 << 20
"""Of a transfer in the window, beside others: where a transport's slabs are larger, a few of the
first transfers would fill the window, and the last would begin when those have ended."""

SLABS_PER_WINDOW = 16
"""However many connections there are: each message costs either end, whatever it carries."""


class _Joined(NamedTuple):
    wake: Callable[[], None]
    connection: Hashable


class PairWindow:
    """The senders to one process of D, and who is to be woken when there is room again.

    D grants a window to each stream; eight streams that use theirs keep eight windows of KV in the
    memory of both processes, and get no byte there sooner. So all of them together keep to one. A
    sender with nothing on its way may always send, though beyond the window no more than its share
    of a second one: none waits for another, however silent that one's stream is, and two windows
    and a chunk are the most there is, however many shards and transfers there are.

    D puts a message together for each connection at a time, which takes several times its size in
    memory. So where there are several connections slabs are smaller.
    """

    def __init__(self) -> None:
        self._senders: dict[TransferSender, _Joined] = {}
        """In the order in which they sent last, for that is the order of their turns."""
        self._connections = 0
        """Those that some of them send over."""
        self._turns: dict[Hashable, asyncio.Semaphore] = {}
        """By connection."""
        self._under_way: int | None = None
        """Bytes of all of them, while none has said that it has changed: many ask in between."""

    def join(self, sender: TransferSender, wake: Callable[[], None], connection: Hashable) -> None:
        """One more, which sends over `connection`; `wake` is called when it may find room."""
        self._senders[sender] = _Joined(wake, connection)
        self._changed()

    def leave(self, sender: TransferSender) -> None:
        """One less. What it had on its way is on its way no more."""
        if self._senders.pop(sender, None) is not None:
            self._changed()
            self.acked()

    def has_room(self, sender: TransferSender) -> bool:
        """Whether a sender may go on."""
        return not sender.unacked_bytes or self._all_under_way() < sender.window_bytes

    def most_bytes(self, sender: TransferSender) -> int:
        """Of the next slab of a sender that has room."""
        window_bytes = sender.window_bytes
        if self._all_under_way() >= window_bytes:
            return window_bytes // max(1, len(self._senders))
        if self._connections < 2:
            return max(window_bytes // max(1, len(self._senders)), LEAST_SHARE_BYTES)
        return window_bytes // min(SLABS_PER_SHARE * self._connections, SLABS_PER_WINDOW)

    def turn(self, connection: Hashable) -> Turn:
        """To be entered by whoever writes through a connection: first come, first served.

        Chunks of eight streams that are written at once are cut into frames that alternate, and are
        in the memory of both processes eight at a time; one after another they get there no later.
        """
        turns = self._turns.get(connection)
        if turns is None:
            turns = self._turns[connection] = asyncio.Semaphore(WRITES_AT_ONCE)
        return Turn(turns)

    def sent(self, sender: TransferSender) -> None:
        """One has sent a slab: the others come before it."""
        self._under_way = None
        if sender in self._senders:
            self._senders[sender] = self._senders.pop(sender)

    def acked(self) -> None:
        """There may be room, for a sender has heard of an ack or has left."""
        self._under_way = None
        for each in self._senders.values():
            each.wake()

    def _changed(self) -> None:
        self._under_way = None
        self._connections = len({each.connection for each in self._senders.values()})

    def _all_under_way(self) -> int:
        if self._under_way is None:
            self._under_way = sum(each.unacked_bytes for each in self._senders)
        return self._under_way


class Turn:
    """A turn to write, which ends when it is left or has taken too long."""

    __slots__ = ("_timer", "_turns", "_writes")

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._timer: asyncio.TimerHandle | None = None
        self._writes = 0

    async def __aenter__(self) -> Turn:
        await self._turns.acquire()
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self._end)
        return self

    def wrote(self) -> bool:
        """A write is over; whether the turn lasts for another."""
        self._writes += 1
        return self._writes < TURN_WRITES and self._timer is not None

    async def __aexit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._turns.release()
