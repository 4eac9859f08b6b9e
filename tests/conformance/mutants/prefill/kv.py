"""P3xx: KV gone wrong on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.prefill import grants, handover, placement
from pd_grpc.prefill.decode_faults import as_fault
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.protocol.faults import Code, TransportFault
from pd_grpc.transport import inline
from pd_grpc.transport.base import LayerRun
from pd_grpc.transport.inline import InlineStream, InlineTransport
from pd_grpc.v1 import transfer_pb2
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant


@mutant("P301")
def open_names_no_grant(patch: pytest.MonkeyPatch) -> None:
    right = InlineTransport.open

    def wrong(self, endpoint, message, *rest):  # type: ignore[no-untyped-def]
        message.ClearField("grant_id")
        return right(self, endpoint, message, *rest)

    patch.setattr(InlineTransport, "open", wrong)


@mutant("P302")
def opened_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    right = InlineStream._send

    async def wrong(self, message):  # type: ignore[no-untyped-def]
        sent = await right(self, message)
        if isinstance(message, transfer_pb2.TransferRequest) and message.HasField("open"):
            self._listener.opened([], 1 << 20)
        return sent

    patch.setattr(InlineStream, "_send", wrong)


@mutant("P303")
def no_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inline, "checksum", lambda pieces: 0)


@mutant("P304")
def blocks_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = HostKvMemory.read
    patch.setattr(
        HostKvMemory, "read", lambda self, blocks, *layers: right(self, blocks[::-1], *layers)
    )


@mutant("P305")
def everything_is_sent(patch: pytest.MonkeyPatch) -> None:
    right = grants.send_plan

    def wrong(grant, shard, record, layout):  # type: ignore[no-untyped-def]
        plan = right(grant, shard, record, layout)
        return replace(plan, wanted=((0, layout.blocks_for(plan.tokens)),))

    patch.setattr(handover, "send_plan", wrong)


@mutant("P306")
def no_stream_for_nothing(patch: pytest.MonkeyPatch) -> None:
    right = Handover.starting

    def wrong(self, record, now):  # type: ignore[no-untyped-def]
        if record.grant.wanted:
            right(self, record, now)

    patch.setattr(Handover, "starting", wrong)


@mutant("P307")
def sums_that_are_wrong(patch: pytest.MonkeyPatch) -> None:
    right = TransferSender.end

    def wrong(self, now):  # type: ignore[no-untyped-def]
        end = right(self, now)
        return None if end is None else (end[0] + 1, end[1])

    patch.setattr(TransferSender, "end", wrong)


@mutant("P308")
def the_window_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    right = TransferSender.opened
    patch.setattr(
        TransferSender,
        "opened",
        lambda self, verified, window_bytes, now: right(self, verified, 1 << 20, now),
    )


@mutant("P309")
def everything_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    right = TransferSender.opened

    def wrong(self, verified, window_bytes, now):  # type: ignore[no-untyped-def]
        for layer in self._layers:
            layer.state = bytearray(len(layer.state))
        return right(self, (), window_bytes, now)

    patch.setattr(TransferSender, "opened", wrong)


@mutant("P310")
def a_stream_without_chunks_is_not_ended(patch: pytest.MonkeyPatch) -> None:
    right = TransferSender.end
    patch.setattr(
        TransferSender, "end", lambda self, now: right(self, now) if self._stream_chunks else None
    )


@mutant("P311")
def every_shard_gets_every_layer(patch: pytest.MonkeyPatch) -> None:
    def wrong(grant, strand, record, layout):  # type: ignore[no-untyped-def]
        every = tuple(LayerRun(g, 0, x.layers) for g, x in enumerate(layout.groups))
        return replace(grants.send_plan(grant, strand, record, layout), layers=every)

    patch.setattr(handover, "send_plan", wrong)


@mutant("P312")
def the_shards_of_the_welcome(patch: pytest.MonkeyPatch) -> None:
    right_welcomed, right_grant = DecodeSession._welcomed, grants.read_grant
    welcomed = []

    def note(self, welcome, now):  # type: ignore[no-untyped-def]
        welcomed.append(welcome)
        return right_welcomed(self, welcome, now)

    def wrong(endpoint, decode, response, *rest):  # type: ignore[no-untyped-def]
        del response.shards[:]
        response.shards.extend(welcomed[-1].shards)
        return right_grant(endpoint, decode, response, *rest)

    patch.setattr(DecodeSession, "_welcomed", note)
    patch.setattr(placement, "read_grant", wrong)


@mutant("P313", "P316")
def a_refused_stream_is_opened_again(patch: pytest.MonkeyPatch) -> None:
    right = Handover.broken

    def wrong(self, event, now):  # type: ignore[no-untyped-def]
        lost = TransportFault(Code.UNAVAILABLE, "whatever it was")
        right(self, replace(event, fault=lost), now)

    patch.setattr(Handover, "broken", wrong)


@mutant("P314")
def a_silent_shard_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferSender, "deadline", lambda self: None)


@mutant("P315")
def a_bad_range_is_the_callers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        handover,
        "_of_transfer",
        lambda fault, record: as_fault(fault, record.grant.endpoint, "transfer"),
    )


@mutant("P317")
def every_shard_gets_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    right = HostKvMemory.read

    def wrong(self, blocks, group, layer, layers, heads=None):  # type: ignore[no-untyped-def]
        return right(self, blocks, group, layer, layers, heads and (0, heads[1]))

    patch.setattr(HostKvMemory, "read", wrong)
