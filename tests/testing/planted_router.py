"""Faults planted into the router and the pool, each of which breaks a promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.protocol.faults import Fault
from pd_grpc.router import recovery
from pd_grpc.router.machine import CancelDecode, CancelPrefill, Fail, Leg, RoutedRequest
from pd_grpc.router.recovery import RecoveringRequest
from pd_grpc.router.retry_budget import RetryBudget
from pd_grpc.router.suspects import NOBODY, Blame, blamed
from pd_grpc.testing.explorer.scenario import RECOVERY
from tests.testing.planting import Planted, nothing_done, with_only

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
        "the decode leg's failure is not heard", RoutedRequest, "on_decode_failed", nothing_done
    ),
    Planted("blocks are freed twice", BlockPool, "_release", _freed_twice),
]

# --- the router's recovery -----------------------------------------------------------------------

_TWO_OF_EACH, _ONE_DECODE, _, _ = RECOVERY


def _given_up(self: RecoveringRequest, fault: Fault, now: float) -> list[Any]:
    return [Fail(fault)]


def _nobody(fault: Fault, request: RoutedRequest) -> Blame:
    return NOBODY


def _decode_alone(fault: Fault, request: RoutedRequest) -> Blame:
    return frozenset({Leg.DECODE}) if blamed(fault, request) else NOBODY


def _left_open(self: RoutedRequest) -> list[Any]:
    return [a for a in _router_end(self) if not isinstance(a, CancelPrefill | CancelDecode)]


_decode_failed = RoutedRequest.on_decode_failed


def _held_first(self: RoutedRequest, leg: int, error: Any, now: float) -> list[Any]:
    """What P said is the cause, though it was a consequence of this loss."""
    late = self.ended or leg != self.leg or self._answer_complete
    if self._held is not None and not isinstance(error, Fault) and not late:
        return self._fail(self._held)
    return _decode_failed(self, leg, error, now)


_on_pairing = RecoveringRequest.on_pairing


def _same_number(self: RecoveringRequest, pairing: Any, now: float) -> list[Any]:
    self.attempt -= 1
    return _on_pairing(self, pairing, now)


def _seeking_still(self: RecoveringRequest) -> None:
    for name in ("budget", "wait", "again"):
        self.timers.cancel(name)


_on_time = RecoveringRequest.on_time


def _never_due(self: RecoveringRequest, now: float) -> list[Any]:
    return [] if self.seeking else _on_time(self, now)


def _refused(self: RetryBudget) -> bool:
    return False


RECOVERING = [
    Planted(
        "nothing is tried elsewhere",
        RecoveringRequest,
        "_fail",
        _given_up,
        with_only(_TWO_OF_EACH, "crash"),
    ),
    Planted("nobody is to blame", recovery, "blamed", _nobody, with_only(_TWO_OF_EACH, "crash")),
    Planted(
        "every failure is D's", recovery, "blamed", _decode_alone, with_only(_ONE_DECODE, "crash")
    ),
    Planted(
        "the legs of an attempt are left open",
        RoutedRequest,
        "_end",
        _left_open,
        with_only(_TWO_OF_EACH, "crash"),
    ),
    Planted(
        "a client that has left is not heard",
        RecoveringRequest,
        "on_client_gone",
        nothing_done,
        with_only(_TWO_OF_EACH, "leave"),
    ),
    Planted(
        "a consequence is told for its cause",
        RoutedRequest,
        "on_decode_failed",
        _held_first,
        with_only(_TWO_OF_EACH, "lose"),
    ),
    Planted(
        "two attempts have one number",
        RecoveringRequest,
        "on_pairing",
        _same_number,
        with_only(_ONE_DECODE, "crash"),
    ),
    Planted(
        "the retry budget holds nothing",
        RetryBudget,
        "take",
        _refused,
        with_only(_TWO_OF_EACH, "lose"),
    ),
    Planted(
        "another attempt is sought while one runs",
        RecoveringRequest,
        "_stop_seeking",
        _seeking_still,
        with_only(_TWO_OF_EACH, "crash"),
    ),
    Planted(
        "the wait for another instance never ends",
        RecoveringRequest,
        "on_time",
        _never_due,
        with_only(_ONE_DECODE, "freeze"),
    ),
]
