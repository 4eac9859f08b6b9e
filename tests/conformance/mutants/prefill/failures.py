"""P5xx: failures that are not told, or told wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.prefill import conversations, machine
from pd_grpc.prefill.conversations import Conversations
from pd_grpc.prefill.decode_faults import end_state_fault
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.placement import Placement
from pd_grpc.prefill.releases import Releases
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant


@mutant("P501")
def unknown_grants_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Conversations, "_lose_grants", lambda self, session, grant_ids, now: None)


@mutant("P502")
def ends_lose_their_status(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(conversations, "ended_fault", lambda ended: end_state_fault(ended.state))


@mutant("P503")
def ends_without_a_status_are_not_heard(patch: pytest.MonkeyPatch) -> None:
    right = Conversations._ended

    def wrong(self, session, ended, now):  # type: ignore[no-untyped-def]
        if ended.status.code:
            right(self, session, ended, now)

    patch.setattr(Conversations, "_ended", wrong)


@mutant("P504", "P505")
def nothing_is_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_release", lambda self, record, cause, now: None)


@mutant("P505", "P602")
def releases_without_their_cause(patch: pytest.MonkeyPatch) -> None:
    right = Releases.give_back

    def wrong(self, key, endpoint, session_id, decode_epoch, cause, now, *stopped):  # type: ignore[no-untyped-def]
        unsaid = Fault(Reason.RELEASED, "released")
        right(self, key, endpoint, session_id, decode_epoch, unsaid, now, *stopped)

    patch.setattr(Releases, "give_back", wrong)


@mutant("P506")
def causes_without_metadata(patch: pytest.MonkeyPatch) -> None:
    right = Releases.give_back

    def wrong(self, key, endpoint, session_id, decode_epoch, cause, now, *stopped):  # type: ignore[no-untyped-def]
        bare = Fault(cause.reason, cause.message)
        right(self, key, endpoint, session_id, decode_epoch, bare, now, *stopped)

    patch.setattr(Releases, "give_back", wrong)


@mutant("P510")
def the_budget_outlives_the_caller(patch: pytest.MonkeyPatch) -> None:
    right = rpc.budget_of
    patch.setattr(rpc, "budget_of", lambda context, timeouts: right(context, timeouts) + 1.0)


@mutant("P511")
def every_stage_is_allocate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "stage_of", lambda record: "allocate")


@mutant("P512", "P513")
def the_last_two_stages_are_confused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        machine,
        "stage_of",
        lambda record: "first_token" if record.first_token_delivered else "transfer",
    )


@mutant("P520")
def a_refused_first_token_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    right = Handover.first_token_answered

    def wrong(self, event, now):  # type: ignore[no-untyped-def]
        if event.fault is not None:
            event = replace(event, fault=Fault(Reason.NO_SESSION, "whatever it was"))
        right(self, event, now)

    patch.setattr(Handover, "first_token_answered", wrong)
