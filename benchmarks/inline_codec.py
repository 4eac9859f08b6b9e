"""How fast KV chunks go through our codec, against stock protobuf, in one run.

Prints one JSON object: MiB/s of payload over a loopback gRPC stream between two processes, both
with grpc.aio, chunks of 1 MiB in pieces of 64 KiB. "stock" joins the pieces, builds a
TransferRequest and serializes it; the reader parses it and takes the payload out of it. "codec" is
`pd_grpc.transport.chunk_codec` on both sides. Both check crc32c on both sides, and copy the payload
into a pool. "kept" is with `keep_freed_memory` in both processes, "default" without. The ratios are
what to compare: figures of different runs and machines are not comparable.

    python benchmarks/inline_codec.py [--rounds 3] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import google_crc32c
import grpc
import grpc.aio

from pd_grpc.servers.allocator import keep_freed_memory
from pd_grpc.transport import chunk_codec
from pd_grpc.v1 import transfer_pb2

MIB = 1 << 20
PIECE = 64 << 10
WINDOW = 8
"""Chunks that are not yet acknowledged, at most."""

Pieces = list[memoryview]


class Way(NamedTuple):
    """One way to write and read a chunk; `read` checks it and gives its payload."""

    write: Callable[[Pieces], bytes]
    read: Callable[[bytes], memoryview]


def write_stock(pieces: Pieces) -> bytes:
    payload = b"".join(pieces)
    chunk = transfer_pb2.KvChunk(
        layer_count=16, block_count=4, crc32c=google_crc32c.value(payload), payload=payload
    )
    return transfer_pb2.TransferRequest(chunk=chunk).SerializeToString()


def read_stock(data: bytes) -> memoryview:
    chunk = transfer_pb2.TransferRequest.FromString(data).chunk
    payload = chunk.payload
    assert google_crc32c.value(payload) == chunk.crc32c
    return memoryview(payload)


def write_codec(pieces: Pieces) -> bytes:
    header = transfer_pb2.KvChunk(
        layer_count=16, block_count=4, crc32c=chunk_codec.checksum(pieces)
    )
    return chunk_codec.serialize_request(chunk_codec.OutgoingChunk(header, pieces))


def read_codec(data: bytes) -> memoryview:
    chunk = chunk_codec.parse_request(data)
    assert isinstance(chunk, chunk_codec.IncomingChunk)
    assert chunk_codec.checksum([chunk.payload]) == chunk.header.crc32c
    return chunk.payload


WAYS = {"stock": Way(write_stock, read_stock), "codec": Way(write_codec, read_codec)}


def serve(kept: bool, ports: Any) -> None:
    """The reader's process."""
    if kept:
        keep_freed_memory()
    asyncio.run(_serve(ports))


async def _serve(ports: Any) -> None:
    pool = memoryview(bytearray(64 * MIB))

    def handler(way: Way) -> Any:
        async def take(requests: Any, context: Any) -> None:
            at = 0
            async for payload in requests:
                pool[at : at + payload.nbytes] = payload
                at = (at + payload.nbytes) % pool.nbytes
                await context.write(b"")

        return grpc.stream_stream_rpc_method_handler(take, request_deserializer=way.read)

    server = grpc.aio.server()
    methods = {name: handler(way) for name, way in WAYS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ports.put(port)
    await server.wait_for_termination()


def send(kept: bool, port: int, rounds: int, seconds: float, results: Any) -> None:
    """The writer's process."""
    if kept:
        keep_freed_memory()
    results.put(asyncio.run(_send(port, rounds, seconds)))


async def _send(port: int, rounds: int, seconds: float) -> dict[str, float]:
    """MiB/s of each way, the median of rounds that take turns."""
    pool = memoryview(bytearray(64 * MIB)).toreadonly()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(rounds):
            for name, way in WAYS.items():
                found[name].append(await _stream(channel, name, way, pool, seconds))
    return {name: round(statistics.median(rates), 1) for name, rates in found.items()}


async def _stream(
    channel: grpc.aio.Channel, name: str, way: Way, pool: memoryview, seconds: float
) -> float:
    transfer: Any = channel.stream_stream(f"/bench/{name}", None, None)
    call = transfer(timeout=seconds + 10)
    began, sent, at = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        pieces = [pool[i : i + PIECE] for i in range(at, at + MIB, PIECE)]
        await call.write(way.write(pieces))
        sent += 1
        at = (at + MIB) % pool.nbytes
        if sent > WINDOW:
            await call.read()
    for _ in range(min(sent, WINDOW)):
        await call.read()
    rate = sent / (time.perf_counter() - began)
    call.cancel()
    return rate


def measure(kept: bool, rounds: int, seconds: float) -> dict[str, float]:
    """Both ways, in a pair of new processes."""
    spawn = multiprocessing.get_context("spawn")
    ports, results = spawn.Queue(), spawn.Queue()
    reader = spawn.Process(target=serve, args=(kept, ports), daemon=True)
    reader.start()
    port = ports.get(timeout=30)
    writer = spawn.Process(target=send, args=(kept, port, rounds, seconds, results), daemon=True)
    writer.start()
    found: dict[str, float] = results.get(timeout=30 + 4 * rounds * seconds)
    writer.join()
    reader.terminate()
    reader.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round of one way")
    options = parser.parse_args()
    default = measure(False, options.rounds, options.seconds)
    kept = measure(True, options.rounds, options.seconds)
    print(
        json.dumps(
            {
                "what": "MiB/s of KV payload, loopback, grpc.aio, 1 MiB chunks, two processes",
                "compares": "pd_grpc.transport.chunk_codec with stock protobuf, same wire format",
                "default_malloc": default,
                "kept_malloc": kept,
                "codec_over_stock": {
                    "default_malloc": round(default["codec"] / default["stock"], 2),
                    "kept_malloc": round(kept["codec"] / kept["stock"], 2),
                },
                "kept_over_default": {name: round(kept[name] / default[name], 2) for name in WAYS},
                "grpcio": grpc.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
