"""D34x: a D that is careless about which shard of P brings what."""

from __future__ import annotations

import pytest

from pd_grpc.decode import incoming
from pd_grpc.decode.incoming import IncomingGrant
from pd_grpc.decode.sender_shard import part_sent, sender_index
from pd_grpc.engine.memory import HostKvMemory
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D343")
def the_first_end_completes(patch: pytest.MonkeyPatch) -> None:
    right = IncomingGrant.end

    def wrong(self, incoming):  # type: ignore[no-untyped-def]
        self.expected = 0
        right(self, incoming)
        return True

    patch.setattr(IncomingGrant, "end", wrong)


@mutant("D343")
def every_head_goes_where_the_first_is(patch: pytest.MonkeyPatch) -> None:
    right = HostKvMemory.write

    def wrong(self, blocks, group, layer, layers, payload, heads=None):  # type: ignore[no-untyped-def]
        heads = None if heads is None else (0, heads[1])
        right(self, blocks, group, layer, layers, payload, heads)

    patch.setattr(HostKvMemory, "write", wrong)


@mutant("D344")
def what_others_bring_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    def wrong(message, common, others, layout):  # type: ignore[no-untyped-def]
        return part_sent(message, common, (), layout)

    patch.setattr(incoming, "part_sent", wrong)


@mutant("D345")
def whoever_has_ended_has_sent_all(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, incoming):  # type: ignore[no-untyped-def]
        incoming.ended = True
        return all(each.ended for each in self.incoming.values())

    patch.setattr(IncomingGrant, "end", wrong)


@mutant("D346")
def who_does_not_say_is_the_first(patch: pytest.MonkeyPatch) -> None:
    def wrong(message, senders, layout):  # type: ignore[no-untyped-def]
        return sender_index(message, senders, layout) if message.HasField("sender") else 0

    patch.setattr(incoming, "sender_index", wrong)
