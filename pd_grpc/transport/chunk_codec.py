"""KV chunks on and off the wire without needless copies.

What goes over the wire is plain protobuf, and stock stubs understand it. A chunk is written in one
join of its header and the pieces of its payload, straight out of the pool, and read as a header and
a view of the payload, which the stock parser would copy. That works because the payload is the last
field: what is laid out otherwise, or is no chunk, goes through the stock code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import google_crc32c
import numpy as np

from pd_grpc.v1 import transfer_pb2

SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["TransferService"].full_name
TRANSFER_METHOD = f"/{SERVICE}/Transfer"

_VARINT, _LENGTH, _FIXED32 = 0, 2, 5
"""Wire types, the lower three bits of a tag."""


def _tag(field: int, wire_type: int) -> int:
    return field << 3 | wire_type


_KV_CHUNK = transfer_pb2.KvChunk
_CHUNK_TAG = bytes([_tag(transfer_pb2.TransferRequest.CHUNK_FIELD_NUMBER, _LENGTH)])
_PAYLOAD_TAG = _tag(_KV_CHUNK.PAYLOAD_FIELD_NUMBER, _LENGTH)
_CRC_TAG = _tag(_KV_CHUNK.CRC32C_FIELD_NUMBER, _FIXED32)
_RANGE_TAGS = frozenset(
    _tag(field, _VARINT)
    for field in (
        _KV_CHUNK.GROUP_FIELD_NUMBER,
        _KV_CHUNK.LAYER_START_FIELD_NUMBER,
        _KV_CHUNK.LAYER_COUNT_FIELD_NUMBER,
        _KV_CHUNK.BLOCK_START_FIELD_NUMBER,
        _KV_CHUNK.BLOCK_COUNT_FIELD_NUMBER,
        _KV_CHUNK.HEAD_START_FIELD_NUMBER,
        _KV_CHUNK.HEAD_COUNT_FIELD_NUMBER,
    )
)
_UINT32_BYTES = 5
"""The longest varint of 32 bits."""


class OutgoingChunk(NamedTuple):
    """A chunk to be sent: `header` without payload, and the payload's pieces in order."""

    header: transfer_pb2.KvChunk
    pieces: Sequence[memoryview]


class IncomingChunk(NamedTuple):
    """A chunk that came: `header` without payload, and a view of the payload's bytes, read-only."""

    header: transfer_pb2.KvChunk
    payload: memoryview


IncomingRequest: TypeAlias = transfer_pb2.TransferRequest | IncomingChunk
"""A TransferRequest; one that is a chunk always comes as `IncomingChunk`."""


def serialize_request(request: transfer_pb2.TransferRequest | OutgoingChunk) -> bytes:
    """The message on the wire. The pieces of a chunk are read here, and copied once."""
    if not isinstance(request, OutgoingChunk):
        return request.SerializeToString()
    size = sum(piece.nbytes for piece in request.pieces)
    header = request.header.SerializeToString()
    if size:
        header += bytes([_PAYLOAD_TAG]) + _varint(size)
    return b"".join((_CHUNK_TAG, _varint(len(header) + size), header, *request.pieces))


def parse_request(data: bytes) -> IncomingRequest:
    """The message of the wire, with the content that stock code reads. DecodeError exactly when
    stock code raises it. The payload of a chunk keeps `data` alive."""
    found = _find_payload(data)
    if found is not None:
        start, end, payload = found
        return IncomingChunk(_KV_CHUNK.FromString(data[start:end]), memoryview(data)[payload:])
    return split_chunk(transfer_pb2.TransferRequest.FromString(data))


def split_chunk(message: transfer_pb2.TransferRequest) -> IncomingRequest:
    """A message that stock code has read. Its chunk, if it is one, loses its payload."""
    if message.WhichOneof("message") != "chunk":
        return message
    payload = memoryview(message.chunk.payload)
    message.chunk.ClearField("payload")
    return IncomingChunk(message.chunk, payload)


def checksum(pieces: Iterable[memoryview]) -> int:
    """CRC-32C of the bytes of all pieces in order, without joining them."""
    crc = 0
    for piece in pieces:
        # google_crc32c takes no memoryview; an array over one it takes, and copies nothing.
        crc = google_crc32c.extend(crc, np.frombuffer(piece, np.uint8))
    return crc


def _find_payload(data: bytes) -> tuple[int, int, int] | None:
    """Where the header starts and ends and where the payload starts, if `data` is nothing but a
    chunk, its header known fields alone, its payload last. Anything unusual is left to stock code:
    None does not mean that `data` is no chunk."""
    if not data.startswith(_CHUNK_TAG):
        return None
    size, start = _read_varint(data, len(_CHUNK_TAG))
    if start + size != len(data):
        return None
    at = start
    while at < len(data):
        tag = data[at]
        if tag in _RANGE_TAGS:
            _, at = _read_varint(data, at + 1)
        elif tag == _CRC_TAG:
            at += 1 + 4
        elif tag == _PAYLOAD_TAG:
            size, payload = _read_varint(data, at + 1)
            return (start, at, payload) if payload + size == len(data) else None
        else:
            return None
    return None


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and where it ends: beyond the end of `data` if it is cut off or too
    long."""
    value = 0
    for i, byte in enumerate(data[at : at + _UINT32_BYTES]):
        value |= (byte & 0x7F) << 7 * i
        if byte <= 0x7F:
            return value, at + i + 1
    return 0, len(data) + 1
