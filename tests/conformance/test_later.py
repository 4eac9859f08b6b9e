"""Messages of a later version: what is known of them stays, and what is not is there."""

from __future__ import annotations

from google.protobuf.unknown_fields import UnknownFieldSet

from pd_grpc.conformance.later import later
from pd_grpc.v1 import decode_pb2, layout_pb2


def test_every_message_within_has_a_field_that_nobody_knows() -> None:
    layouts = [layout_pb2.KvLayout(model="a"), layout_pb2.KvLayout(model="b")]
    hello = decode_pb2.Hello(decode_name="d", layouts=layouts)
    found = later(hello)
    assert [len(UnknownFieldSet(m)) for m in (found, *found.layouts)] == [1, 1, 1]


def test_what_is_known_is_as_it_was() -> None:
    hello = decode_pb2.Hello(decode_name="d", layouts=[layout_pb2.KvLayout(model="a")])
    found = decode_pb2.Hello.FromString(later(hello).SerializeToString())
    found.DiscardUnknownFields()
    assert found == hello


def test_the_message_given_is_left_alone() -> None:
    beat = decode_pb2.Heartbeat(sequence=3)
    later(beat)
    assert not len(UnknownFieldSet(beat))
