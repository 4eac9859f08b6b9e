"""Whether the bulk side lives: it must say something while it has KV to send."""

from __future__ import annotations

from pd_grpc.prefill.actions import SenderAlive, SenderStuck
from pd_grpc.prefill.conversations import Conversations, Fail
from pd_grpc.prefill.grants import strand_bytes
from pd_grpc.prefill.requests import Requests, Timer
from pd_grpc.prefill.states import PrefillRecord, PrefillState, Stream
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.refs import TransferKey

SENDER = Timer("sender")


class SenderWatch:
    """A bulk loop that blocks reports nothing, not even that a shard is silent: its own timers do
    not run. What it owes a word about is counted here, and any word of it counts as life."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        layout: KvLayout,
        conversations: Conversations,
        fail: Fail,
    ) -> None:
        self.stuck: Fault | None = None
        """Set once it has been silent too long, until it says something."""
        self._requests = requests
        self._config = config
        self._layout = layout
        self._conversations = conversations
        self._fail = fail
        self._streaming: dict[TransferKey, PrefillRecord] = {}

    def opened(self, record: PrefillRecord) -> None:
        """A request has a stream."""
        self._streaming[record.key] = record

    def heard(self) -> None:
        """The bulk side has said something."""
        self._requests.timers.cancel(SENDER)
        if self.stuck is not None:
            self.stuck = None
            self._requests.do(SenderAlive())

    def look(self, now: float) -> None:
        """Count the time from the first moment on at which a word is owed."""
        if self.stuck is not None or self._requests.timers.at(SENDER) is not None:
            return
        done = [r for r in self._streaming.values() if not _streams(r)]
        for record in done:
            del self._streaming[record.key]
        if any(self._owed(record) for record in self._streaming.values()):
            self._requests.timers.set(SENDER, now + self._limit_s())

    def stick(self, now: float) -> None:
        """The time is over: fail what needs the sender, and take nothing meanwhile."""
        if not any(self._owed(record) for record in self._streaming.values()):
            return
        limit = f"{self._limit_s():g} s"
        fault = Fault(Reason.SENDER_STUCK, f"the KV sender has reported nothing for {limit}")
        self.stuck = fault
        self._requests.do(SenderStuck(fault))
        for record in list(self._requests.in_flight.values()):
            if _needs_sender(record):
                self._fail(record, fault, now, True)

    def owes(self, record: PrefillRecord, strand: int) -> bool:
        """Whether something must be heard of a strand's stream, which was given KV to send."""
        stream = record.streams[strand]
        if stream is not Stream.OPEN:
            return stream is Stream.CLOSING
        if record.state is not PrefillState.COMPUTING:
            return True
        assert record.grant is not None
        blocks = record.computed // self._layout.block_size
        given = strand_bytes(record.grant, strand, blocks, self._layout)
        return given > record.acked_bytes.get(strand, 0)

    def _limit_s(self) -> float:
        """A shard's own silence is reported after `kv_progress`, and must not be taken for ours."""
        silences = [
            2 * self._conversations[record.grant.endpoint].kv_progress_s
            for record in self._streaming.values()
            if record.grant is not None and not record.state.terminal
        ]
        return max([self._config.no_progress_s, *silences])

    def _owed(self, record: PrefillRecord) -> bool:
        return any(self.owes(record, strand) for strand in record.streams)


def _streams(record: PrefillRecord) -> bool:
    return any(stream.uses_blocks for stream in record.streams.values())


def _needs_sender(record: PrefillRecord) -> bool:
    if not record.kv_needed or record.finish is not None:
        return False
    streams = record.streams.values()
    return not streams or any(stream is not Stream.COMPLETED for stream in streams)
