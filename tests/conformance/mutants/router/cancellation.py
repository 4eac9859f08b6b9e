"""R5xx: legs and names that outlive their client, and time that grows."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.router import machine
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.machine import RoutedRequest
from pd_grpc.router.runtime import RoutedCall
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R501", "R502")
def the_legs_outlive_their_client(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.close

    async def wrong(self):  # type: ignore[no-untyped-def]
        self._tasks = set()
        await right(self)

    patch.setattr(RoutedCall, "close", wrong)
    patch.setattr(RoutedRequest, "on_client_gone", lambda self, now: [])


@mutant("R503")
def a_name_stays_taken_when_its_client_leaves(patch: pytest.MonkeyPatch) -> None:
    right = InFlight.named
    taken: set[str] = set()

    @contextmanager
    def wrong(self, request_id):  # type: ignore[no-untyped-def]
        if request_id in taken:
            raise Fault(Reason.DUPLICATE_REQUEST, "its name is in flight")
        with right(self, request_id):
            try:
                yield
            except asyncio.CancelledError:
                taken.add(request_id)
                raise

    patch.setattr(InFlight, "named", wrong)


@mutant("R511")
def each_leg_has_the_default_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttemptLegs, "_left", lambda self: 300.0)


@mutant("R512")
def legs_without_a_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttemptLegs, "_left", lambda self: None)


@mutant("R513")
def the_clients_timer_is_the_first(patch: pytest.MonkeyPatch) -> None:
    right = rpc.budget_of
    patch.setattr(rpc, "budget_of", lambda context, timeouts: right(context, timeouts) + 1.0)


@mutant("R514")
def every_stage_is_the_first(patch: pytest.MonkeyPatch) -> None:
    right = stage_deadline
    patch.setattr(machine, "stage_deadline", lambda stage: right("prepare"))
