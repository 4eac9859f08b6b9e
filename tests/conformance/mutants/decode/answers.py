"""D46x: a D that answers wrongly, or says wrong things of its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.decode.actions import TokenOut
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.outbox import TokenOutbox
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.transfer import usage_of
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.stopping import Finish, StopRule
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D460")
def a_prompt_counts_in_whole_blocks(patch: pytest.MonkeyPatch) -> None:
    right = HandOff.kv_completed

    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        size = self._ledger.config.block_size
        right(self, transfer)
        transfer.kv_tokens = -(-transfer.kv_tokens // size) * size

    patch.setattr(HandOff, "kv_completed", wrong)


@mutant("D461")
def answers_get_no_more_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_make_room", lambda self, transfer: True)


@mutant("D462")
def the_seed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._sample

    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        spec = right(self, transfer)
        return replace(spec, sampling=replace(spec.sampling, seed=0))

    patch.setattr(Scheduler, "_sample", wrong)


@mutant("D463")
def stop_ids_are_not_watched_for(patch: pytest.MonkeyPatch) -> None:
    right = StopRule.push

    def wrong(self, token_id):  # type: ignore[no-untyped-def]
        self._stop_ids = frozenset()
        return right(self, token_id)

    patch.setattr(StopRule, "push", wrong)


@mutant("D464")
def min_tokens_is_over_at_once(patch: pytest.MonkeyPatch) -> None:
    right = SimEngine._choose

    def wrong(self, table, spec):  # type: ignore[no-untyped-def]
        return right(self, table, replace(spec, generated=spec.sampling.min_tokens))

    patch.setattr(SimEngine, "_choose", wrong)


@mutant("D465")
def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    right = StopRule.push

    def wrong(self, token_id):  # type: ignore[no-untyped-def]
        finish = right(self, token_id)
        if finish is Finish.LENGTH and self.generated == self._sampling.max_tokens:
            return None
        return finish

    patch.setattr(StopRule, "push", wrong)


@mutant("D466")
def what_the_client_has_is_shown_again(patch: pytest.MonkeyPatch) -> None:
    right = HandOff.push

    def wrong(self, transfer, token, *arguments, **named):  # type: ignore[no-untyped-def]
        if not transfer.output:
            transfer.held += [TokenOut(t) for t in transfer.client.generated]
        return right(self, transfer, token, *arguments, **named)

    patch.setattr(HandOff, "push", wrong)


@mutant("D467")
def the_first_token_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "pd_grpc.decode.ledger.usage_of",
        lambda prompt, generated, spared: usage_of(prompt, generated - 1, spared),
    )


@mutant("D468")
def every_message_has_a_finish_reason(patch: pytest.MonkeyPatch) -> None:
    right = TokenOutbox._message

    def wrong(self):  # type: ignore[no-untyped-def]
        message = right(self)
        message.finish_reason = message.finish_reason or types_pb2.FINISH_REASON_LENGTH
        return message

    patch.setattr(TokenOutbox, "_message", wrong)


@mutant("D469")
def nobody_says_who_decoded(patch: pytest.MonkeyPatch) -> None:
    right = TokenOutbox.__init__

    def wrong(self, decode_instance):  # type: ignore[no-untyped-def]
        right(self, "")

    patch.setattr(TokenOutbox, "__init__", wrong)


@mutant("D470")
def an_empty_message_comes_first(patch: pytest.MonkeyPatch) -> None:
    right = TokenOutbox.next

    async def wrong(self):  # type: ignore[no-untyped-def]
        if not hasattr(self, "began"):
            self.began = True
            return inference_pb2.GenerateResponse()
        return await right(self)

    patch.setattr(TokenOutbox, "next", wrong)
