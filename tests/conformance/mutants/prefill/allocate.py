"""P20x: Allocates gone wrong."""

from __future__ import annotations

import pytest

from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.states import PrefillRecord
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import prompt_digest
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant
from tests.conformance.mutants.prefill.wire import before_call


@mutant("P201")
def generated_tokens_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def change(request):  # type: ignore[no-untyped-def]
        request.prompt_tokens -= request.sampling.max_tokens - request.max_new_tokens

    before_call(patch, "allocate", change)


@mutant("P202")
def the_whole_answer_is_still_to_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillRecord, "max_new_tokens", property(lambda self: self.sampling.max_tokens))


@mutant("P203")
def the_digest_is_of_the_prompt_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PrefillRecord,
        "prompt_digest",
        property(lambda self: prompt_digest(self.request.token_ids)),
    )


@mutant("P204")
def top_k_is_dropped(patch: pytest.MonkeyPatch) -> None:
    before_call(patch, "allocate", lambda request: request.sampling.ClearField("top_k"))


@mutant("P205")
def the_budget_is_always_the_same(patch: pytest.MonkeyPatch) -> None:
    def change(request):  # type: ignore[no-untyped-def]
        request.budget.seconds = 300

    before_call(patch, "allocate", change)


@mutant("P206")
def kv_is_always_needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillRecord, "kv_needed", property(lambda self: True))


@mutant("P207")
def request_ids_are_a_key(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._admit

    def wrong(self, request, now):  # type: ignore[no-untyped-def]
        flying = [r.request.request_id for r in self.requests.in_flight.values()]
        if request.request_id in flying:
            raise Fault(Reason.DUPLICATE_REQUEST, "the request id is in flight")
        right(self, request, now)

    patch.setattr(PrefillMachine, "_admit", wrong)
