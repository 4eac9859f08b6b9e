"""The bulk side of a D of the world: the real receiver, and what its shell does with streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pd_grpc.decode import actions as act
from pd_grpc.decode.receiver import EndStream, Receiver, Respond
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.testing.explorer.engine_process import EngineProcess
from pd_grpc.testing.explorer.kv import LAYOUT
from pd_grpc.testing.explorer.wire import CANCEL, Interned, Message
from pd_grpc.transport.chunk_codec import IncomingChunk


class ReceivingProcess(EngineProcess):
    """What of a D takes KV in. It hears what the control loop posts, and posts what comes of it."""

    def __init__(
        self, name: str, epoch: int, ids: Interned, config: DecodeConfig, fine: bool
    ) -> None:
        super().__init__(name, epoch, ids, config.num_blocks, fine, shared=config.prefix_cache > 0)
        self.config = config
        self.streams: set[int] = set()
        self.receiver = Receiver(config, LAYOUT, self.memory, epoch)

    def _transfer(self, call: int, message: Message) -> None:
        if message.kind == CANCEL:
            self.streams.discard(call)
            self.receiver.stream_ended(call)
        elif message.kind == "chunk":
            if call in self.streams:
                header, payload, *corrupt = message.body
                chunk = IncomingChunk(header, memoryview(payload))
                actions = self.receiver.message(call, chunk, self.now)
                if corrupt and not any(isinstance(a, EndStream) and a.fault for a in actions):
                    self._wrong("no token from unverified KV", "it took a corrupt chunk")
                self._receive(actions)
        elif message.body.HasField("open"):
            self.streams.add(call)
            self.receiver.stream_began(call)
            self._receive(self.receiver.message(call, message.body, self.now))
        elif call in self.streams:
            self._receive(self.receiver.message(call, message.body, self.now))

    def _bulk(self, action: act.ToReceiver) -> None:
        match action:
            case act.OpenReceive(grant_id, key, owner, blocks, wanted):
                for start, count in wanted:
                    self._check_written(blocks[start : start + count])
                self._receive(self.receiver.open_grant(grant_id, key, owner, blocks, wanted))
            case act.CloseReceive(grant_id, fault):
                self._receive(self.receiver.close_grant(grant_id, fault, self.now))
            case act.AdmitSession(owner, session_id):
                self.receiver.sessions.admit(owner, session_id)
            case act.DismissPrefill(owner):
                self.receiver.sessions.dismiss(owner)

    def _receive(self, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Respond):
                if action.message.HasField("ack"):
                    said = action.message.ack.accepted_bytes
                    self.receiver.acknowledged(action.stream, said)
                if action.stream in self.streams:
                    self._down(action.stream, "transfer", action.message)
            elif isinstance(action, EndStream):
                if action.stream in self.streams:
                    self.streams.remove(action.stream)
                    self._end(action.stream, action.fault)
            else:
                self.news.append(action)
