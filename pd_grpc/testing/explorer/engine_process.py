"""What a P and a D have in common: a control loop and a bulk side, which are two."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.kv import BLOCK, UNCUT, Cut, Tag, TagMemory, client_of
from pd_grpc.testing.explorer.process import Process
from pd_grpc.testing.explorer.wire import ANSWER, CANCEL, Interned, Message


class EngineProcess(Process):
    """Either loop hears what the other has posted when its turn comes, in order. Where they are not
    `fine` both have heard everything before anything else happens."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        num_blocks: int,
        fine: bool,
        shared: bool = False,
        lent: bool = False,
        cut: Cut = UNCUT,
    ) -> None:
        super().__init__(name, epoch, ids)
        self.cut = cut
        self.fine = fine
        self.pool = BlockPool(num_blocks)
        self.memory = TagMemory(num_blocks, shared, lent, cut.heads)
        self.to_bulk: deque[Any] = deque()
        self.news: deque[Any] = deque()
        self.kept: frozenset[TransferKey] | None = None
        """What was in flight when it was told to drain; None before."""
        self.drained = False
        """Whether all of that has ended, and goodbye is to be said."""
        self.watchers: set[int] = set()
        """The health watches of routers."""
        self._said_to_serve = True
        self.poisoned: set[str] = set()
        """Clients in whose company the engine raises."""

    def _raises_over(self, rows: Iterable[TransferKey]) -> bool:
        """Whether the engine raises in a step with these."""
        return any(client_of(key) in self.poisoned for key in rows)

    def _store(self, table: Sequence[int], tag: Tag) -> None:
        """The engine writes the KV of one token."""
        self._check_written(table[tag.position // BLOCK : tag.position // BLOCK + 1])
        self.memory.store(table, tag)

    def _check_written(self, blocks: Iterable[int]) -> None:
        """See that nobody writes to blocks that others may find."""
        found = self.pool.kept() & set(blocks)
        if found:
            self._wrong("a shared block is never written", f"blocks {sorted(found)}")

    def _check_distrusted(self, tables: Iterable[Sequence[int]]) -> None:
        """See that nobody finds any of the blocks that no numbers came of."""
        for table in tables:
            found = self.pool.kept() & set(table)
            if found:
                self._wrong("what gave no numbers is found no more", f"blocks {sorted(found)}")

    def _asked_by_router(self, call: int, message: Message) -> bool:
        """Whether a call is one of those that a router finds out with who takes requests."""
        kind = self._ids.calls[call].kind
        if kind == "watch" and message.kind == CANCEL:
            self.watchers.discard(call)
        elif kind == "watch":
            self.watchers.add(call)
            self._down(call, "watch", (self.epoch, self._said_to_serve))
        elif kind == "identify" and message.kind != CANCEL:
            self._down(call, ANSWER, (self.epoch,))
        return kind in ("watch", "identify")

    def _happened(self) -> None:
        super()._happened()
        serves = self._serves()
        if serves != self._said_to_serve:
            self._said_to_serve = serves
            for call in sorted(self.watchers):
                self._down(call, "watch", (self.epoch, serves))

    @abstractmethod
    def _serves(self) -> bool:
        """Whether it takes new requests."""

    def _posted(self) -> list[str]:
        """The steps in which a loop hears what was posted to it."""
        return ["bulk"] * bool(self.to_bulk) + ["news"] * bool(self.news)

    def _take_posted(self, step: str) -> None:
        """Take one of the steps of `_posted`."""
        if step == "bulk":
            self._bulk(self.to_bulk.popleft())
        else:
            self._feed(self.news.popleft())

    def _catch_up(self) -> None:
        while posted := self._posted():
            self._take_posted(posted[0])

    def _check_drain(self, live: Iterable[TransferKey]) -> None:
        """See that nothing is there that came after the word to drain."""
        kept = self.kept
        if kept is not None:
            for key in set(live) - kept:
                self._wrong("a drain takes nothing new", f"{key} came after it")

    @abstractmethod
    def _bulk(self, action: Any) -> None:
        """The bulk side hears of this."""

    @abstractmethod
    def _feed(self, event: Any) -> None:
        """The machine hears of this, and what it wants is done."""
