"""Each of our ends against stock stubs at the other, over sockets, with chunks of any shape."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import google_crc32c
import grpc.aio
import pytest

from pd_grpc.bench.kv.ours import Landing
from pd_grpc.bench.kv.pool import LAYERS, LAYOUT, KvPool
from pd_grpc.bench.kv.pushing import Pusher
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.chunk_codec import TRANSFER_METHOD
from pd_grpc.v1 import transfer_pb2, transfer_pb2_grpc, types_pb2

BLOCKS, POOL = 6, 16
LAYER = LAYOUT.layer_bytes(0)
CALL_S = 30.0
SEEDS = range(6)


def rectangles(draw: random.Random) -> list[tuple[int, int, int, int]]:
    """(layer, layers, block, blocks) that cover every layer of every block once, in any order."""
    open_ones, found = [(0, LAYERS, 0, BLOCKS)], []
    while open_ones:
        layer, layers, block, blocks = open_ones.pop()
        if layers * blocks * LAYER > 3 << 20 or (layers * blocks > 1 and draw.random() < 0.7):
            if blocks == 1 or (layers > 1 and draw.random() < 0.5):
                cut = draw.randrange(1, layers)
                open_ones += [(layer, cut, block, blocks)]
                open_ones += [(layer + cut, layers - cut, block, blocks)]
            else:
                cut = draw.randrange(1, blocks)
                open_ones += [(layer, layers, block, cut)]
                open_ones += [(layer, layers, block + cut, blocks - cut)]
        else:
            found.append((layer, layers, block, blocks))
    draw.shuffle(found)
    return found


def bytes_of(content: Sequence[bytes], rectangle: tuple[int, int, int, int]) -> bytes:
    layer, layers, block, blocks = rectangle
    part = slice(layer * LAYER, (layer + layers) * LAYER)
    return b"".join(each[part] for each in content[block : block + blocks])


def on_the_wire(draw: random.Random, message: transfer_pb2.TransferRequest) -> bytes:
    """As stock code writes it, or as another implementation may: the payload first, or with a field
    that is not known here yet."""
    how = draw.choice(("stock", "stock", "payload first", "unknown field"))
    if how == "stock" or message.WhichOneof("message") != "chunk":
        return message.SerializeToString()
    payload = transfer_pb2.KvChunk(payload=message.chunk.payload).SerializeToString()
    header = transfer_pb2.KvChunk()
    header.CopyFrom(message.chunk)
    header.ClearField("payload")
    body = header.SerializeToString()
    body = payload + body if how == "payload first" else body + b"\xa0\x06\x01" + payload
    size, varint = len(body), bytearray()
    while size > 0x7F:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    varint.append(size)
    return bytes([0x12, *varint]) + body


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stock_client_fills_our_pool(seed: int) -> None:
    draw = random.Random(seed)
    content = [draw.randbytes(LAYOUT.block_bytes) for _ in range(BLOCKS)]
    pool, landing = KvPool(POOL, seed=None), Landing(lands=True)
    untouched = pool.digests([range(POOL)])[0]
    about = await landing.start(pool, {})
    try:
        holdings = pool.take(1, BLOCKS, fragmented=True, seed=seed, owner="test")
        table = list(holdings[0].blocks)
        await landing.expect(["t"], [table])
        async with grpc.aio.insecure_channel(about["endpoint"]) as channel:
            transfer: Any = channel.stream_stream(
                TRANSFER_METHOD, None, transfer_pb2.TransferResponse.FromString
            )
            call = transfer(timeout=CALL_S)
            ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=1)
            opening = transfer_pb2.TransferOpen(session_id="kv-bench", grant_id="t", ref=ref)
            await call.write(transfer_pb2.TransferRequest(open=opening).SerializeToString())
            assert (await call.read()).HasField("opened")
            sent = acked = chunks = 0
            for rectangle in rectangles(draw):
                layer, layers, block, blocks = rectangle
                payload = bytes_of(content, rectangle)
                chunk = transfer_pb2.KvChunk(
                    layer_start=layer,
                    layer_count=layers,
                    block_start=block,
                    block_count=blocks,
                    crc32c=google_crc32c.value(payload),
                    payload=payload,
                )
                request = transfer_pb2.TransferRequest(chunk=chunk)
                await call.write(on_the_wire(draw, request))
                sent, chunks = sent + len(payload), chunks + 1
                while sent - acked > 4 << 20:
                    acked = (await call.read()).ack.accepted_bytes
            end = transfer_pb2.TransferEnd(chunks=chunks, bytes=sent)
            await call.write(transfer_pb2.TransferRequest(end=end).SerializeToString())
            while not (message := await call.read()).HasField("completed"):
                assert message.HasField("ack")
            assert message.completed.bytes == sent == BLOCKS * LAYOUT.block_bytes
            assert not await call.read()
        await landing.landed()
        assert b"".join(pool.memory.read(table, 0, 0, LAYERS)) == b"".join(content)
        for block in set(range(POOL)) - set(table):
            assert pool.digests([[block]])[0][0] == untouched[block]
        pool.give_back(holdings)
    finally:
        await landing.stop()
    pool.accounts.check()
    assert pool.accounts.free == POOL


class StockShard(transfer_pb2_grpc.TransferServiceServicer):
    """Puts together what comes, as the proto's comments say, with stock code alone."""

    def __init__(self, window_bytes: int) -> None:
        self.content = [bytearray(LAYOUT.block_bytes) for _ in range(BLOCKS)]
        self.largest = 0
        self._window_bytes = window_bytes

    async def Transfer(self, requests: Any, context: Any) -> None:
        chunks = accepted = 0
        async for request in requests:
            kind = request.WhichOneof("message")
            answer = transfer_pb2.TransferResponse()
            if kind == "open":
                answer.opened.window_bytes = self._window_bytes
            elif kind == "chunk":
                chunk = request.chunk
                self._take(chunk)
                chunks, accepted = chunks + 1, accepted + len(chunk.payload)
                answer.ack.accepted_bytes = accepted
                answer.ack.ranges.add(
                    group=chunk.group,
                    layer_start=chunk.layer_start,
                    layer_count=chunk.layer_count,
                    block_start=chunk.block_start,
                    block_count=chunk.block_count,
                )
            else:
                assert (request.end.chunks, request.end.bytes) == (chunks, accepted)
                answer.completed.chunks, answer.completed.bytes = chunks, accepted
            await context.write(answer)

    def _take(self, chunk: transfer_pb2.KvChunk) -> None:
        assert google_crc32c.value(chunk.payload) == chunk.crc32c
        self.largest = max(self.largest, len(chunk.payload))
        size = chunk.layer_count * LAYER
        assert len(chunk.payload) == chunk.block_count * size
        for i in range(chunk.block_count):
            at = chunk.layer_start * LAYER
            part = chunk.payload[i * size : (i + 1) * size]
            self.content[chunk.block_start + i][at : at + size] = part


@pytest.mark.parametrize("seed", SEEDS)
async def test_our_sender_fills_a_stock_server(seed: int) -> None:
    draw = random.Random(seed)
    pool = KvPool(POOL, seed=seed)
    window = draw.choice((LAYER, 1 << 20, 8 << 20))
    config = PrefillConfig(chunk_bytes=draw.choice((4096, 3 * LAYER, 1 << 20, (1 << 20) + 1)))
    server, shard = grpc.aio.server(), StockShard(window)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pusher = Pusher(LAYOUT, pool.memory, config)
    try:
        holdings = pool.take(1, BLOCKS, fragmented=True, seed=seed, owner="test")
        table = list(holdings[0].blocks)
        key = TransferKey("t", 1)
        await pusher.push(key, f"127.0.0.1:{port}", "s", "g", 1, table)
        assert b"".join(shard.content) == b"".join(pool.memory.read(table, 0, 0, LAYERS))
        assert shard.largest <= max(LAYER, min(window, config.chunk_bytes))
        pool.give_back(holdings)
    finally:
        await asyncio.to_thread(pusher.stop)
        await server.stop(0)
    pool.accounts.check()
    assert pool.accounts.free == POOL
