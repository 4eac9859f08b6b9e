"""Faults planted into D, each of which breaks a promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.engine_desk import EngineDesk
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.prefix_reuse import PrefixReuse
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.reservations import Reservations
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Sessions
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.tombstones import Tombstones
from pd_grpc.testing.explorer.kv import BLOCK, TagMemory
from pd_grpc.testing.explorer.scenario import ALIKE, ONE_DECODE, SMALL
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.v1 import transfer_pb2
from tests.testing.planting import (
    IN_CHUNKS,
    PREEMPTING,
    Planted,
    after,
    nothing,
    nothing_done,
    with_only,
)

_give_back = Ledger._give_back
_granted = PrefixReuse.granted
_wanted = PrefixReuse.wanted


def _freed_while_written_to(self: Ledger, transfer: Any, fault: Any) -> None:
    transfer.kv_complete = True
    _give_back(self, transfer, fault)


def _blocks_kept(self: Ledger, transfer: Any, fault: Any) -> None:
    transfer.holding = None
    _give_back(self, transfer, fault)


def _still_scheduled(self: Ledger, transfer: Any, fault: Any) -> None:
    running = dict(self.scheduler._running)
    _give_back(self, transfer, fault)
    self.scheduler._running = running


def _kept_at_once(self: PrefixReuse, transfer: Any, holding: Any, cached: int) -> None:
    _granted(self, transfer, holding, cached)
    names = [each.hash for each in transfer.prefill.request.block_hashes]
    self._cache.add(names, holding.blocks[: len(names)])


def _found_and_wanted(self: PrefixReuse, transfer: Any) -> tuple[tuple[int, int], ...]:
    # Of a prompt that is there to its end D wants the last block again.
    start, count = (*_wanted(self, transfer), (transfer.cached_tokens // BLOCK - 1, 1))[0]
    return ((0, start + count),)


def _lease_kept(self: Ledger, transfer: Any) -> None:
    self.leases.start(transfer.grant_id, self.now)


def _decoded_without_kv(self: HandOff, transfer: Any) -> None:
    transfer.kv_complete = True
    transfer.kv_tokens = transfer.prefill.request.prompt_tokens if transfer.prefill else 0
    _try(self, transfer)


_try = HandOff._try


def _decoded_without_client(self: HandOff, transfer: Any) -> None:
    _try(self, transfer)
    if transfer.handed_off and transfer.state is DecodeState.READY:
        self._ledger.move(transfer, DecodeState.DECODING)


def _complete_at_once(self: Any, event: Any) -> None:
    transfer = self._receiving(event.grant_id)
    if transfer is not None:
        self._handoff.kv_completed(transfer)


_lose = SessionDesk._lose


_release = PrefillDesk._release


def _release_answered_only(self: PrefillDesk, request: Any) -> Any:
    return DecodeState.RELEASED.wire


def any_session(self: Sessions, session_id: str) -> Any:
    found = self._by_id.get(session_id) or next(iter(self._by_id.values()), None)
    assert found is not None
    return found


def _shown_again(self: Ledger, transfer: Any) -> None:
    held = list(transfer.held)
    _emit(self, transfer)
    transfer.held += held


_emit = Ledger.emit


def _not_written(self: TagMemory, blocks: Any, *args: Any) -> None:
    return None


def _swapped(self: Scheduler, transfer: Any) -> Any:
    slot = _slot_of(self, transfer)
    return type(slot)(slot.token_id, slot.position, slot.block_table[::-1], slot.sample)


_slot_of = Scheduler._slot_of


def _left_at_once(self: DecodeMachine, event: Any) -> None:
    self._leave(event)


_lose = SessionDesk._lose


def _all_lost(self: SessionDesk, owner: Any, why: str) -> None:
    for transfer in self._owned_by(owner):
        transfer.handed_off_at = None
    _lose(self, owner, why)


def _not_shown(self: HandOff, transfer: Any) -> None:
    self._try(transfer)


_chunk = Receiver._chunk


def _believed(self: Receiver, stream: int, state: Any, chunk: Any, payload: Any) -> Any:
    claimed = transfer_pb2.KvChunk()
    claimed.CopyFrom(chunk)
    claimed.crc32c = checksum([payload])
    return _chunk(self, stream, state, claimed, payload)


_resume = Scheduler._resume


def _resumed_without_kv(self: Scheduler) -> None:
    waiting = set(self._preempted)
    _resume(self)
    for grant_id in waiting & self._prefilling.keys():
        transfer = self._prefilling[grant_id]
        transfer.kv_tokens = max(0, len(transfer.tokens) - 2)


def _room_enough(*args: Any) -> bool:
    return True


def _not_kept(self: HandOff, transfer: Any, finish: Any) -> None:
    self._ledger.end(transfer, DecodeState.FINISHED, tell_prefill=False)


def _unknown(self: SessionDesk, session: Any, grant_id: str) -> bool:
    return False


DECODE = [
    Planted(
        "blocks are freed while KV is written to them",
        Ledger,
        "_give_back",
        _freed_while_written_to,
    ),
    Planted("quarantine never ends", Ledger, "stopped_writing", nothing),
    Planted(
        "what is granted is found before it has come", PrefixReuse, "granted", _kept_at_once, ALIKE
    ),
    Planted("what D has is written again", PrefixReuse, "wanted", _found_and_wanted, ALIKE),
    Planted("the blocks of an ended transfer are kept", Ledger, "_give_back", _blocks_kept),
    Planted("the engine runs what has ended", Ledger, "_give_back", _still_scheduled),
    Planted("the client is not told of an end", Ledger, "_end_client", nothing),
    Planted("a lease outlives its grant", Ledger, "_forget", after(Ledger._forget, _lease_kept)),
    Planted("a transfer has no budget", Ledger, "set_budget", nothing),
    Planted("a token is shown twice", Ledger, "emit", _shown_again),
    Planted("D decodes before the KV is there", HandOff, "_try", _decoded_without_kv),
    Planted("D decodes without a client", HandOff, "_try", _decoded_without_client),
    Planted("the hand-off never comes", HandOff, "_try", nothing),
    Planted(
        "the KV counts as complete at its first chunk",
        DecodeMachine,
        "_receive_progress",
        _complete_at_once,
        IN_CHUNKS,
    ),
    Planted(
        "a Release is answered and not obeyed", PrefillDesk, "_release", _release_answered_only
    ),
    Planted("a client that has left is served", ClientDesk, "call_ended", nothing),
    Planted("a step's end is not noticed", EngineDesk, "_finish_step", nothing),
    Planted("the queue is left by nobody", Reservations, "leave", nothing, ONE_DECODE),
    Planted("everybody waits for blocks", Reservations, "next_fitting", nothing, ONE_DECODE),
    Planted("KV is acknowledged and not written", TagMemory, "write", _not_written),
    Planted("D reads its blocks in another order", Scheduler, "_slot_of", _swapped),
    Planted("a shard goes on writing after the end", Receiver, "close_grant", nothing_done),
    Planted("nothing that ended is remembered", Tombstones, "add", nothing),
    Planted("a call of any session is obeyed", Sessions, "of_call", any_session),
    Planted("a draining D takes what is new", Ledger, "closed", nothing),
    Planted("D's drain ends what runs", DecodeMachine, "_drain", _left_at_once),
    Planted("a lost P takes what D owns with it", SessionDesk, "_lose", _all_lost),
    Planted("a client that comes too late hears nothing", ClientDesk, "_too_late", nothing),
    Planted("a client that comes late misses the first token", HandOff, "attached", _not_shown),
    Planted("a corrupt chunk is taken", Receiver, "_chunk", _believed, with_only(SMALL, "corrupt")),
    Planted(
        "a preempted request is thought to have its KV",
        Scheduler,
        "_resume",
        _resumed_without_kv,
        PREEMPTING,
    ),
    Planted("D decodes into blocks it has not", Scheduler, "_make_room", _room_enough, PREEMPTING),
    Planted("no grant is renewed", SessionDesk, "_renew", _unknown, with_only(SMALL, "hang")),
    Planted(
        "an answer of one token is not kept for its client",
        HandOff,
        "_finish_unseen",
        _not_kept,
        replace(SMALL, max_tokens=1),
    ),
]
