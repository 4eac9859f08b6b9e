"""What our codec writes and reads is what stock protobuf writes and reads."""

from __future__ import annotations

from typing import Any

import google_crc32c
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_grpc.transport import chunk_codec as codec
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
NUMBERS = ("group", "layer_start", "layer_count", "block_start", "block_count", "crc32c")
ranges = dict.fromkeys(NUMBERS, uint32)
headers = st.builds(transfer_pb2.KvChunk, **ranges)
chunks = st.builds(
    transfer_pb2.KvChunk,
    **ranges,
    payload=st.binary(max_size=300),
    descriptor=st.none() | st.builds(layout_pb2.MemoryDescriptor, kind=st.just(1)),
)
opens = st.builds(
    transfer_pb2.TransferOpen,
    session_id=st.text(max_size=8),
    grant_id=st.text(max_size=8),
    ref=st.builds(types_pb2.TransferRef, attempt=uint32),
)
ends = st.builds(transfer_pb2.TransferEnd, chunks=uint64, bytes=uint64)
requests = st.one_of(
    st.builds(transfer_pb2.TransferRequest),
    st.builds(transfer_pb2.TransferRequest, chunk=chunks),
    st.builds(transfer_pb2.TransferRequest, open=opens),
    st.builds(transfer_pb2.TransferRequest, end=ends),
)


def whole(found: codec.IncomingRequest) -> transfer_pb2.TransferRequest:
    """As stock code would have it."""
    if not isinstance(found, codec.IncomingChunk):
        return found
    message = transfer_pb2.TransferRequest(chunk=found.header)
    assert not message.chunk.payload
    message.chunk.payload = bytes(found.payload)
    return message


def read_by(parse: Any, data: bytes) -> transfer_pb2.TransferRequest | None:
    """What a parser makes of bytes, less what nobody knows; None where it rejects them."""
    try:
        message: transfer_pb2.TransferRequest = parse(data)
    except DecodeError:
        return None
    message.DiscardUnknownFields()
    return message


def ours(data: bytes) -> transfer_pb2.TransferRequest:
    return whole(codec.parse_request(data))


def agree(data: bytes) -> None:
    stock = read_by(transfer_pb2.TransferRequest.FromString, data)
    assert read_by(ours, data) == stock


def field(number: int, body: bytes) -> bytes:
    """A length-delimited field of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(body)]) + body


HEADER = transfer_pb2.KvChunk(group=1, layer_count=300, block_count=2, crc32c=7).SerializeToString()
PAYLOAD = field(15, b"payload")


@given(headers, st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_chunk_in_pieces_is_written_as_stock_code_writes_it(
    header: transfer_pb2.KvChunk, pieces: list[bytes]
) -> None:
    data = codec.serialize_request(codec.OutgoingChunk(header, [memoryview(p) for p in pieces]))
    message = transfer_pb2.TransferRequest(chunk=header)
    message.chunk.payload = b"".join(pieces)
    assert data == message.SerializeToString()
    assert ours(data) == message


@given(requests)
@settings(max_examples=300, deadline=None)
def test_what_stock_code_writes_is_read_as_it_was(message: transfer_pb2.TransferRequest) -> None:
    assert ours(message.SerializeToString()) == message
    assert codec.serialize_request(message) == message.SerializeToString()


@given(st.binary(max_size=64))
@settings(max_examples=500, deadline=None)
def test_of_any_bytes_ours_and_stock_code_read_the_same(data: bytes) -> None:
    agree(data)


# Fragments that a chunk may consist of, in any order and number, whole and broken.
fragments = st.one_of(
    st.just(HEADER),
    st.just(PAYLOAD),
    st.binary(max_size=6).map(lambda b: field(15, b)),
    st.binary(max_size=3),
    st.sampled_from(
        [
            b"\x08\x80\x00",  # a group of 0 in two bytes
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # one of 64 bits
            b"\x88\x00\x01",  # its tag in two bytes
            b"\xfa\x00\x01x",  # the payload's tag in two bytes
            b"\x7a\x81\x00x",  # its length in two bytes
            b"\x0a\x01x",  # group with the wire type of a string
            b"\x35\x01\x02\x03\x04",
            b"\x35\x01",  # a checksum cut off
            b"\xa0\x06\x01",  # unknown field 100
            field(7, field(2, b"x")),  # a descriptor
            b"\x0b\x0c",  # a group that begins and ends
            b"\x0c",  # one that only ends
        ]
    ),
)


@given(st.lists(fragments, max_size=5), st.lists(fragments, max_size=2), st.integers(-2, 2))
@settings(max_examples=1000, deadline=None)
@example([HEADER, PAYLOAD], [], 0)
@example([HEADER, PAYLOAD, PAYLOAD], [], 0)
@example([PAYLOAD, HEADER], [], 0)
def test_of_chunks_of_any_layout_ours_and_stock_code_read_the_same(
    inner: list[bytes], outer: list[bytes], wrong_by: int
) -> None:
    body = b"".join(inner)
    size = min(max(0, len(body) + wrong_by), 127)
    agree(bytes([0x12, size]) + body + b"".join(outer))


@given(requests, st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_of_messages_cut_off_ours_and_stock_code_read_the_same(
    message: transfer_pb2.TransferRequest, size: int
) -> None:
    agree(message.SerializeToString()[:size])


def test_a_chunk_cut_off_is_rejected() -> None:
    data = field(2, HEADER + PAYLOAD)
    for size in range(1, len(data)):
        with pytest.raises(DecodeError):
            codec.parse_request(data[:size])


def test_the_payload_of_the_usual_layout_is_not_copied() -> None:
    data = field(2, HEADER + PAYLOAD)
    found = codec.parse_request(data)
    assert isinstance(found, codec.IncomingChunk)
    assert bytes(found.payload) == b"payload" and found.payload.obj is data
    assert found.payload.readonly
    assert found.header == transfer_pb2.KvChunk.FromString(HEADER)


@pytest.mark.parametrize(
    "inner",
    [
        PAYLOAD + HEADER,
        HEADER + field(15, b"earlier") + PAYLOAD,
        HEADER + b"\xa0\x06\x01" + PAYLOAD,
        HEADER + PAYLOAD + b"\xa0\x06\x01",
        HEADER + b"\xfa\x00" + PAYLOAD[1:],
    ],
    ids=["payload first", "payload twice", "unknown inside", "unknown last", "a long tag"],
)
def test_any_other_layout_is_read_all_the_same(inner: bytes) -> None:
    found = codec.parse_request(field(2, inner))
    assert isinstance(found, codec.IncomingChunk)
    assert bytes(found.payload) == b"payload" and found.header.layer_count == 300


def test_an_unknown_field_beside_the_chunk_is_tolerated() -> None:
    found = codec.parse_request(field(2, HEADER + PAYLOAD) + b"\xa0\x06\x01")
    assert isinstance(found, codec.IncomingChunk) and bytes(found.payload) == b"payload"


@given(st.lists(st.binary(max_size=100), max_size=6))
def test_the_checksum_of_pieces_is_that_of_their_join(pieces: list[bytes]) -> None:
    views = [memoryview(bytearray(piece)).toreadonly() for piece in pieces]
    assert codec.checksum(views) == google_crc32c.value(b"".join(pieces))
