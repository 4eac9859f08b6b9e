"""Faults planted into P, D and the router, each of which breaks a promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.decode import prefill_desk
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.engine_desk import EngineDesk
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.reservations import Reservations
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Sessions
from pd_grpc.decode.states import DecodeState
from pd_grpc.prefill.compute import Compute
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.placement import Placement
from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.scheduler import PrefillScheduler
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.machine import CancelDecode, RoutedRequest
from pd_grpc.testing.explorer.kv import TagMemory
from pd_grpc.testing.explorer.scenario import DIRECT, ONE_DECODE, SMALL, Scenario

IN_CHUNKS = Scenario(
    prefills=1, decodes=1, requests=((0, (0,)),), prompts=(5,), chunk_tokens=2, decode_blocks=4
)


class Planted(NamedTuple):
    """A fault: what it replaces, and where it shows."""

    name: str
    owner: Any
    attribute: str
    instead: Callable[..., Any]
    scenario: Scenario = SMALL


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _nothing_done(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def _after(original: Callable[..., Any], more: Callable[..., Any]) -> Callable[..., Any]:
    """The original, and then more."""

    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        more(self, *args, **kwargs)
        return found

    return both


# --- D -------------------------------------------------------------------------------------------

_give_back = Ledger._give_back


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


def _any_session(self: Sessions, session_id: str) -> Any:
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

DECODE = [
    Planted(
        "blocks are freed while KV is written to them",
        Ledger,
        "_give_back",
        _freed_while_written_to,
    ),
    Planted("quarantine never ends", Ledger, "stopped_writing", _nothing),
    Planted("the blocks of an ended transfer are kept", Ledger, "_give_back", _blocks_kept),
    Planted("the engine runs what has ended", Ledger, "_give_back", _still_scheduled),
    Planted("the client is not told of an end", Ledger, "_end_client", _nothing),
    Planted("a lease outlives its grant", Ledger, "_forget", _after(Ledger._forget, _lease_kept)),
    Planted("a transfer has no budget", Ledger, "set_budget", _nothing),
    Planted("a token is shown twice", Ledger, "emit", _shown_again),
    Planted("D decodes before the KV is there", HandOff, "_try", _decoded_without_kv),
    Planted("D decodes without a client", HandOff, "_try", _decoded_without_client),
    Planted("the hand-off never comes", HandOff, "_try", _nothing),
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
    Planted("a client that has left is served", ClientDesk, "call_ended", _nothing),
    Planted("a step's end is not noticed", EngineDesk, "_finish_step", _nothing),
    Planted("the queue is left by nobody", Reservations, "leave", _nothing, ONE_DECODE),
    Planted("everybody waits for blocks", Reservations, "next_fitting", _nothing, ONE_DECODE),
    Planted("KV is acknowledged and not written", TagMemory, "write", _not_written),
    Planted("D reads its blocks in another order", Scheduler, "_slot_of", _swapped),
    Planted("a shard goes on writing after the end", Receiver, "close_grant", _nothing_done),
]

# --- P -------------------------------------------------------------------------------------------


def _blocks_before_the_grant(self: PrefillMachine, event: Any, now: float) -> None:
    for record in self.requests.in_flight.values():
        if record.holding is None:
            record.holding = self.pool.reserve(1, BlockState.COMPUTING)


def _freed_at_once(self: Requests, record: Any) -> None:
    if record.holding is not None and record.state.terminal:
        record.holding.release()
        record.holding = None
        self._lingering.pop(record.key, None)


_try_hand_off = Handover._try_hand_off


def _handed_off_early(self: Handover, record: Any, now: float) -> None:
    record.first_token_delivered = True
    record.streams.clear()
    _try_hand_off(self, record, now)


def _step_goes_on(self: Compute, step: int) -> None:
    return None


def _unlearned(self: Placement, record: Any, fault: Any, now: float) -> None:
    self._fail(record, fault if hasattr(fault, "reason") else _bare(fault), now, False)


def _bare(fault: Any) -> Any:
    return Fault(Reason.DECODE_LOST, str(fault))


PREFILL = [
    Planted("D is not told of an end", Placement, "_release", _nothing),
    Planted(
        "P takes blocks before it has a grant",
        PrefillMachine,
        "_called",
        _after(PrefillMachine._called, _blocks_before_the_grant),
    ),
    Planted("P goes on for a caller who has left", PrefillMachine, "_call_ended", _nothing),
    Planted("P frees blocks that are being sent", Requests, "return_blocks", _freed_at_once),
    Planted("P frees nothing", Requests, "return_blocks", _nothing),
    Planted("P's streams outlive the request", Handover, "forget", _nothing),
    Planted("P hands off before D has the KV", Handover, "_try_hand_off", _handed_off_early),
    Planted("P never hands off", Handover, "_try_hand_off", _nothing),
    Planted("a place in the window is never given back", PreparePool, "withdraw", _nothing),
    Planted("P's engine never finishes", Compute, "_finish", _step_goes_on),
    Planted(
        "a refusal ends the request without a word to D", Placement, "turn_away", _unlearned, DIRECT
    ),
    Planted("P computes nothing that is prepared", PrefillScheduler, "add", _nothing),
]

# --- the router and the pool ---------------------------------------------------------------------

_router_end = RoutedRequest._end


def _end_without(kind: type) -> Callable[..., Any]:
    def end(self: RoutedRequest) -> list[Any]:
        return [action for action in _router_end(self) if not isinstance(action, kind)]

    return end


def _freed_twice(self: BlockPool, holding: Any) -> None:
    self._free.extend(holding.blocks)
    _pool_release(self, holding)


_pool_release = BlockPool._release

ROUTER = [
    Planted("the decode leg is left open", RoutedRequest, "_end", _end_without(CancelDecode)),
    Planted(
        "the decode leg's failure is not heard", RoutedRequest, "on_decode_failed", _nothing_done
    ),
    Planted("blocks are freed twice", BlockPool, "_release", _freed_twice),
]

ALL = [*DECODE, *PREFILL, *ROUTER]


@contextlib.contextmanager
def planted(*faults: Planted) -> Iterator[None]:
    """The faults are there while this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            patch.setattr(fault.owner, fault.attribute, fault.instead)
        yield


def _no_check(*args: Any, **kwargs: Any) -> None:
    return None


NO_FENCE = [
    Planted("any session will do", Sessions, "of_call", _any_session),
    Planted("any epoch will do", prefill_desk, "check_ref", _no_check),
]
"""Together: a message meant for a process that is gone is obeyed by the one in its place."""
