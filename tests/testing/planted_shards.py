"""Faults planted into what is said of several shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pd_grpc.decode.incoming import IncomingGrant
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.quarantine import Quarantine, receiver
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.states import Stream
from pd_grpc.testing.explorer import scenario
from pd_grpc.testing.explorer.scenario import GATHERED, SHARDED_BOTH
from tests.testing.planting import Planted, with_only

_ONE_P = scenario.SHARDED
_FINE = replace(with_only(_ONE_P, "leave"), fine=True)

_take = Quarantine.take
_stopped = Quarantine.stopped
_handed_over = Handover.completed


def _complete_with_one(self: DecodeMachine, event: Any) -> None:
    transfer = self._receiving(event.grant_id)
    if transfer is not None:
        self._handoff.kv_completed(transfer)


def _any_shard(self: Quarantine, grant_id: str, writer: str) -> None:
    _stopped(self, grant_id, writer)
    for shard in range(2):
        if writer == receiver(shard):
            _stopped(self, grant_id, receiver(1 - shard))


def _first_shard_writes(
    self: Quarantine, grant_id: str, key: Any, holding: Any, owner: Any, writers: Any, *rest: Any
) -> None:
    _take(self, grant_id, key, holding, owner, writers - {receiver(1)}, *rest)


def _over_with_one(self: Handover, key: Any, strand: int, now: float) -> None:
    record = self._requests.in_flight.get(key)
    if record is not None:
        for other in record.streams.keys() - {strand}:
            record.streams[other] = Stream.COMPLETED
    _handed_over(self, key, strand, now)


def _to_the_first(self: Handover, record: Any, now: float) -> None:
    if record.kv_needed:
        self._open(record, 0, now)


def _one_sender(self: IncomingGrant, incoming: Any) -> bool:
    incoming.ended = True
    return True


SHARDED = [
    Planted(
        "READY when one shard has its part",
        DecodeMachine,
        "_receive_completed",
        _complete_with_one,
        _ONE_P,
    ),
    Planted(
        "the first shard to close frees the blocks", Quarantine, "stopped", _any_shard, _FINE, 1
    ),
    Planted("blocks wait for one shard", Quarantine, "take", _first_shard_writes, _FINE, 1),
    Planted(
        "P hands over when one shard has its part",
        Handover,
        "completed",
        _over_with_one,
        SHARDED_BOTH,
    ),
    Planted("P sends to one shard", Handover, "starting", _to_the_first, SHARDED_BOTH),
    Planted(
        "the first of two senders to end has sent everything",
        IncomingGrant,
        "end",
        _one_sender,
        GATHERED,
    ),
]
