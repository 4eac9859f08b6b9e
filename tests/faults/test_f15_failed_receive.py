"""F15: an answer never goes on after KV that was received wrongly, and never ends with OK."""

from __future__ import annotations

import asyncio
import socket

from pd_grpc.conformance.router.line import Line
from pd_grpc.engine.sim_reference import SimKv
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.lines import line_to
from tests.prefill.cluster import SMALL, Request, answer_to, request_to, running


class Spoiler(Line):
    """A line that spoils one byte where certain bytes pass towards the instance."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:0")
        self.victim = b""
        self.spoiled = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await super().take(_Spoiled(self, reader), writer)


class _Spoiled(asyncio.StreamReader):
    """What a spoiler reads from a caller."""

    def __init__(self, spoiler: Spoiler, caller: asyncio.StreamReader) -> None:
        super().__init__()
        self._spoiler, self._caller = spoiler, caller

    async def read(self, n: int = -1) -> bytes:
        data = bytearray(await self._caller.read(n))
        found = data.find(self._spoiler.victim) if self._spoiler.victim else -1
        if found >= 0:
            data[found] ^= 1
            self._spoiler.spoiled += 1
        return bytes(data)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_bytes_of_kv(request: Request) -> bytes:
    """What stands at the head of the first chunk: one head of the first token."""
    config = EngineConfig.model_validate({"engine": "sim", "block_size": SMALL["block_size"]})
    return SimKv(config).append(request.tokens[0])[: config.sim_head_dim]


async def test_one_wrong_byte_on_the_way_fails_the_request_and_no_other() -> None:
    """F15: between a real P and a real D."""
    port = _free_port()
    async with running() as cluster, line_to(f"127.0.0.1:{port}", Spoiler()) as line:
        assert isinstance(line, Spoiler)
        p = await cluster.prefill()
        d = await cluster.decode(bulk_port=port, bulk_advertise=line.endpoint)
        spoiled = request_to(d, random_seed=1)
        line.victim = _first_bytes_of_kv(spoiled)
        good = [request_to(d, random_seed=n) for n in range(2, 6)]
        outcomes = await asyncio.gather(*(cluster.run(p, d, r) for r in [spoiled, *good]))
        assert line.spoiled == 1
        prefill, generate = outcomes.pop(0)
        assert isinstance(generate.fault, Fault)
        assert (generate.fault.code, generate.fault.reason) == (
            Code.UNAVAILABLE,
            Reason.KV_CORRUPT,
        )
        # P may hear first, in answer to the first token, that D has ended the transfer.
        assert isinstance(prefill.fault, Fault)
        assert prefill.fault.reason in (Reason.KV_CORRUPT, Reason.RELEASED)
        # The first token is P's own, and rests on no KV that was sent.
        assert generate.tokens in ([], answer_to(spoiled)[:1])
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in good]
