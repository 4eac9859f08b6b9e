"""R3xx: answers that reach the client otherwise than D gave them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.engine.text import Detokenizer
from pd_grpc.router import outbox, timing
from pd_grpc.router.outbox import Outbox
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R301")
def the_whole_answer_at_once(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.next_message

    async def wrong(self):  # type: ignore[no-untyped-def]
        while not self._machine.ended:
            self._wake.clear()
            await self._wake.wait()
        return await right(self)

    patch.setattr(RoutedCall, "next_message", wrong)


def _complete_with(patch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """`change` the client's last message."""
    right = RoutedCall._complete

    def wrong(self, message, last):  # type: ignore[no-untyped-def]
        right(self, message, last)
        change(self, message)

    patch.setattr(RoutedCall, "_complete", wrong)


@mutant("R302")
def every_end_is_that_of_length(patch: pytest.MonkeyPatch) -> None:
    def change(self, message):  # type: ignore[no-untyped-def]
        message.finish_reason = types_pb2.FINISH_REASON_LENGTH

    _complete_with(patch, change)


@mutant("R303")
def messages_without_tokens_are_left_out(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.next_message

    async def wrong(self):  # type: ignore[no-untyped-def]
        message = await right(self)
        return message if message is not None and message.token_ids else None

    patch.setattr(RoutedCall, "next_message", wrong)


@mutant("R304")
def usage_as_the_router_counts(patch: pytest.MonkeyPatch) -> None:
    def change(self, message):  # type: ignore[no-untyped-def]
        message.usage.completion_tokens = self._machine.tokens

    _complete_with(patch, change)


@mutant("R305")
def timings_without_those_of_prefill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(timing, "_OF_PREFILL", ())


@mutant("R305")
def the_first_token_takes_as_long_as_the_answer(patch: pytest.MonkeyPatch) -> None:
    right = timing.AnswerTimes.timings

    def wrong(self, now):  # type: ignore[no-untyped-def]
        self.first_token_at = now
        return right(self, now)

    patch.setattr(timing.AnswerTimes, "timings", wrong)


@mutant("R306")
def decode_is_said_to_have_prefilled(patch: pytest.MonkeyPatch) -> None:
    def change(self, message):  # type: ignore[no-untyped-def]
        message.prefill_instance = message.decode_instance

    _complete_with(patch, change)


def _push_with(patch: pytest.MonkeyPatch, text) -> None:  # type: ignore[no-untyped-def]
    """Have `text` make the text of a message of D's."""

    def wrong(self, message):  # type: ignore[no-untyped-def]
        self._token_ids += message.token_ids
        self._logprobs += message.logprobs
        self._add_text(text(self, message.token_ids))

    patch.setattr(Outbox, "push", wrong)


@mutant("R310")
def text_of_one_token_of_each_message(patch: pytest.MonkeyPatch) -> None:
    _push_with(patch, lambda self, ids: self._detokenizer.push(ids[:1]))


@mutant("R311")
def text_of_each_message_by_itself(patch: pytest.MonkeyPatch) -> None:
    _push_with(patch, lambda self, ids: self._detokenizer._tokenizer.decode(ids))


@mutant("R312")
def stop_strings_are_shown(patch: pytest.MonkeyPatch) -> None:
    right = Outbox.__init__

    def wrong(self, tokenizer, sampling, unread, generated=()):  # type: ignore[no-untyped-def]
        right(self, tokenizer, replace(sampling, stop=()), unread, generated)

    patch.setattr(Outbox, "__init__", wrong)


@mutant("R313")
def beginnings_of_stop_strings_are_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Detokenizer, "_held_back", lambda self: 0)


@mutant("R320")
def logprobs_are_left_out(patch: pytest.MonkeyPatch) -> None:
    right = Outbox.push

    def wrong(self, message):  # type: ignore[no-untyped-def]
        message.ClearField("logprobs")
        right(self, message)

    patch.setattr(Outbox, "push", wrong)


@mutant("R330")
def a_slow_reader_gets_as_many_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outbox, "MAX_TOKENS_PER_MESSAGE", 64)
