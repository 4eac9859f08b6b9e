"""What a real P sends is, byte for byte, what the protocol's comments say."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import SimKv
from pd_grpc.prefill.server import start_prefill
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.v1 import inference_pb2, prefill_pb2, prefill_pb2_grpc
from tests.decode import plain_decoder
from tests.decode.messages import BLOCK, Request
from tests.decode.wire import CALL_S, SIM, Wire, tokens_of, wire


class Tap:
    """Passes the bytes of Transfer on to the real shard, and keeps those that P sent."""

    def __init__(self) -> None:
        self.captured: list[list[bytes]] = []
        self.shard: Any = None

    def handler(self) -> Any:
        transfer = grpc.stream_stream_rpc_method_handler(self._pass_on)
        return grpc.method_handlers_generic_handler(
            "pd_grpc.v1.TransferService", {"Transfer": transfer}
        )

    async def _pass_on(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async def kept() -> AsyncIterator[bytes]:
            mine: list[bytes] = []
            self.captured.append(mine)
            async for data in requests:
                mine.append(data)
                yield data

        transfer = self.shard.stream_stream("/pd_grpc.v1.TransferService/Transfer")
        async for answer in transfer(kept()):
            yield answer


@asynccontextmanager
async def tapped(**settings: Any) -> AsyncIterator[tuple[Wire, Tap]]:
    """A D with these settings, whose shard is reached through a tap."""
    tap = Tap()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((tap.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with wire(bulk_advertise=f"127.0.0.1:{port}", **settings) as d:
        tap.shard = grpc.aio.insecure_channel(f"127.0.0.1:{d.server.bulk.port}")
        yield d, tap
        await tap.shard.close(None)
    await server.stop(0)


async def hand_over(d: Wire, request: Request, **settings: Any) -> list[int]:
    """A real P with these settings prefills and hands over; returns the client's tokens."""
    config = PrefillConfig(**{**SIM, "name": "p", "transports": ("inline",), **settings})
    p = await start_prefill(config, SimEngine(config))
    try:
        async with grpc.aio.insecure_channel(p.endpoint) as channel:
            message = prefill_pb2.PrefillRequest(
                ref=request.ref,
                token_ids=request.prompt,
                sampling=request.sampling,
                decodes=[prefill_pb2.DecodeTarget(name="d", endpoint=d.server.endpoint)],
            )
            message.ref.ClearField("decode_epoch")
            leg = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(message, timeout=CALL_S)
            answer = await tokens_of(d.generate(request))
            events = [event.WhichOneof("event") async for event in leg]
            assert events[-1] == "handed_off"
            return answer
    finally:
        await p.stop()


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 2])
@pytest.mark.parametrize("layout", ["plain", "sliding-fp8-scale"])
async def test_blocks_rebuilt_from_captured_messages_hold_sims_kv(layout: str, length: int) -> None:
    """Of several groups and planes of unequal size, too; all of a sliding group travels."""
    settings = {"sim_layout": layout, "sim_window": BLOCK + 1}
    async with tapped(**settings) as (d, tap):
        request = d.request(prompt=list(range(100, 100 + length)), max_tokens=6)
        assert await hand_over(d, request, **settings) == d.answer(request)
        info = await d.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=CALL_S)
        blocks = plain_decoder.rebuild(info.layout, tap.captured)
        assert sorted(blocks) == list(range(-(-length // BLOCK)))
        kv = SimKv(d.config)
        for position, token in enumerate(request.prompt):
            expected = kv.append(token)
            block, slot = divmod(position, BLOCK)
            assert plain_decoder.token_kv(info.layout, blocks[block], slot) == expected
            if slot == BLOCK - 1:
                assert blocks[block] == kv.last_block(), "a whole block, byte for byte"


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"tp": 4, "pp": 2}, {"pp": 3}])
async def test_blocks_of_a_p_with_several_shards_are_rebuilt_from_all_its_streams(
    ranks: dict[str, int],
) -> None:
    """F32: whichever heads and layers each stream brings."""
    async with tapped() as (d, tap):
        request = d.request(prompt=list(range(100, 111)), max_tokens=6)
        assert await hand_over(d, request, **ranks) == d.answer(request)
        info = await d.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=CALL_S)
        assert len(tap.captured) == ranks.get("tp", 1) * ranks.get("pp", 1)
        blocks = plain_decoder.rebuild(info.layout, tap.captured)
        kv = SimKv(d.config)
        for position, token in enumerate(request.prompt):
            expected = kv.append(token)
            block, slot = divmod(position, BLOCK)
            assert plain_decoder.token_kv(info.layout, blocks[block], slot) == expected


def test_the_decoder_knows_nothing_of_ours_but_the_generated_messages() -> None:
    source = Path(plain_decoder.__file__).read_text(encoding="utf-8")
    modules = [n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)]
    assert [m for m in modules if m and "pd_grpc" in m] == ["pd_grpc.v1"]


def test_the_checksum_is_castagnolis() -> None:
    assert plain_decoder.crc32c(b"123456789") == 0xE3069283
