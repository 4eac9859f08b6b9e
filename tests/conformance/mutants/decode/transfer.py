"""D30x to D32x: a shard that takes KV in wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode import transfer_checks
from pd_grpc.decode.incoming import IncomingGrant
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.receiver import Receiver, Respond
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.faults import Fault, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.transport.chunk_codec import checksum
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before_chunk(patch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Let `spoil(receiver, state, chunk, payload)` at each chunk before it is looked at."""
    right = Receiver._chunk

    def wrong(self, stream, state, chunk, payload):  # type: ignore[no-untyped-def]
        spoil(self, state, chunk, payload)
        return right(self, stream, state, chunk, payload)

    patch.setattr(Receiver, "_chunk", wrong)


def tolerate(patch: pytest.MonkeyPatch, field: str) -> None:
    """Take chunks whose `field` is out of bounds."""
    right = transfer_checks.check_range

    def wrong(*arguments: Any) -> None:
        try:
            right(*arguments)
        except Fault as fault:
            if [f.field for f in fault.fields] != [field]:
                raise

    patch.setattr("pd_grpc.decode.receiver.check_range", wrong)


@mutant("D301")
def chunks_must_come_in_order(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        at = (chunk.layer_start, chunk.block_start)
        if at < getattr(state, "last", (0, 0)):
            raise bad_request([FieldError("chunk", "comes out of order")])
        state.last = at

    before_chunk(patch, spoil)


@mutant("D302")
def everything_counts_as_verified(patch: pytest.MonkeyPatch) -> None:
    right = IncomingGrant.opened

    def wrong(self, message):  # type: ignore[no-untyped-def]
        incoming = right(self, message)
        incoming.verified[0][0][:] = b"\1" * len(incoming.verified[0][0])
        return incoming

    patch.setattr(IncomingGrant, "opened", wrong)


@mutant("D303")
def acks_name_the_whole_layer(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._chunk

    def wrong(self, stream, state, chunk, payload):  # type: ignore[no-untyped-def]
        actions = right(self, stream, state, chunk, payload)
        for action in actions:
            if isinstance(action, Respond):
                named = action.message.ack.ranges[0]
                named.layer_start, named.layer_count = 0, 4
        return actions

    patch.setattr(Receiver, "_chunk", wrong)


@mutant("D304")
def the_window_bounds_a_single_chunk(patch: pytest.MonkeyPatch) -> None:
    def wrong(unacknowledged: int, payload_bytes: int, window_bytes: int) -> None:
        if unacknowledged + payload_bytes > window_bytes:
            raise bad_request([FieldError("chunk.payload", "is larger than the window")])

    patch.setattr("pd_grpc.decode.receiver.check_window", wrong)


@mutant("D305")
def layers_come_before_blocks(patch: pytest.MonkeyPatch) -> None:
    right = HostKvMemory.write

    def wrong(self, blocks, group, layer, layers, payload, heads=None):  # type: ignore[no-untyped-def]
        size = payload.nbytes // (len(blocks) * layers)
        parts = [bytes(payload[at : at + size]) for at in range(0, payload.nbytes, size)]
        turned = [parts[n * len(blocks) + b] for b in range(len(blocks)) for n in range(layers)]
        right(self, blocks, group, layer, layers, memoryview(b"".join(turned)))

    patch.setattr(HostKvMemory, "write", wrong)


@mutant("D306")
def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: memoryview) -> None:
        chunk.crc32c = checksum([payload])

    before_chunk(patch, spoil)


@mutant("D307")
def a_checksum_of_zero_means_none(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: memoryview) -> None:
        chunk.crc32c = chunk.crc32c or checksum([payload])

    before_chunk(patch, spoil)


@mutant("D308", "D311")
def any_layer_is_taken(patch: pytest.MonkeyPatch) -> None:
    tolerate(patch, "chunk.layer_start")


@mutant("D309")
def a_block_too_many_is_the_last(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        last = len(self._grant_of(state)[0].blocks) - chunk.block_count
        chunk.block_start = min(chunk.block_start, last)

    before_chunk(patch, spoil)


@mutant("D312")
def any_block_is_taken(patch: pytest.MonkeyPatch) -> None:
    tolerate(patch, "chunk.block_start")


@mutant("D310")
def any_group_is_taken(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        chunk.group = 0

    before_chunk(patch, spoil)


@mutant("D313")
def a_longer_payload_is_cut(patch: pytest.MonkeyPatch) -> None:
    tolerate(patch, "chunk.payload")
    right = HostKvMemory.write

    def wrong(self, blocks, group, layer, layers, payload, heads=None):  # type: ignore[no-untyped-def]
        size = layers * self._layout.layer_bytes(group) * len(blocks)
        right(self, blocks, group, layer, layers, payload[:size])

    patch.setattr(HostKvMemory, "write", wrong)


@mutant("D314")
def the_client_is_blamed_for_a_bad_range(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._fail

    def wrong(self, stream, state, fault):  # type: ignore[no-untyped-def]
        actions = right(self, stream, state, fault)
        for action in actions:
            if isinstance(action, ev.ReceiveFailed):
                action.fault.mapped_code = None
        return actions

    patch.setattr(Receiver, "_fail", wrong)


@mutant("D315")
def sums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._stream_end

    def wrong(self, stream, state, end):  # type: ignore[no-untyped-def]
        end.chunks, end.bytes = state.chunks, state.bytes
        return right(self, stream, state, end)

    patch.setattr(Receiver, "_stream_end", wrong)


@mutant("D316")
def an_end_is_believed(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._stream_end

    def wrong(self, stream, state, end):  # type: ignore[no-untyped-def]
        state.incoming.missing = 0
        return right(self, stream, state, end)

    patch.setattr(Receiver, "_stream_end", wrong)


@mutant("D317")
def descriptors_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        chunk.ClearField("descriptor")

    before_chunk(patch, spoil)


@mutant("D318")
def a_second_open_begins_anew(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._open

    def wrong(self, stream, state, message, now):  # type: ignore[no-untyped-def]
        state.wanted = None
        return right(self, stream, state, message, now)

    patch.setattr(Receiver, "_open", wrong)


@mutant("D319")
def a_range_comes_only_once(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        row = state.incoming.verified[0][chunk.layer_start]
        if row[chunk.block_start]:
            raise bad_request([FieldError("chunk.block_start", "has come already")])

    before_chunk(patch, spoil)


@mutant("D320")
def what_comes_last_is_kept(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, state: Any, chunk: Any, payload: Any) -> None:
        first, end = chunk.block_start, chunk.block_start + chunk.block_count
        blocks = self._grant_of(state)[0].blocks[first:end]
        self._transports[state.transport].land(chunk, payload, blocks, fresh=True, audited=False)

    before_chunk(patch, spoil)


@mutant("D321")
def chunks_renew_no_lease(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: DecodeMachine, event: ev.ReceiveProgress) -> None:
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self._handoff.kv_started(transfer)

    patch.setattr(DecodeMachine, "_receive_progress", wrong)


@mutant("D322")
def any_chunk_renews_the_lease(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._chunk

    def wrong(self, stream, state, chunk, payload):  # type: ignore[no-untyped-def]
        actions = right(self, stream, state, chunk, payload)
        return [*actions, ev.ReceiveProgress(state.grant_id, payload.nbytes)]

    patch.setattr(Receiver, "_chunk", wrong)


@mutant("D323")
def the_session_hears_of_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_tell", lambda self, session, key, state, fault: None)


@mutant("D324")
def chunks_go_to_the_grant_opened_last(patch: pytest.MonkeyPatch) -> None:
    right = Receiver._grant_of

    def wrong(self, state):  # type: ignore[no-untyped-def]
        _, incoming = right(self, state)
        return list(self._grants.values())[-1], incoming

    patch.setattr(Receiver, "_grant_of", wrong)
