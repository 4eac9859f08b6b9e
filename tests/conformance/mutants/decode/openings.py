"""D33x and D34x: a shard that is careless about whom it lets in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode import incoming, session_ids, transfer_checks
from pd_grpc.decode.receiver import Receiver, _Wanted
from pd_grpc.decode.session_ids import SessionIds
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import Mismatch
from pd_grpc.protocol.shards import unbuilt_part
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before_check(patch: pytest.MonkeyPatch, field: str, value: Any) -> None:
    """Take `field` of open for something else before it is checked."""
    right = transfer_checks.check_open

    def wrong(message: Any, decode_epoch: int, *rest: Any) -> None:
        at = message.ref if field == "decode_epoch" else message
        if field == "sender":
            at.ClearField(field)
        else:
            setattr(at, field, decode_epoch if value is None else value)
        right(message, decode_epoch, *rest)

    patch.setattr("pd_grpc.decode.receiver.check_open", wrong)


def forgive(patch: pytest.MonkeyPatch, part: str) -> None:
    """Do not compare one part of what a stream was opened for with its grant."""
    right = Receiver._attach

    def wrong(self, stream, grant_id, grant):  # type: ignore[no-untyped-def]
        state = self._streams[stream]
        key = grant.key if part == "key" else state.wanted.key
        state.wanted = _Wanted(key, grant.owner if part == "owner" else state.wanted.owner)
        return right(self, stream, grant_id, grant)

    patch.setattr(Receiver, "_attach", wrong)


def misname(patch: pytest.MonkeyPatch, path: str, name: str) -> None:
    """Call a field that needs what is not built by another name than its path."""
    right = transfer_checks.check_open

    def wrong(message: Any, decode_epoch: int, *rest: Any) -> None:
        try:
            right(message, decode_epoch, *rest)
        except Fault as fault:
            if fault.metadata.get("feature") == path:
                raise Fault(fault.reason, fault.message, {"feature": name}) from None
            raise

    patch.setattr("pd_grpc.decode.receiver.check_open", wrong)


@mutant("D330")
def early_chunks_are_dropped(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._chunk

    def wrong(self, stream, state, chunk, payload):  # type: ignore[no-untyped-def]
        return right(self, stream, state, chunk, payload) if state.incoming is not None else []

    patch.setattr(Receiver, "_chunk", wrong)


@mutant("D331")
def an_early_end_ends_with_ok(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._stream_end

    def wrong(self, stream, state, end):  # type: ignore[no-untyped-def]
        return (
            right(self, stream, state, end)
            if state.incoming is not None
            else self._end(stream, None)
        )

    patch.setattr(Receiver, "_stream_end", wrong)


@mutant("D332")
def a_ref_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer_checks, "ref_errors", lambda ref, prefix: [])


@mutant("D333")
def an_unknown_session_is_somebody(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, session_id):  # type: ignore[no-untyped-def]
        return self._owners.get(session_id) or list(self._owners.values())[-1]

    patch.setattr(SessionIds, "owner_of", wrong)


@mutant("D334")
def the_last_session_is_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_ids, "IDS_KEPT", 1)


@mutant("D335")
def any_epoch_is_ours(patch: pytest.MonkeyPatch) -> None:
    before_check(patch, "decode_epoch", None)


@mutant("D336")
def any_prefill_may_write(patch: pytest.MonkeyPatch) -> None:
    forgive(patch, "owner")


@mutant("D337")
def any_transfer_of_a_prefill_may_write(patch: pytest.MonkeyPatch) -> None:
    forgive(patch, "key")


@mutant("D338")
def any_transport_is_inline(patch: pytest.MonkeyPatch) -> None:
    before_check(patch, "transport", 0)


@mutant("D338", "D809")
def a_transport_is_named_by_its_value(patch: pytest.MonkeyPatch) -> None:
    misname(patch, "open.transport", "TRANSPORT_NIXL")


@mutant("D339")
def senders_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(incoming, "sender_index", lambda message, senders, layout: 0)


@mutant("D342")
def what_a_sender_shares_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer_checks, "unbuilt_part", lambda shard: None)


@mutant("D342")
def senders_are_refused_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    def wrong(shard: Any) -> Mismatch | None:
        lacks = unbuilt_part(shard)
        return None if lacks is None else replace(lacks, field="")

    patch.setattr(transfer_checks, "unbuilt_part", wrong)


@mutant("D340")
def any_shard_is_this_one(patch: pytest.MonkeyPatch) -> None:
    before_check(patch, "shard_index", 0)


@mutant("D341")
def an_unknown_grant_is_refused_at_once(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._open

    def wrong(self, stream, state, message, now):  # type: ignore[no-untyped-def]
        if message.grant_id not in self._grants:
            raise Fault(Reason.UNKNOWN_TRANSFER, "nobody knows this grant")
        return right(self, stream, state, message, now)

    patch.setattr(Receiver, "_open", wrong)
