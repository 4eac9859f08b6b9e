"""D35x: streams that a shard does not let go on, or leaves open."""

from __future__ import annotations

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode import machine, receiver
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.v1 import transfer_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D350")
def a_half_close_fails_the_transfer(patch: pytest.MonkeyPatch) -> None:
    right = BulkServer._reading_ended

    def wrong(self, stream, outbox, done):  # type: ignore[no-untyped-def]
        state = self._receiver._streams.get(stream)
        if not done.cancelled() and state is not None:
            fault = Fault(Reason.PREFILL_LOST, "the sender left")
            self._perform(self._receiver._fail(stream, state, fault))
        right(self, stream, outbox, done)

    patch.setattr(BulkServer, "_reading_ended", wrong)


@mutant("D351")
def a_grant_goes_with_its_stream(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.stream_ended

    def wrong(self, stream):  # type: ignore[no-untyped-def]
        gone = self._streams.get(stream)
        right(self, stream)
        if gone is not None:
            self._grants.pop(gone.grant_id, None)

    patch.setattr(Receiver, "stream_ended", wrong)


@mutant("D352")
def opened_never_lists_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(receiver, "verified_ranges", lambda verified: [])


@mutant("D353")
def the_last_chunk_completes(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._chunk

    def wrong(self, stream, state, chunk, payload):  # type: ignore[no-untyped-def]
        actions = right(self, stream, state, chunk, payload)
        if not self._grants[state.grant_id].missing:
            actions.append(ev.ReceiveCompleted(state.grant_id))
        return actions

    patch.setattr(Receiver, "_chunk", wrong)


@mutant("D354")
def sums_count_every_stream(patch: pytest.MonkeyPatch) -> None:
    ended, attach = Receiver.stream_ended, Receiver._attach

    def wrong_end(self, stream):  # type: ignore[no-untyped-def]
        gone = self._streams.get(stream)
        if gone is not None and gone.grant_id in self._grants:
            self._grants[gone.grant_id].sums = (gone.chunks, gone.bytes)
        ended(self, stream)

    def wrong_attach(self, stream, grant_id, grant):  # type: ignore[no-untyped-def]
        actions = attach(self, stream, grant_id, grant)
        state = self._streams[stream]
        state.chunks, state.bytes = getattr(grant, "sums", (0, 0))
        return actions

    patch.setattr(Receiver, "stream_ended", wrong_end)
    patch.setattr(Receiver, "_attach", wrong_attach)


@mutant("D355")
def the_older_stream_stays(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._attach

    def wrong(self, stream, grant_id, grant):  # type: ignore[no-untyped-def]
        for incoming in grant.incoming.values():
            incoming.stream = None
        return right(self, stream, grant_id, grant)

    patch.setattr(Receiver, "_attach", wrong)


@mutant("D356")
def a_closed_grant_leaves_its_stream_open(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.close_grant

    def wrong(self, grant_id, fault, now):  # type: ignore[no-untyped-def]
        for incoming in self._grants[grant_id].incoming.values():
            incoming.stream = None
        return right(self, grant_id, fault, now)

    patch.setattr(Receiver, "close_grant", wrong)


@mutant("D357")
def every_closed_grant_was_released(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.close_grant

    def wrong(self, grant_id, fault, now):  # type: ignore[no-untyped-def]
        return right(self, grant_id, Fault(Reason.RELEASED, fault.message), now)

    patch.setattr(Receiver, "close_grant", wrong)


@mutant("D358")
def the_stage_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "stage_deadline", lambda stage: stage_deadline(""))


@mutant("D359")
def a_closed_grant_ends_its_stream_with_ok(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.close_grant

    def wrong(self, grant_id, fault, now):  # type: ignore[no-untyped-def]
        streams = [n for n, s in self._streams.items() if s.grant_id == grant_id]
        ended = [action for n in streams for action in self._end(n, None)]
        return [*ended, *right(self, grant_id, fault, now)]

    patch.setattr(Receiver, "close_grant", wrong)


@mutant("D360")
def a_half_close_is_out_of_order(patch: pytest.MonkeyPatch) -> None:
    right = BulkServer._reading_ended

    def wrong(self, stream, outbox, done):  # type: ignore[no-untyped-def]
        outbox.end(Fault(Reason.WRONG_STATE, "the stream ended without end", {"state": "open"}))
        right(self, stream, outbox, done)

    patch.setattr(BulkServer, "_reading_ended", wrong)


@mutant("D360")
def a_half_close_is_an_end(patch: pytest.MonkeyPatch) -> None:
    right = BulkServer._read

    async def wrong(self, stream, requests, outbox):  # type: ignore[no-untyped-def]
        await right(self, stream, requests, outbox)
        state = self._receiver._streams.get(stream)
        if state is not None:
            end = transfer_pb2.TransferEnd(chunks=state.chunks, bytes=state.bytes)
            message = transfer_pb2.TransferRequest(end=end)
            self._perform(self._receiver.message(stream, message, 0.0))

    patch.setattr(BulkServer, "_read", wrong)
