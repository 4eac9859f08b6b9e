"""D20x: Allocate gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.decode import checks, prefill_desk
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol import refs
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import decode_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def _answer(patch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Change every grant before it is sent."""
    right = PrefillDesk._cache_info

    def cache_info(self, transfer):  # type: ignore[no-untyped-def]
        response = right(self, transfer)
        change(response)
        return response

    patch.setattr(PrefillDesk, "_cache_info", cache_info)


def _request(patch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Change every Allocate before it is checked."""
    right = checks.check_allocate

    def check(request, limits, negotiated):  # type: ignore[no-untyped-def]
        changed = decode_pb2.AllocateRequest()
        changed.CopyFrom(request)
        change(changed)
        right(changed, limits, negotiated)

    patch.setattr(prefill_desk, "check_allocate", check)


@mutant("D200")
def only_whole_blocks_are_wanted(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._cache_info

    def cache_info(self, transfer):  # type: ignore[no-untyped-def]
        response = right(self, transfer)
        if transfer.prefill.request.prompt_tokens % self._limits.block_size:
            response.wanted[0].count -= 1
        return response

    patch.setattr(PrefillDesk, "_cache_info", cache_info)


@mutant("D200")
def cached_without_a_cache(patch: pytest.MonkeyPatch) -> None:
    _answer(patch, lambda response: setattr(response, "cached_tokens", 16))


@mutant("D201")
def the_grant_is_named_after_the_transfer(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.create
    made: list[str] = []

    def create(self, key, state, budget_s):  # type: ignore[no-untyped-def]
        made[:] = [key.transfer_id]
        return right(self, key, state, budget_s)

    def init(self, config, pool, sessions, mint, epoch):  # type: ignore[no-untyped-def]
        right_init(self, config, pool, sessions, lambda p: made[0] if p == "g" else mint(p), epoch)

    right_init = Ledger.__init__
    patch.setattr(Ledger, "create", create)
    patch.setattr(Ledger, "__init__", init)


@mutant("D202")
def a_grant_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    _answer(patch, lambda response: response.lease.CopyFrom(duration(0)))


@mutant("D202")
def a_grant_without_shards(patch: pytest.MonkeyPatch) -> None:
    _answer(patch, lambda response: response.ClearField("shards"))


@mutant("D203")
def no_epoch_is_any_epoch(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_ref
    patch.setattr(prefill_desk, "check_ref", lambda ref, here, any_epoch: right(ref, here, True))


@mutant("D204")
def any_transfer_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refs, "transfer_id_errors", lambda transfer_id, field: [])


@mutant("D204")
def a_transfer_id_of_128_is_too_long(patch: pytest.MonkeyPatch) -> None:
    right = refs.transfer_id_errors
    patch.setattr(refs, "transfer_id_errors", lambda name, field: right(name + "x", field))


@mutant("D205")
def attempts_count_from_zero(patch: pytest.MonkeyPatch) -> None:
    right = refs.ref_errors
    patch.setattr(
        checks, "ref_errors", lambda ref: [e for e in right(ref) if e.field != "ref.attempt"]
    )


@mutant("D206")
def an_empty_prompt(patch: pytest.MonkeyPatch) -> None:
    _request(patch, lambda r: setattr(r, "prompt_tokens", r.prompt_tokens or 1))


@mutant("D207")
def an_empty_output(patch: pytest.MonkeyPatch) -> None:
    _request(patch, lambda r: setattr(r, "max_new_tokens", r.max_new_tokens or 1))


@mutant("D208")
def any_digest(patch: pytest.MonkeyPatch) -> None:
    _request(patch, lambda r: setattr(r, "prompt_digest", r.prompt_digest.ljust(32)[:32]))


@mutant("D209")
def any_request_id(patch: pytest.MonkeyPatch) -> None:
    _request(patch, lambda r: r.ClearField("request_id"))


@mutant("D209")
def a_request_id_is_a_key(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_allocate
    seen: set[str] = set()

    def check(request, limits, negotiated):  # type: ignore[no-untyped-def]
        right(request, limits, negotiated)
        if request.request_id in seen:
            raise Fault(Reason.DUPLICATE_REQUEST, "the request is in flight")
        seen.update([request.request_id] if request.request_id else [])

    patch.setattr(prefill_desk, "check_allocate", check)


@mutant("D210")
def too_long_is_too_large(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_length

    def check_length(prompt, new, limits, field):  # type: ignore[no-untyped-def]
        right(min(prompt, limits.max_model_len - 1), new, limits, field)

    patch.setattr(checks, "check_length", check_length)


@mutant("D211")
def what_never_fits_may_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "check_blocks", lambda tokens, limits: None)


@mutant("D211")
def a_whole_pool_is_too_much(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_blocks
    patch.setattr(checks, "check_blocks", lambda tokens, limits: right(tokens + 1, limits))


@mutant("D212")
def max_wait_makes_a_body_another(patch: pytest.MonkeyPatch) -> None:
    def body_of(request):  # type: ignore[no-untyped-def]
        return request.SerializeToString(deterministic=True)

    patch.setattr(prefill_desk, "body_of", body_of)


@mutant("D213")
def the_digest_is_the_body(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_desk, "body_of", lambda request: request.prompt_digest)


@mutant("D213")
def another_body_ends_the_first(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._allocate

    def allocate(self, call, request):  # type: ignore[no-untyped-def]
        try:
            right(self, call, request)
        except Fault as fault:
            if fault.reason is Reason.DUPLICATE_TRANSFER:
                transfer = self._ledger.of_key(refs.key_of(request.ref))
                self._ledger.end(transfer, DecodeState.FAILED, fault)
            raise

    patch.setattr(PrefillDesk, "_allocate", allocate)


@mutant("D214")
def no_budget_is_any_budget(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._budget

    def budget(self, request):  # type: ignore[no-untyped-def]
        try:
            return right(self, request)
        except Fault:
            return self._ledger.config.request_budget_s

    patch.setattr(PrefillDesk, "_budget", budget)


@mutant("D215", "D252")
def the_last_budget_counts(patch: pytest.MonkeyPatch) -> None:
    def narrow(self, transfer, budget_s):  # type: ignore[no-untyped-def]
        self.set_budget(transfer, self.now + budget_s)

    patch.setattr(Ledger, "narrow_budget", narrow)


@mutant("D216", "D217")
def kv_is_always_needed(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._allocate

    def allocate(self, call, request):  # type: ignore[no-untyped-def]
        request.kv_needed = True
        right(self, call, request)

    patch.setattr(PrefillDesk, "_allocate", allocate)


@mutant("D218")
def every_hash_is_a_hit(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._cache_info

    def cache_info(self, transfer):  # type: ignore[no-untyped-def]
        response = right(self, transfer)
        hits = len(transfer.prefill.request.block_hashes)
        response.cached_tokens = hits * self._limits.block_size
        if hits:
            del response.wanted[:]
        return response

    patch.setattr(PrefillDesk, "_cache_info", cache_info)


@mutant("D219")
def an_unset_budget_is_none(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._budget

    def budget(self, request):  # type: ignore[no-untyped-def]
        request.budget.SetInParent()
        return right(self, request)

    patch.setattr(PrefillDesk, "_budget", budget)
