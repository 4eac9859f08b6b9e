"""How much of what P sends to one shard may be unacknowledged, over all transfers to it."""

from __future__ import annotations

from collections.abc import Callable

from pd_grpc.prefill.sender import TransferSender


class PairWindow:
    """The senders to one endpoint, and who is to be woken when there is room again.

    D grants a window to each stream; eight streams that use theirs keep eight windows of KV in the
    memory of both processes, and get no byte there sooner. So all of them together keep to one. A
    sender with nothing on its way may always send: none waits for another, however silent that
    one's stream is.
    """

    def __init__(self) -> None:
        self._senders: dict[TransferSender, Callable[[], None]] = {}
        """In the order in which they sent last, for that is the order of their turns."""

    def join(self, sender: TransferSender, wake: Callable[[], None]) -> None:
        """One more; `wake` is called when it may find room."""
        self._senders[sender] = wake

    def leave(self, sender: TransferSender) -> None:
        """One less. What it had on its way is on its way no more."""
        if self._senders.pop(sender, None) is not None:
            self.acked()

    def has_room(self, sender: TransferSender) -> bool:
        """Whether a sender may go on."""
        if not sender.unacked_bytes:
            return True
        return sum(each.unacked_bytes for each in self._senders) < sender.window_bytes

    def sent(self, sender: TransferSender) -> None:
        """One has sent a slab: the others come before it."""
        if sender in self._senders:
            self._senders[sender] = self._senders.pop(sender)

    def acked(self) -> None:
        """There may be room."""
        for wake in self._senders.values():
            wake()
