"""Faults planted into P, each of which breaks a promise."""

from __future__ import annotations

from typing import Any

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill import releases
from pd_grpc.prefill.compute import Compute
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.placement import Placement
from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.scheduler import PrefillScheduler
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.testing.explorer.scenario import DIRECT, SMALL
from tests.testing.planting import IN_CHUNKS, Planted, after, nothing, with_only


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


def _drained_at_once(self: PrefillMachine, deadline_s: float, now: float) -> None:
    self.draining = True
    self._end_drain(now)


_advance = TransferSender.advance


def _ahead(self: TransferSender, group: int, layer: int, tokens: int) -> None:
    _advance(self, group, layer, tokens + 2)


_beat = DecodeSession._beat


def _nothing_listed(self: DecodeSession, now: float) -> Any:
    held = dict(self.grants)
    self.grants.clear()
    beat = _beat(self, now)
    self.grants.update(held)
    return beat


_opening = TransferSender.opening


def _sent_before(self: TransferSender, now: float) -> None:
    states = [bytes(layer.state) for layer in self._layers]
    _opening(self, now)
    for layer, state in zip(self._layers, states, strict=True):
        layer.state[:] = state


def _once(fault: Any) -> bool:
    return False


PREFILL = [
    Planted("D is not told of an end", Placement, "_release", nothing),
    Planted(
        "P takes blocks before it has a grant",
        PrefillMachine,
        "_called",
        after(PrefillMachine._called, _blocks_before_the_grant),
    ),
    Planted("P goes on for a caller who has left", PrefillMachine, "_call_ended", nothing),
    Planted("P frees blocks that are being sent", Requests, "return_blocks", _freed_at_once),
    Planted("P frees nothing", Requests, "return_blocks", nothing),
    Planted("P's streams outlive the request", Handover, "forget", nothing),
    Planted("P hands off before D has the KV", Handover, "_try_hand_off", _handed_off_early),
    Planted("P never hands off", Handover, "_try_hand_off", nothing),
    Planted("a place in the window is never given back", PreparePool, "withdraw", nothing),
    Planted("P's engine never finishes", Compute, "_finish", _step_goes_on),
    Planted(
        "a refusal ends the request without a word to D", Placement, "turn_away", _unlearned, DIRECT
    ),
    Planted("P computes nothing that is prepared", PrefillScheduler, "add", nothing),
    Planted("a draining P takes what is new", PrefillMachine, "_drain", nothing),
    Planted("P's drain ends what runs", PrefillMachine, "_drain", _drained_at_once),
    Planted("KV is sent before it is computed", TransferSender, "advance", _ahead, IN_CHUNKS),
    Planted("P's timers do nothing", PrefillMachine, "_fire", nothing, with_only(SMALL, "hang")),
    Planted("a failed step fails nobody", Compute, "failed", nothing, with_only(SMALL, "fail")),
    Planted(
        "a broken stream is not opened again",
        Handover,
        "reopen",
        nothing,
        with_only(SMALL, "lose"),
    ),
    Planted(
        "a heartbeat lists no grants",
        DecodeSession,
        "_beat",
        _nothing_listed,
        with_only(SMALL, "hang"),
    ),
    Planted(
        "after a break nothing is sent again",
        TransferSender,
        "opening",
        _sent_before,
        with_only(SMALL, "lose"),
        12_000,
        1,
    ),
    Planted(
        "a first token is sent once",
        Handover,
        "_send_again",
        nothing,
        with_only(SMALL, "lose"),
        12_000,
        1,
    ),
    Planted(
        "a release is sent once",
        releases,
        "_again_may_do",
        _once,
        with_only(SMALL, "fail", "lose"),
        14_000,
    ),
]
