"""P4xx: first tokens and hand-offs gone wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pd_grpc.engine.base import SampleSpec
from pd_grpc.prefill import handover, machine, scheduler
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.states import PrefillState, Stream
from pd_grpc.prefill.view import handed_off
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant
from tests.conformance.mutants.prefill.wire import Change, before_call, before_event


@mutant("P401")
def the_first_token_comes_after_the_kv(patch: pytest.MonkeyPatch) -> None:
    right_send, right_completed = Handover._send_first_token, Handover.completed

    def wrong_send(self, record, now):  # type: ignore[no-untyped-def]
        if all(stream is Stream.COMPLETED for stream in record.streams.values()):
            right_send(self, record, now)

    def wrong_completed(self, key, shard, now):  # type: ignore[no-untyped-def]
        right_completed(self, key, shard, now)
        record = self._requests.in_flight.get(key)
        if record is not None and record.first_token is not None:
            wrong_send(self, record, now)  # type: ignore[no-untyped-call]

    patch.setattr(Handover, "_send_first_token", wrong_send)
    patch.setattr(Handover, "completed", wrong_completed)


@mutant("P402")
def the_token_beside(patch: pytest.MonkeyPatch) -> None:
    def change(request):  # type: ignore[no-untyped-def]
        request.tokens[0].token_id = request.tokens[0].token_id ^ 1

    before_call(patch, "send_first_token", change)


@mutant("P403")
def the_first_token_names_no_grant(patch: pytest.MonkeyPatch) -> None:
    before_call(patch, "send_first_token", lambda request: request.ClearField("grant_id"))


@mutant("P404")
def the_first_token_twice(patch: pytest.MonkeyPatch) -> None:
    before_call(patch, "send_first_token", lambda request: request.tokens.append(request.tokens[0]))


@mutant("P405")
def no_finish_reason(patch: pytest.MonkeyPatch) -> None:
    before_call(
        patch, "send_first_token", lambda request: request.tokens[0].ClearField("finish_reason")
    )


@mutant("P406")
def every_end_is_by_length(patch: pytest.MonkeyPatch) -> None:
    length = types_pb2.FINISH_REASON_LENGTH
    patch.setattr(handover, "_FINISH", dict.fromkeys(handover._FINISH, length))


@mutant("P407")
def a_seed_of_ones_own(patch: pytest.MonkeyPatch) -> None:
    seeds = itertools.count(1)

    def wrong(sampling, *rest):  # type: ignore[no-untyped-def]
        return SampleSpec(replace(sampling, seed=next(seeds)), *rest)

    patch.setattr(scheduler, "SampleSpec", wrong)


@mutant("P410")
def a_hand_off_without_kv(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, record, now):  # type: ignore[no-untyped-def]
        if record.first_token_delivered:
            self._handed_off(record, now)

    patch.setattr(Handover, "_try_hand_off", wrong)


@mutant("P411")
def a_hand_off_without_first_token(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, record, now):  # type: ignore[no-untyped-def]
        done = all(stream is Stream.COMPLETED for stream in record.streams.values())
        if done and record.state is PrefillState.SENDING:
            self._handed_off(record, now)

    patch.setattr(Handover, "_try_hand_off", wrong)


@mutant("P412")
def a_state_is_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "_TAKEN", handover._TAKEN - {types_pb2.TRANSFER_STATE_PREEMPTED})


@mutant("P413")
def an_ended_transfer_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "_TAKEN", handover._TAKEN | handover._GONE)
    patch.setattr(handover, "_GONE", frozenset())


@mutant("P414")
def any_state_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "_TAKEN", frozenset(range(100)))


@mutant("P420")
def queued_is_not_told(patch: pytest.MonkeyPatch) -> None:
    before_event(patch, lambda event: None if event.HasField("queued") else event)


@mutant("P421")
def progress_by_the_chunk(patch: pytest.MonkeyPatch) -> None:
    def change(event):  # type: ignore[no-untyped-def]
        if event.HasField("progress"):
            event.progress.computed_tokens = (event.progress.computed_tokens - 1) % 64 + 1
        return event

    before_event(patch, change)


@mutant("P422")
def the_hand_off_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    right = Requests.emit

    def wrong(self, record, response):  # type: ignore[no-untyped-def]
        right(self, record, response)
        if response.HasField("handed_off"):
            right(self, record, response)

    patch.setattr(Requests, "emit", wrong)


def _in_handed_off(patch: pytest.MonkeyPatch, change: Change) -> None:
    right = handed_off

    def wrong(record):  # type: ignore[no-untyped-def]
        message = right(record)
        change(message)
        return message

    patch.setattr(machine, "handed_off", wrong)


@mutant("P423")
def the_decode_is_not_named(patch: pytest.MonkeyPatch) -> None:
    _in_handed_off(patch, lambda message: message.decode.ClearField("epoch"))


@mutant("P424")
def the_first_token_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    def change(message):  # type: ignore[no-untyped-def]
        message.usage.completion_tokens -= 1

    _in_handed_off(patch, change)


@mutant("P425")
def prepare_takes_no_time(patch: pytest.MonkeyPatch) -> None:
    _in_handed_off(patch, lambda message: message.timings.ClearField("prepare"))
