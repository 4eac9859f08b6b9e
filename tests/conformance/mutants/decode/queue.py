"""D24x: a queue that is none, or the wrong one."""

from __future__ import annotations

import pytest

from pd_grpc.decode import prefill_desk, reservations, service
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.reservations import Reservations, _Ask
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D240", "D241", "D246")
def everybody_waits_a_little(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._wait_or_grant

    def wait_or_grant(self, transfer, call, max_wait_s):  # type: ignore[no-untyped-def]
        right(self, transfer, call, max_wait_s or 20.0)

    patch.setattr(PrefillDesk, "_wait_or_grant", wait_or_grant)


@mutant("D241")
def no_word_of_when_to_try_again(patch: pytest.MonkeyPatch) -> None:
    right = reservations.no_blocks

    def no_blocks(needed, free):  # type: ignore[no-untyped-def]
        fault = right(needed, free)
        fault.retry_after_s = None
        return fault

    patch.setattr(prefill_desk, "no_blocks", no_blocks)


@mutant("D241")
def no_word_of_what_is_short(patch: pytest.MonkeyPatch) -> None:
    right = reservations.no_blocks

    def no_blocks(needed, free):  # type: ignore[no-untyped-def]
        fault = right(needed, free)
        fault.quota = None
        return fault

    patch.setattr(prefill_desk, "no_blocks", no_blocks)


@mutant("D242")
def the_wait_is_cut_in_half(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._wait_or_grant

    def wait_or_grant(self, transfer, call, max_wait_s):  # type: ignore[no-untyped-def]
        right(self, transfer, call, max_wait_s / 2)

    patch.setattr(PrefillDesk, "_wait_or_grant", wait_or_grant)


@mutant("D242", "D247", "D250")
def the_wait_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDesk, "_await_blocks", lambda self, transfer, leg: None)


@mutant("D243")
def the_callers_deadline_is_its_own_affair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service.DecodeService, "_shrink_wait", lambda self, request, context: None)


@mutant("D244")
def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    def next_fitting(self, held_back):  # type: ignore[no-untyped-def]
        if not self._waiting or held_back:
            return None
        grant_id, ask = next(reversed(self._waiting.items()))
        return grant_id if self._cache.has_room(*ask) else None

    patch.setattr(Reservations, "next_fitting", next_fitting)


@mutant("D245")
def whoever_fits_goes_first(patch: pytest.MonkeyPatch) -> None:
    def next_fitting(self, held_back):  # type: ignore[no-untyped-def]
        fitting = (g for g, ask in self._waiting.items() if self._cache.has_room(*ask))
        return next(fitting, None)

    patch.setattr(Reservations, "next_fitting", next_fitting)


@mutant("D246")
def newcomers_go_first(patch: pytest.MonkeyPatch) -> None:
    right = Reservations.request

    def request(self, grant_id, blocks, names, held_back):  # type: ignore[no-untyped-def]
        ask = _Ask(blocks, names)
        return self._try(grant_id, ask) or right(self, grant_id, blocks, names, held_back)

    patch.setattr(Reservations, "request", request)


@mutant("D247")
def one_refused_is_all_refused(patch: pytest.MonkeyPatch) -> None:
    def waited_long_enough(self, transfer):  # type: ignore[no-untyped-def]
        leg = transfer.prefill
        self._refuse_waiting(transfer, list(leg.calls), self._no_blocks(leg))

    patch.setattr(PrefillDesk, "waited_long_enough", waited_long_enough)


@mutant("D247")
def only_the_first_caller_hears(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk.granted

    def granted(self, transfer):  # type: ignore[no-untyped-def]
        calls = transfer.prefill.calls if transfer.prefill is not None else {}
        unheard = {call: calls.pop(call) for call in list(calls)[1:]}
        right(self, transfer)
        calls.update(unheard)

    patch.setattr(PrefillDesk, "granted", granted)


@mutant("D248")
def whoever_leaves_takes_the_place_along(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk.allocate_call_ended

    def ended(self, event):  # type: ignore[no-untyped-def]
        transfer = self._ledger.of_call(event.call)
        if transfer is not None:
            self._ledger.reservations.leave(transfer.grant_id)
        right(self, event)

    patch.setattr(PrefillDesk, "allocate_call_ended", ended)


@mutant("D249")
def nobody_leaves_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDesk, "allocate_call_ended", lambda self, event: None)


@mutant("D249", "D250")
def a_refusal_is_the_end(patch: pytest.MonkeyPatch) -> None:
    def abandon(self, transfer, fault):  # type: ignore[no-untyped-def]
        end = fault or Fault(Reason.RELEASED, "nobody waits for it")
        self._ledger.end(transfer, DecodeState.FAILED, end)

    patch.setattr(PrefillDesk, "_abandon", abandon)


@mutant("D251")
def the_stage_is_not_named(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.end

    def end(self, transfer, state, fault=None, **options):  # type: ignore[no-untyped-def]
        if fault is not None:
            fault = Fault(fault.reason, fault.message)
        right(self, transfer, state, fault, **options)

    patch.setattr(Ledger, "end", end)


@mutant("D252")
def the_budget_waits_too(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.set_budget

    def set_budget(self, transfer, until):  # type: ignore[no-untyped-def]
        if transfer.state is not DecodeState.WAITING:
            right(self, transfer, until + 10.0)

    patch.setattr(Ledger, "set_budget", set_budget)


@mutant("D253")
def a_full_queue_is_a_full_pool(patch: pytest.MonkeyPatch) -> None:
    def queue_full(who, needed, free):  # type: ignore[no-untyped-def]
        return reservations.no_blocks(needed, free)

    patch.setattr(reservations, "queue_full", queue_full)


@mutant("D254")
def the_lease_begins_with_the_question(patch: pytest.MonkeyPatch) -> None:
    right_create, right_grant = Ledger.create, Ledger.grant
    asked: dict[str, float] = {}

    def create(self, key, state, budget_s):  # type: ignore[no-untyped-def]
        transfer = right_create(self, key, state, budget_s)
        asked[transfer.grant_id] = self.now
        return transfer

    def grant(self, transfer, holding):  # type: ignore[no-untyped-def]
        right_grant(self, transfer, holding)
        self.leases.start(transfer.grant_id, asked[transfer.grant_id])

    patch.setattr(Ledger, "create", create)
    patch.setattr(Ledger, "grant", grant)
