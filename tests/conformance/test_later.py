"""Messages of a later version: what is known of them stays, and what is not is there."""

from __future__ import annotations

from google.protobuf.unknown_fields import UnknownFieldSet

from pd_grpc.conformance.later import UNKNOWN_VALUE, later, with_unknown
from pd_grpc.v1 import decode_pb2, layout_pb2, sampling_pb2


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


def test_a_value_that_nobody_knows_replaces_one_or_many() -> None:
    scope = with_unknown(sampling_pb2.RequestScope(tenant="t"), "direction")
    assert (scope.direction, scope.tenant) == (UNKNOWN_VALUE, "t")
    inline = decode_pb2.Hello(transports=[layout_pb2.TRANSPORT_INLINE])
    assert list(with_unknown(inline, "transports").transports) == [UNKNOWN_VALUE]
    assert list(inline.transports) == [layout_pb2.TRANSPORT_INLINE]


def test_no_enum_of_the_protocol_has_the_value() -> None:
    for file in (decode_pb2, layout_pb2, sampling_pb2):
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            assert UNKNOWN_VALUE not in enum.values_by_number
