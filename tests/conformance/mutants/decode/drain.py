"""D95x: drains that are none, or too much."""

from __future__ import annotations

import pytest

from pd_grpc.decode.actions import SessionEnd
from pd_grpc.decode.checks import draining
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.events import DrainRequested
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Sessions
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.view import DecodeView
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import admin_pb2, decode_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D950")
def the_answer_counts_nothing(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.drain

    def drain(self, deadline_s):  # type: ignore[no-untyped-def]
        right(self, deadline_s)
        return 0

    patch.setattr(DecodeView, "drain", drain)


@mutant("D951")
def a_drain_in_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "live", lambda self: [])


@mutant("D951")
def a_drain_without_its_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "drain", lambda self: decode_pb2.Drain())


@mutant("D952")
def whoever_waits_waits_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDesk, "drain", lambda self: None)


def _unaware(patch: pytest.MonkeyPatch, desk: type, rule: str) -> None:
    """One rule of a desk does not see that D drains."""
    right = getattr(desk, rule)

    def unaware(self, *arguments):  # type: ignore[no-untyped-def]
        draining, self._ledger.draining = self._ledger.draining, False
        try:
            right(self, *arguments)
        finally:
            self._ledger.draining = draining

    patch.setattr(desk, rule, unaware)


@mutant("D953")
def allocates_are_granted(patch: pytest.MonkeyPatch) -> None:
    _unaware(patch, PrefillDesk, "_allocate")


@mutant("D955")
def local_requests_are_taken(patch: pytest.MonkeyPatch) -> None:
    _unaware(patch, ClientDesk, "_begin")


@mutant("D956")
def legs_are_taken(patch: pytest.MonkeyPatch) -> None:
    _unaware(patch, ClientDesk, "_attach")


@mutant("D963")
def clients_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClientDesk, "drain", lambda self: None)


@mutant("D963")
def a_client_turned_away_is_remembered(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.drop

    def drop(self, transfer, fault):  # type: ignore[no-untyped-def]
        if transfer.client is not None:
            self.end(transfer, DecodeState.FAILED, fault)
        else:
            right(self, transfer, fault)

    patch.setattr(Ledger, "drop", drop)


@mutant("D954")
def nothing_is_answered_any_more(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._allocate

    def allocate(self, call, request):  # type: ignore[no-untyped-def]
        closed = self._ledger.closed()
        if closed is not None:
            raise closed
        right(self, call, request)

    patch.setattr(PrefillDesk, "_allocate", allocate)


@mutant("D957", "D958")
def sessions_know_of_no_drain(patch: pytest.MonkeyPatch) -> None:
    _unaware(patch, SessionDesk, "hello")


@mutant("D957")
def nobody_may_come_back(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.hello

    def hello(self, event):  # type: ignore[no-untyped-def]
        if self._ledger.draining:
            self._ledger.act(SessionEnd(event.stream, draining()))
        else:
            right(self, event)

    patch.setattr(SessionDesk, "hello", hello)


@mutant("D959")
def a_drain_is_a_private_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeView, "_health", lambda self, draining: admin_pb2.HEALTH_SERVING)


@mutant("D960")
def a_drain_leaves_health_as_it_is(patch: pytest.MonkeyPatch) -> None:
    right = ControlServer.set_ready

    def set_ready(self, ready, reason=""):  # type: ignore[no-untyped-def]
        if ready:
            right(self, ready, reason)

    patch.setattr(ControlServer, "set_ready", set_ready)


@mutant("D954", "D961")
def a_drain_ends_everything(patch: pytest.MonkeyPatch) -> None:
    right = DecodeMachine._drain

    def drain(self, event):  # type: ignore[no-untyped-def]
        right(self, DrainRequested(0.0))

    patch.setattr(DecodeMachine, "_drain", drain)


@mutant("D962")
def a_drain_is_patient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeMachine, "_drain_is_over", lambda self: None)
