"""The bulk side of a D of the world: the real receiver, and what its shell does with streams."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import EndStream, Receiver, Respond
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.testing.explorer.borrowing import WriteInto
from pd_grpc.testing.explorer.engine_process import EngineProcess
from pd_grpc.testing.explorer.kv import UNCUT, Cut
from pd_grpc.testing.explorer.lending import Lending
from pd_grpc.testing.explorer.process import shard_of
from pd_grpc.testing.explorer.wire import CANCEL, Interned, Message
from pd_grpc.transport.chunk_codec import IncomingChunk

STRAY = "a block that a writer may touch is its own"


class ReceivingProcess(EngineProcess):
    """What of a D takes KV in. It hears what the control loop posts, and posts what comes of it."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: DecodeConfig,
        fine: bool,
        lends: bool = False,
        cut: Cut = UNCUT,
    ) -> None:
        """`lends` its memory to Ps."""
        shared = config.prefix_cache > 0
        super().__init__(name, epoch, ids, config.num_blocks, fine, shared, lends, cut)
        self.config = config
        self.lends = lends
        self.streams: dict[int, int] = {}
        """Open Transfer calls, each with the shard that it is made to."""
        self.lending = Lending(self.memory, epoch, self._writer) if lends else None
        transports = None if self.lending is None else self.lending.transports
        self.receivers = [
            Receiver(config, cut.layout, self.memory, epoch, transports, shard, place.part)
            for shard, place in enumerate(cut.places)
        ]
        """One for each shard, and each a loop of its own."""
        self.to_others: list[deque[Any]] = [deque() for _ in self.receivers[1:]]
        """What the shards but the first have yet to hear; of that one it is `to_bulk`."""
        self.left = False
        """Whether it has said goodbye, and its memory goes with it."""

    def _writer(self, name: str, epoch: int, writes: bool) -> None:
        owner = Owner(name, epoch)
        self.news.append(ev.WriterAttached(owner) if writes else ev.WriterGone(owner))

    def _lend(self, call: int, message: Message) -> None:
        """Of the connection by which a P borrows the memory."""
        assert self.lending is not None
        if message.kind != "attach":
            self.lending.heard(call, message)
            return
        name, epoch, meant = message.body
        if meant == self.epoch:
            self.lending.attach(call, Owner(name, epoch))
            self._down(call, "pool")
        else:
            self._end(call, None)

    def _written_to(self, wanted: WriteInto) -> None:
        """A P's write has landed."""
        self._check_written(wanted.places)
        may = self.writable()
        stray = [block for block in wanted.places if (wanted.grant_id, block) not in (may or ())]
        if stray and may is not None:
            self._wrong(STRAY, f"{wanted.grant_id} is written to blocks {stray}")
        self.memory.write(wanted.places, 0, 0, 1, memoryview(wanted.payload))

    @abstractmethod
    def writable(self) -> frozenset[tuple[str, int]] | None:
        """The blocks that Ps may write to, each with the grant in whose name; None for all."""

    def _transfer(self, call: int, message: Message) -> None:
        shard = shard_of(self._ids.calls[call].name)
        receiver = self.receivers[shard]
        if message.kind == CANCEL:
            self.streams.pop(call, None)
            receiver.stream_ended(call)
        elif message.kind == "chunk":
            if call in self.streams:
                header, payload, *corrupt = message.body
                chunk = IncomingChunk(header, memoryview(payload))
                actions = receiver.message(call, chunk, self.now)
                if corrupt and not any(isinstance(a, EndStream) and a.fault for a in actions):
                    self._wrong("no token from unverified KV", "it took a corrupt chunk")
                self._receive(actions)
        elif message.body.HasField("open"):
            self.streams[call] = shard
            receiver.stream_began(call)
            self._receive(receiver.message(call, message.body, self.now))
        elif call in self.streams:
            self._receive(receiver.message(call, message.body, self.now))

    def _expire(self) -> None:
        for receiver in self.receivers:
            self._receive(receiver.tick(self.now))

    def _post_to_shards(self, action: act.ToReceiver) -> None:
        for queue in (self.to_bulk, *self.to_others):
            queue.append(action)

    def _posted(self) -> list[str]:
        others = [f"bulk@{i + 1}" for i, queue in enumerate(self.to_others) if queue]
        return [*super()._posted(), *others]

    def _take_posted(self, step: str) -> None:
        shard = shard_of(step)
        if shard:
            self._shard(self.receivers[shard], self.to_others[shard - 1].popleft())
        else:
            super()._take_posted(step)

    def _bulk(self, action: act.ToReceiver) -> None:
        self._shard(self.receivers[0], action)

    def _all_shards(self, action: act.ToReceiver) -> None:
        """Every shard hears of this at once."""
        for receiver in self.receivers:
            self._shard(receiver, action)

    def _shard(self, receiver: Receiver, action: act.ToReceiver) -> None:
        match action:
            case act.OpenReceive(grant_id, key, owner, blocks, wanted, transport, senders):
                for start, count in wanted:
                    self._check_written(blocks[start : start + count])
                grant = grant_id, key, owner, blocks, wanted, transport, senders
                self._receive(receiver.open_grant(*grant))
            case act.CloseReceive(grant_id, fault):
                self._receive(receiver.close_grant(grant_id, fault, self.now))
            case act.AdmitSession(owner, session_id):
                receiver.sessions.admit(owner, session_id)
            case act.DismissPrefill(owner):
                receiver.sessions.dismiss(owner)

    def _receive(self, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Respond):
                if action.message.HasField("ack"):
                    said = action.message.ack.accepted_bytes
                    receiver = self.receivers[shard_of(self._ids.calls[action.stream].name)]
                    receiver.acknowledged(action.stream, said)
                if action.stream in self.streams:
                    self._down(action.stream, "transfer", action.message)
            elif isinstance(action, EndStream):
                if action.stream in self.streams:
                    del self.streams[action.stream]
                    self._end(action.stream, action.fault)
            else:
                self.news.append(action)
