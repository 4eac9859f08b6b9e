"""Rebuilds KV blocks from captured Transfer messages, with nothing but the generated messages.

What layout.proto and transfer.proto say of the bytes, written down a second time: a block is, in
this order and without padding, group -> layer -> plane -> head -> token -> dimension, and a chunk
is a run of blocks restricted to some layers and, as its stream says, some heads. Any language can
do the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd_grpc.v1 import layout_pb2, transfer_pb2

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int8": 1, "uint8": 1}


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def plane_bytes(layout: layout_pb2.KvLayout, plane: layout_pb2.Plane) -> int:
    """Bytes of one plane of one layer in one block."""
    return plane.heads * layout.block_size * plane.head_dim * DTYPE_BYTES[plane.dtype]


def layer_bytes(layout: layout_pb2.KvLayout, group: layout_pb2.KvGroup) -> int:
    """Bytes of one layer in one block."""
    return sum(plane_bytes(layout, plane) for plane in group.planes)


def rebuild(layout: layout_pb2.KvLayout, streams: Iterable[Iterable[bytes]]) -> dict[int, bytes]:
    """Every block by its logical number, in the canonical order, from the streams of one grant,
    whatever layers and heads each of them brings."""
    sizes = [layer_bytes(layout, group) for group in layout.groups]
    starts = [sum(sizes[i] * layout.groups[i].layers for i in range(g)) for g in range(len(sizes))]
    block_bytes = sum(n * group.layers for n, group in zip(sizes, layout.groups, strict=True))
    blocks: dict[int, bytearray] = {}
    for captured in streams:
        chunks = size = 0
        sends = layout_pb2.KvPart()
        for data in captured:
            message = transfer_pb2.TransferRequest.FromString(data)
            if message.WhichOneof("message") == "open":
                sends = message.open.sends
            elif message.WhichOneof("message") == "end":
                assert (message.end.chunks, message.end.bytes) == (chunks, size)
            else:
                chunk = message.chunk
                assert crc32c(chunk.payload) == chunk.crc32c
                chunks, size, taken = chunks + 1, size + len(chunk.payload), 0
                for i in range(chunk.block_count * chunk.layer_count):
                    number = chunk.block_start + i // chunk.layer_count
                    layer = chunk.layer_start + i % chunk.layer_count
                    block = blocks.setdefault(number, bytearray(block_bytes))
                    at = starts[chunk.group] + layer * sizes[chunk.group]
                    for plane in layout.groups[chunk.group].planes:
                        head = plane_bytes(layout, plane) // plane.heads
                        n = (sends.head_count or plane.heads) * head
                        first = at + sends.head_start * head
                        block[first : first + n] = chunk.payload[taken : taken + n]
                        at, taken = at + plane.heads * head, taken + n
                assert taken == len(chunk.payload)
    return {number: bytes(block) for number, block in blocks.items()}


def token_kv(layout: layout_pb2.KvLayout, block: bytes, slot: int) -> bytes:
    """One token's KV out of a block: group -> layer -> plane -> head -> dimension."""
    found, at = b"", 0
    for group in layout.groups:
        for _ in range(group.layers):
            for plane in group.planes:
                row = plane.head_dim * DTYPE_BYTES[plane.dtype]
                for _ in range(plane.heads):
                    found += block[at + slot * row : at + (slot + 1) * row]
                    at += layout.block_size * row
    return found
