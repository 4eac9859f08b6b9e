"""How long a request goes on with a shard that it has lost, or that acknowledges nothing."""

from __future__ import annotations

import math

from pd_grpc.prefill.conversations import Conversations, Fail
from pd_grpc.prefill.decode_faults import no_answer
from pd_grpc.prefill.requests import Requests, Timer
from pd_grpc.prefill.states import PrefillRecord
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.refs import TransferKey


class ShardSilence:
    """A stream that has broken must reach its shard again within D's grace: a session whose
    connection is lost has no longer either. One that does, and breaks again and again, has the time
    that a shard may be silent while it owes something."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        conversations: Conversations,
        fail: Fail,
    ) -> None:
        self._requests = requests
        self._config = config
        self._conversations = conversations
        self._fail = fail

    def lost(
        self, record: PrefillRecord, strand: int, fault: Fault | None, owed: bool, now: float
    ) -> None:
        """The stream of a strand has broken, and something was `owed` on it or not. `fault` is what
        the request fails with if none comes back; None for D's silence."""
        record.lost[strand] = fault
        timers, kv = self._requests.timers, Timer("kv", record.key, strand)
        if strand not in record.silent_since or not owed:
            record.silent_since[strand] = now
        until = min(now + self._grace_s(record), timers.at(kv) or math.inf)
        timers.set(kv, min(until, record.silent_since[strand] + self._kv_progress_s(record)))

    def reached(self, key: TransferKey, strand: int) -> None:
        """A stream that had broken has reached its shard again, and may go on: how long the shard
        may be silent now is the sender's to count, for it alone knows what the shard owes."""
        record = self._requests.in_flight.get(key)
        if record is None or strand not in record.silent_since:
            self._requests.late_events += 1
            return
        self._requests.timers.cancel(Timer("kv", record.key, strand))

    def ended(self, record: PrefillRecord, strand: int) -> None:
        """A shard has acknowledged something of a strand."""
        record.silent_since.pop(strand, None)
        self._requests.timers.cancel(Timer("kv", record.key, strand))

    def too_long(self, key: TransferKey, strand: int, now: float) -> None:
        """A broken stream has not come back in time. While there is no session either, its grace
        decides."""
        record = self._requests.in_flight.get(key)
        if record is None or record.grant is None:
            return
        endpoint = record.grant.endpoint
        if self._conversations.is_open(endpoint):
            silent = no_answer(endpoint, "transfer")
            self._fail(record, record.lost.get(strand) or silent, now, True)
        else:
            self._requests.timers.set(Timer("kv", key, strand), now + self._grace_s(record))

    def _grace_s(self, record: PrefillRecord) -> float:
        """D's grace, or what one more try takes."""
        assert record.grant is not None
        grace_s = seconds(self._conversations[record.grant.endpoint].welcome.grace)
        return max(grace_s, self._config.reconnect_max_s)

    def _kv_progress_s(self, record: PrefillRecord) -> float:
        assert record.grant is not None
        return self._conversations[record.grant.endpoint].kv_progress_s
