"""R7xx: what an operator is told wrongly."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.admin import RouterAdmin
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R701")
def a_router_says_it_is_a_decode_instance(patch: pytest.MonkeyPatch) -> None:
    right = RouterAdmin.server_info

    def wrong(self):  # type: ignore[no-untyped-def]
        info = right(self)
        info.instance.role = types_pb2.ROLE_DECODE
        return info

    patch.setattr(RouterAdmin, "server_info", wrong)


@mutant("R702")
def requests_never_stream(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall._state_is

    def wrong(self, state):  # type: ignore[no-untyped-def]
        if state != types_pb2.TRANSFER_STATE_STREAMING:
            right(self, state)

    patch.setattr(RoutedCall, "_state_is", wrong)


@mutant("R703")
def the_peers_are_the_wrong_way_round(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.info

    def wrong(self):  # type: ignore[no-untyped-def]
        info = right(self)
        info.peer = " > ".join(reversed(info.peer.split(" > ")))
        return info

    patch.setattr(RoutedCall, "info", wrong)


@mutant("R704")
def what_has_ended_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "ended", lambda self, transfer_id, attempt: None)


@mutant("R705")
def released_for_another_reason(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.fail

    def wrong(self, fault):  # type: ignore[no-untyped-def]
        right(self, Fault(Reason.DRAINING, fault.message))

    patch.setattr(RoutedCall, "fail", wrong)


@mutant("R706")
def the_end_is_not_told(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, request):  # type: ignore[no-untyped-def]
        del self._running[request.key.transfer_id]

    patch.setattr(InFlight, "remove", wrong)
