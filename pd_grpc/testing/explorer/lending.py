"""D's memory in the hands of Ps: the real half of shm, and the counting of its lender.

What goes over the Unix socket is a call of the world. Its end comes to the lender as one of three:
P says that it has let go (`CLOSE`), its process is gone (`CANCEL`, the pidfd), or the connection
has ended and proves neither (`UNPLUGGED`).
"""

from __future__ import annotations

from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.quarantine import PREFILL, Quarantine, _Entry
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.kv import LAYOUT, TagMemory
from pd_grpc.testing.explorer.wire import UNPLUGGED, Message
from pd_grpc.transport.base import ReceiveSide, ReceiveTransport, WriterNews
from pd_grpc.transport.inline import InlineReceive
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.v1 import layout_pb2, shm_pb2

SHM = layout_pb2.TRANSPORT_SHM
CARRIERS = (Carrier(SHM, one_sided=True, metadata=b"the pool"), INLINE_CARRIER)


def pool_id(epoch: int) -> bytes:
    """Names the memory of one process of D."""
    return epoch.to_bytes(16, "big")


class Lending:
    """The pool of one D, and who has it."""

    def __init__(self, memory: TagMemory, epoch: int, news: WriterNews) -> None:
        self._shm = ShmReceive(ReceiveSide(LAYOUT, memory))
        self._lender = self._shm._lender
        # Random otherwise, and then no two runs would be the same.
        self._lender.shard = shm_pb2.ShmShard(pool_id=pool_id(epoch))
        self._lender._news = news
        self.transports: dict[int, ReceiveTransport] = {
            SHM: self._shm,
            layout_pb2.TRANSPORT_INLINE: InlineReceive(memory),
        }
        self.borrowers: dict[int, Owner] = {}
        """By the call of each."""
        self.unplugged: set[int] = set()
        """Calls of those who can say nothing any more, and live."""

    def attach(self, call: int, owner: Owner) -> None:
        """P is given the memory."""
        self.borrowers[call] = owner
        self._lender._count((owner.name, owner.epoch), 1)

    def heard(self, call: int, message: Message) -> None:
        """A connection says something after that, or ends."""
        owner = self.borrowers.get(call)
        if owner is None:
            return
        if message.kind == UNPLUGGED:
            self.unplugged.add(call)
            return
        del self.borrowers[call]
        self.unplugged.discard(call)
        self._lender._count((owner.name, owner.epoch), -1)

    def beyond_reach(self) -> set[Owner]:
        """Processes that live and cannot say that they have let go: nothing but their end will."""
        return {self.borrowers[call] for call in self.unplugged}

    def kept_for_good(self, quarantine: Quarantine) -> int:
        """Blocks that wait for such a process."""
        silent = self.beyond_reach()
        entries = _of_prefills(quarantine)
        return sum(len(entry.holding.blocks) for entry in entries if entry.owner in silent)

    def awaited(self, quarantine: Quarantine) -> frozenset[tuple[TransferKey, str, int]]:
        """The transfers that wait for the others, each with its writer's name and epoch."""
        silent = self.beyond_reach()
        return frozenset(
            (entry.key, entry.owner.name, entry.owner.epoch)
            for entry in _of_prefills(quarantine)
            if entry.owner is not None and entry.owner not in silent
        )


def writable(ledger: Ledger) -> frozenset[tuple[str, int]]:
    """The blocks that Ps may write to, each with the grant in whose name."""
    found = set()
    for grant, transfer in ledger.transfers.items():
        if transfer.holding is not None and transfer.written_to:
            found |= {(grant, b) for b in transfer.holding.blocks[transfer.kept_blocks :]}
    for grant, entry in ledger.quarantine._entries.items():
        if PREFILL in entry.writers:
            found |= {(grant, block) for block in entry.holding.blocks}
    return frozenset(found)


def _of_prefills(quarantine: Quarantine) -> list[_Entry]:
    return [entry for entry in quarantine._entries.values() if PREFILL in entry.writers]
